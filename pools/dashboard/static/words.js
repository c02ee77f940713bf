// How numbers, times and the words of the wire are said to people.

const CAUSES = {
  waiting_capacity: "no capacity is free",
  awaiting_preemption: "others are stopping for it",
  at_limit: "its team is at its limit",
  reserved_in_use: "its team's reserved share is in use",
  behind_head: "another goes before it",
  paused: "could not be placed; tried again soon",
  cordoned: "an operator has closed the pool",
  draining: "the pool is being emptied",
  no_policy: "its team has no policy here any more",
};
const REASONS = {
  reclaim: "a share was taken back",
  priority: "a higher priority",
  own: "its own team's protected work",
  operator: "an operator empties the pool",
};
const ENDS = {
  released: "given back",
  cancelled: "cancelled",
  expired: "its lease ran out",
  returned: "given back by the pool",
  stopped: "stopped",
  lost: "the pool's log was lost",
};
const STATES = {
  granted: "holds",
  preempting: "called back",
  ending: "ending",
};

export const causeWords = (cause, nominated) =>
  nominated ? `next: ${CAUSES[cause] ?? "it will be granted"}` : cause === null ? "can be granted" : CAUSES[cause] ?? cause;
export const reasonWords = (reason) => REASONS[reason] ?? reason;
export const endWords = (how, why) => (why && how === "stopped" ? why : ENDS[how] ?? how);
export const stateWords = (grant) =>
  grant.state === "granted" && !grant.placed ? "placing" : STATES[grant.state] ?? grant.state;

const units = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
];

/** `42 s`, `3 min`, `2 h 10 min`. */
export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  for (const [index, [size, unit]] of units.entries()) {
    if (whole < size) continue;
    const [next, nextUnit] = units[index + 1] ?? [1, "s"];
    const rest = Math.floor((whole % size) / next);
    return unit === "min" || rest === 0 ? `${Math.floor(whole / size)} ${unit}` : `${Math.floor(whole / size)} ${unit} ${rest} ${nextUnit}`;
  }
  return "";
}

/** The core's time: of a clock, or a scenario's seconds. */
export function clock(at, withDate = false) {
  if (at === null || at === undefined) return "";
  if (at < 1e8) return `${at.toFixed(1)} s`;
  const moment = new Date(at * 1000);
  const time = [moment.getHours(), moment.getMinutes(), moment.getSeconds()].map(two).join(":");
  return withDate ? `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())} ${time}` : time;
}

const two = (value) => String(value).padStart(2, "0");

/** `2 gpu, 500 mcpu`; every request has its one `step_run`, which says nothing. */
export function amounts(found) {
  const said = Object.entries(found).filter(([key, amount]) => amount && key !== "step_run");
  return said.map(([key, amount]) => `${number(amount)} ${key}`).join(", ") || "a slot";
}

export const number = (value) => value.toLocaleString("en");
export const plural = (count, one, many) => `${number(count)} ${count === 1 ? one : many}`;
