// The service's interface under v1: requests with the token, problems as errors, events.
const KEY = "stagewright-token", RETRY_SECONDS = 1, POLL_SECONDS = 2, MOST_FAILURES = 2;
let ahead = 0;  // seconds that the service's clock is ahead of this one's

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY),
};

export const now = () => Date.now() / 1000 + ahead;

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function call(path, options = {}) {
  const headers = {...options.headers};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  let response;
  try {
    response = await fetch(new URL(`../v1/${path}`, import.meta.url), {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the service does not answer");
  }
  const date = Date.parse(response.headers.get("Date"));
  if (date && Math.abs(date / 1000 - now()) > 2) ahead = (date - Date.now()) / 1000;
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Problem(response.status, told.detail ?? `the service answers ${response.status}`);
}

export async function read(path, options) {
  const response = await call(path, options);
  return response.status === 204 ? null : response.json();
}

export const exampleOf = async (kind) => (await fetch(new URL(`example-${kind}.json`, import.meta.url))).json();

// Keep what a route answers as a file, whose name the route says.
export async function download(path) {
  const response = await call(path);
  const named = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = named ? named[1] : "answer.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export const pause = (delay, signal) => new Promise((done) => {
  const timer = setTimeout(done, delay * 1000);
  signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, {once: true});
});

// Server-sent events of a response: EventSource cannot send a token.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = {};
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      const [, field, text] = /^(\w*): ?(.*)$/.exec(line) ?? [];
      if (field) event[field] = text;
      if (line) continue;
      if (event.data) yield {number: +event.id, name: event.event, ...JSON.parse(event.data)};
      event = {};
    }
  }
}

async function* history(job, after, signal) {
  for (const one of await read(`jobs/${job}/history?after=${after}`, {signal}))
    yield {number: one.number, at: one.at, name: one.name, ...one.data};
}

// Tell of every event of a job until it has ended: as they are sent, or by asking where that fails.
export async function follow(job, tellOf, hasEnded, signal) {
  let after = 0, failures = 0, complete;
  do {
    const polls = failures >= MOST_FAILURES, ended = hasEnded();
    complete = false;
    try {
      const headers = {"Last-Event-ID": `${after}`};
      const found = polls ? history(job, after, signal)
        : events(await call(`jobs/${job}/events`, {headers, signal}));
      for await (const one of found) {
        after = one.number;
        await tellOf(one);
      }
      complete = ended || !polls;  // what is asked while a job runs may lack its last events
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status >= 400 && error.status < 500) throw error;
      failures += 1;
    }
    complete &&= hasEnded();
    if (!complete) await pause(polls ? POLL_SECONDS : RETRY_SECONDS, signal);
  } while (!signal.aborted && !complete);
}
