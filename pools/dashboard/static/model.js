// From what the server says to what is drawn. Pure functions: no document, no clock.

const TEAM_COLOURS = 10;

/** Each team keeps the colour that it got first. */
export class Colours {
  #known = new Map();

  of(team) {
    if (!this.#known.has(team)) this.#known.set(team, this.#known.size % TEAM_COLOURS);
    return this.#known.get(team);
  }
}

/** Teams of a pool: the highest priority first, those without a policy last. */
export function teams(pool) {
  const entries = Object.entries(pool.requesters ?? {});
  return entries.sort(([a, x], [b, y]) => (y.priority ?? -Infinity) - (x.priority ?? -Infinity) || (a < b ? -1 : 1));
}

/** What a team holds of a key: in its share, borrowed, on its way out; and what is booked for it next. */
export function usage(team, key) {
  const held = (team.held ?? team.booked)[key] ?? 0;
  const leaving = team.leaving?.[key] ?? 0;
  const reserved = team.reserved[key] ?? 0;
  const steady = Math.max(0, held - leaving);
  const share = Math.min(steady, reserved);
  return { held, reserved, share, borrowed: steady - share, leaving, nominated: team.nominated?.[key] ?? 0 };
}

/** The parts of a pool's bar, left to right, and of the line under it: who comes next. */
export function segments(pool, key) {
  const parts = [];
  const next = [];
  let held = 0;
  for (const [name, team] of teams(pool)) {
    const use = usage(team, key);
    held += use.held;
    for (const kind of ["share", "borrowed"]) if (use[kind] > 0) parts.push({ team: name, kind, amount: use[kind] });
    if (use.nominated > 0) next.push({ team: name, kind: "nominated", amount: use.nominated });
  }
  for (const [name, team] of teams(pool)) {
    const use = usage(team, key);
    if (use.leaving > 0) parts.push({ team: name, kind: "leaving", amount: use.leaving });
  }
  const capacity = pool.capacity[key] ?? 0;
  const free = Math.max(0, capacity - held);
  return { parts, next, free, capacity, held, total: Math.max(capacity, held) };
}

/**
 * Where each grant lies in a chart whose height is the pool's capacity: the lowest gap that is large enough; several,
 * if none is; above the capacity only what is held beyond it. Grants come in the order of their rows, and keep their place.
 */
export class Layout {
  #places = new Map(); // name -> list of [low, high]
  #running = []; // names of those that may still hold
  #row = 0; // of the last grant that has a place
  high = 0;

  constructor(key, capacity) {
    this.key = key;
    this.capacity = capacity;
  }

  /** `grants`: name to grant, all that there are; those that are new get their place. */
  add(grants) {
    const fresh = [...grants].filter(([, grant]) => grant.row > this.#row).sort(([, a], [, b]) => a.row - b.row);
    for (const [name, grant] of fresh) {
      this.#row = grant.row;
      const amount = grant.amounts[this.key] ?? 0;
      this.#running = this.#running.filter((each) => holdsAt(grants.get(each), grant.row));
      const taken = this.#running.flatMap((each) => this.#places.get(each));
      const spans = amount === 0 ? [] : placeIn(gaps(taken, this.capacity), amount);
      this.#places.set(name, spans);
      if (spans.length) {
        this.#running.push(name);
        this.high = Math.max(this.high, spans[spans.length - 1][1]);
      }
    }
  }

  of(name) {
    return this.#places.get(name) ?? [];
  }

  forget(name) {
    this.#places.delete(name);
    this.#running = this.#running.filter((each) => each !== name);
  }
}

const holdsAt = (grant, row) => grant !== undefined && (grant.ended_at === null || grant.seq > row);

function gaps(taken, capacity) {
  const found = [];
  let low = 0;
  for (const [from, to] of [...taken.sort(([a], [b]) => a - b), [capacity, capacity]]) {
    if (from > low) found.push([low, from]);
    low = Math.max(low, to);
  }
  return { found, low };
}

function placeIn({ found, low }, amount) {
  const whole = found.find(([from, to]) => to - from >= amount);
  if (whole !== undefined) return [[whole[0], whole[0] + amount]];
  const spans = [];
  let left = amount;
  for (const [from, to] of found) {
    const part = Math.min(left, to - from);
    spans.push([from, from + part]);
    left -= part;
    if (left === 0) return spans;
  }
  return [...spans, [low, low + left]];
}

/** Moments at which something changes in these grants, in order. */
export function moments(grants) {
  const found = new Set();
  for (const grant of grants) {
    for (const at of [grant.granted_at, grant.told_at, grant.ended_at]) if (at !== null) found.add(at);
  }
  return [...found].sort((a, b) => a - b);
}

/** Round times for an axis: about `most` of them between two times. */
export function ticks(from, to, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((each) => (to - from) / each <= most) ?? Math.ceil((to - from) / most / 604800) * 604800;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}
