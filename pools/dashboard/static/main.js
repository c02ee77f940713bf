// The page: what was pushed is kept here; it is drawn as it is now, or as it was at the moment of the slider.

import { ask, listen } from "./stream.js";
import { reconcile, setHidden, setText } from "./dom.js";
import { Colours, moments } from "./model.js";
import { PoolCard } from "./pool.js";
import { Story } from "./story.js";
import { clock, duration } from "./words.js";

const ASK_PAST_AFTER_MS = 120;
const UPDATES_KEPT = 500;
const NOW_EVERY_MS = 1000;

const $ = (id) => document.getElementById(id);
const slider = $("moment");
const parts = new Map(); // as pushed
const cards = new Map();
const colours = new Colours();
const updates = []; // ms from a message's arrival until it was painted
let offset = null; // the core's time less this page's clock, in seconds
let past = null; // {at, window, pools, problem, settled: the pools are of this moment}; null: the page shows what is now
let begun = null; // when the oldest message that is not painted yet came
let isDue = false;
let asking = null;
let cleared = 0;
let connection = "";

// --- what there is

const top = () => parts.get("top") ?? { pools: [], coordinator: {}, trouble: "", live: true, namespace: "" };
const logs = () => parts.get("logs") ?? { rows: {}, trouble: "" };

function now() {
  return offset === null ? Date.now() / 1000 : Date.now() / 1000 + offset;
}

function liveWindow() {
  const to = top().live ? now() : logs().to ?? now();
  const wanted = Number($("window").value);
  const first = logs().from ?? to - 3600;
  return { from: Math.max(wanted ? to - wanted : -Infinity, Math.min(first, to - 60)), to };
}

function shownPools() {
  if (past !== null) return past.pools;
  return Object.fromEntries(top().pools.map((name) => [name, parts.get(`pool:${name}`)]).filter(([, pool]) => pool));
}

const page = {
  colours,
  show: (id) => {
    location.hash = `request=${encodeURIComponent(id)}`;
  },
  window: () => (past === null ? liveWindow() : past.window),
  moment: () => (past === null ? (top().live ? now() : logs().to ?? now()) : past.at),
  keyOf: (pool) => cards.get(pool)?.key ?? null,
  capacityOf: (pool, key) => (past?.pools[pool] ?? parts.get(`pool:${pool}`))?.capacity?.[key] ?? 0,
  lookAt: (at) => lookAt(at),
  say: (text) => {
    if (past === null) setText($("told"), text);
  },
  changed: () => setButtons(),
};
const story = new Story($("story"), () => {
  if (location.hash.startsWith("#request=")) history.pushState(null, "", location.pathname);
});

// --- drawing

function soon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
    const since = begun;
    begun = null;
    if (since !== null) afterPaint(() => measured(since));
  });
}

/** Called in a frame: runs when that frame has been painted. */
function afterPaint(run) {
  const channel = new MessageChannel();
  channel.port1.onmessage = run;
  channel.port2.postMessage(null);
}

function measured(since) {
  const took = performance.measure("pools:update", { start: since, end: performance.now() }).duration;
  updates.push(took);
  if (updates.length > UPDATES_KEPT) updates.shift();
  if (++cleared % UPDATES_KEPT === 0) performance.clearMeasures("pools:update");
}

function draw() {
  const pools = shownPools();
  const said = top();
  setText($("namespace"), said.namespace);
  const silent = said.coordinator.lost || "";
  setHidden($("trouble"), !(said.trouble || silent || past?.problem));
  setText($("trouble"), past?.problem || said.trouble || silent);
  setHidden($("logs-trouble"), !logs().trouble);
  setText($("logs-trouble"), logs().trouble ? `The past can't be shown: ${logs().trouble}` : "");
  document.documentElement.classList.toggle("past", past !== null);
  setText($("connection"), { live: said.live ? "live" : "logs only", lost: "not connected: trying again" }[connection] ?? "");
  $("connection").className = connection;
  const names = Object.keys(pools).sort();
  if (names.length || parts.has("top")) {
    $("pools").querySelector(":scope > .quiet")?.remove();
    for (const pool of names) for (const team of Object.keys(pools[pool].requesters ?? {}).sort()) colours.of(team);
    const make = (name) => {
      if (!cards.has(name)) cards.set(name, new PoolCard(name, page));
      return cards.get(name).node;
    };
    reconcile($("pools"), names, (name) => name, make, (_, name) => cards.get(name).update(pools[name], page.moment()));
  }
  drawTime();
  for (const name of names) {
    const rows = logs().rows[name];
    if (rows !== undefined) cards.get(name).timeline.follow(past === null ? rows : undefined);
    cards.get(name).timeline.draw();
  }
}

function drawTime() {
  const { from, to } = page.window();
  const moment = page.moment();
  slider.min = from;
  slider.max = to;
  slider.step = Math.max((to - from) / 1000, 0.05);
  if (past === null) slider.value = to;
  const words = past === null ? (top().live ? `now, ${clock(moment, true)}` : `the last row, ${clock(moment, true)}`) : `${clock(moment, true)}, ${duration(now() - moment)} ago`;
  setText($("moment-text"), words);
  slider.setAttribute("aria-valuetext", words);
  setHidden($("back-to-now"), past === null);
  slider.disabled = Boolean(logs().trouble) || !parts.has("logs");
  setButtons();
}

function changes() {
  return moments([...cards.values()].flatMap((card) => card.timeline.grants));
}

function setButtons() {
  const all = changes();
  const moment = page.moment();
  const { from } = page.window();
  $("earlier").disabled = !all.some((at) => at < moment && at >= from);
  $("later").disabled = past === null;
}

// --- the past

/** Shows the moment, or what is now with null. */
function lookAt(at) {
  if (at === null) {
    past = null;
    asking?.abort();
    soon();
    return;
  }
  const window = past?.window ?? liveWindow();
  const kept = shownPools();
  past = { at, window: at < window.from ? { from: at, to: window.to } : window, pools: kept, problem: "", settled: false };
  slider.value = at;
  soon();
  askPast();
}

let pastTimer = null;
function askPast() {
  clearTimeout(pastTimer);
  pastTimer = setTimeout(async () => {
    asking?.abort();
    const mine = (asking = new AbortController());
    const at = past?.at;
    if (at === undefined) return;
    try {
      const said = await ask("at", { moment: `@${at}` }, mine.signal);
      if (past?.at === at) past = { ...past, pools: said.pools, problem: "", settled: true };
    } catch (problem) {
      if (mine.signal.aborted || past?.at !== at) return;
      past = { ...past, problem: problem.message };
    }
    soon();
  }, ASK_PAST_AFTER_MS);
}

slider.addEventListener("input", () => {
  const { to } = page.window();
  const at = Number(slider.value);
  lookAt(at >= to - Number(slider.step) / 2 ? null : at);
});
$("back-to-now").addEventListener("click", () => {
  lookAt(null);
  slider.focus();
});
$("earlier").addEventListener("click", () => {
  const before = changes().filter((at) => at < page.moment());
  if (before.length) lookAt(before[before.length - 1]);
});
$("later").addEventListener("click", () => {
  const moment = page.moment();
  lookAt(changes().find((at) => at > moment) ?? null);
});
$("window").addEventListener("change", () => {
  if (past !== null) {
    const live = liveWindow();
    past.window = past.at < live.from ? { from: past.at, to: live.to } : live;
  }
  soon();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && past !== null && !$("story").open) lookAt(null);
});

// --- a request

function fromHash() {
  let id = "";
  try {
    if (location.hash.startsWith("#request=")) id = decodeURIComponent(location.hash.slice("#request=".length));
  } catch {
    // an address that somebody cut off
  }
  if (id) story.show(id);
  else story.close();
}
addEventListener("hashchange", fromHash);
addEventListener("popstate", fromHash);
$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("find-id").value.trim();
  if (id) page.show(id);
});

// --- the theme

const stored = (() => {
  try {
    return localStorage.getItem("theme") ?? "";
  } catch {
    return "";
  }
})();
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").value = theme;
}
setTheme(["light", "dark"].includes(stored) ? stored : "");
$("theme").addEventListener("change", () => {
  setTheme($("theme").value);
  try {
    localStorage.setItem("theme", $("theme").value);
  } catch {
    // kept for this page only
  }
});

// --- what is pushed

listen(
  (news, startedAt) => {
    for (const [part, said] of Object.entries(news)) parts.set(part, said);
    for (const part of [...parts.keys()]) if (part.startsWith("pool:") && !top().pools.includes(part.slice(5))) parts.delete(part);
    if (news.at !== undefined && news.at !== null) offset = news.at - Date.now() / 1000;
    begun ??= startedAt;
    story.changed();
    soon();
  },
  (state) => {
    connection = state;
    soon();
  },
);
setInterval(() => {
  if (past === null && !document.hidden && parts.has("top")) soon();
}, NOW_EVERY_MS);
fromHash();

/** For tests and for the curious: what is shown, and how long updates took. */
window.poolsPage = Object.freeze({
  shown: () => ({ at: past === null ? null : past.at, settled: past === null || past.settled, pools: shownPools() }),
  updates: () => [...updates],
  lookAt,
});
