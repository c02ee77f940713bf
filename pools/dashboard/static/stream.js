// What the server pushes, and what it is asked for.

/** Calls `heard(parts, startedAt)` for each message, and `state("live" | "lost")` as the connection comes and goes. */
export function listen(heard, state) {
  const events = new EventSource("/api/events");
  events.onopen = () => state("live");
  events.onerror = () => state("lost"); // the browser tries again by itself
  events.onmessage = (event) => {
    const startedAt = performance.now();
    heard(JSON.parse(event.data), startedAt);
  };
}

/** Answers of the server; throws Error with its own words for what it refuses. */
export async function ask(path, query, signal) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(query)}`, { signal, cache: "no-store" });
  let said = null;
  try {
    said = await answer.json();
  } catch {
    // not JSON: a proxy's page, perhaps
  }
  if (!answer.ok || said === null) throw new Error(said?.error ?? `the server answered ${answer.status}`);
  return said;
}
