// What administrators see, live: the queue, the workers and what they do, the users.
import {call, events, now, pause, Problem, read} from "./api.js";
import {age, bytes, make, section, table} from "./dom.js";

const POLL_SECONDS = 5, SHORT = 20, RETRY_SECONDS = 1, MOST_FAILURES = 2, UNSURE_SECONDS = 5;
const WORKERS = ["<worker", "<state", "<job", "<user", "since", "memory", "<"];
const QUEUE = ["<job", "<what", "<user", "priority", "waits", "<for", "<"];
const USERS = ["<user", "running", "queued", "jobs", "time used", "<tokens"];

// A text that may be long, in two lines at most.
const short = (text, ...before) => make("span", {class: "short", title: text}, ...before, text);
const what = ({title, kind}) => title ? `${title} · ${kind}` : kind;

class Administration {
  constructor(root, signal, problem) {
    Object.assign(this, {root, signal, problem, sure: null, whole: false});
    this.life = make("p", {class: "sub"});
    this.facts = make("div", {class: "facts"});
    [this.workers, this.queue, this.users] = ["Workers", "Queue", "Users"].map((title) => {
      const list = make("div", {class: "list admin"});
      list.section = section(title, list);
      return list;
    });
    root.replaceChildren(make("h1", {tabindex: "-1"}, "Administration"), this.life, this.facts,
      ...[this.workers, this.queue, this.users].map((list) => list.section));
  }

  link(id) { return make("a", {href: `#/jobs/${id}`, "data-key": `job ${id}`}, id.slice(0, 8)); }

  // The rows move while they are read: what ends a job takes two presses.
  stop(id) {
    const sure = this.sure === id;
    return make("button", {type: "button", "data-key": `stop ${id}`, "aria-label": `Stop job ${id.slice(0, 8)}${sure ? ": sure?" : ""}`,
      click: () => sure ? this.end(id) : this.ask(id)}, sure ? "Sure?" : "Stop");
  }

  ask(id) {
    this.sure = id;
    this.draw();
    clearTimeout(this.unsure);
    this.unsure = setTimeout(() => { this.sure = null; this.draw(); }, UNSURE_SECONDS * 1000);
  }

  async end(id) {
    this.sure = null;
    this.problem("");
    try {
      await call(`jobs/${id}`, {method: "DELETE"});
      this.tell(await read("admin", {signal: this.signal}));
    } catch (error) {
      if (!this.signal.aborted) this.problem(error.message);
    }
    this.draw();
  }

  tell(told) {
    this.told = told;
    const picked = getSelection(), isMarked = !picked.isCollapsed && this.root.contains(picked.anchorNode);
    this.life.textContent = isMarked ? "Paused while text is marked." : "Live: the jobs of all users.";
    // What is pressed or marked stays as it is until it is released.
    if (isMarked || this.root.querySelector(":active")) return;
    this.draw();
  }

  lost() { this.life.textContent = `The service does not answer; what is shown is ${age(this.told?.at ?? now(), now())} old.`; }

  draw() {
    if (this.signal.aborted || !this.told) return;
    const key = document.activeElement?.dataset.key;
    const {jobs, waiting, longest_seconds: longest, queue, workers, users} = this.told, alive = workers.filter((one) => one.alive);
    const busy = alive.filter((one) => one.job !== null).length;
    const told = [[`${jobs.queued}`, "in the queue"], [waiting ? age(0, longest) : "none", "longest wait"],
      [`${jobs.solving}`, "running"], [`${busy} of ${alive.length}`, "workers busy"], [`${jobs.failed}`, "failed, of those kept"]];
    this.facts.replaceChildren(...told.map(([value, name]) =>
      make("div", {class: "fact"}, make("b", {}, value), make("span", {}, name))));
    this.fill(this.workers, WORKERS, workers.map((one) => this.worker(one)), "No worker has been seen for an hour: start a server with --workers.");
    this.fill(this.queue, QUEUE, queue.slice(0, this.whole ? undefined : SHORT).map((one) => [this.link(one.id), short(what(one)), short(one.user), `${one.priority}`,
      age(0, one.seconds), make("span", {class: "why"}, one.why), this.stop(one.id)]), "No job waits.", waiting);
    this.fill(this.users, USERS, users.map((one) => [short(one.user), `${one.running}`, `${one.queued}`, `${one.jobs}`, age(0, one.seconds),
      Object.entries(one.tokens).map(([scope, amount]) => `${amount} ${scope}`).join(", ")]), "Nobody has submitted a job yet.");
    if (key) this.root.querySelector(`[data-key="${key}"]`)?.focus({preventScroll: true});
  }

  worker(one) {
    const is = one.alive ? (one.job ? "busy" : "idle") : "lost", {at} = this.told;
    return [short(one.name), make("span", {class: `state ${is}`}, is),
      one.job ? short(what(one), this.link(one.job), " ") : one.alive ? "" : `silent for ${age(one.seen, at)}`,
      short(one.user ?? ""), age(one.since ?? one.began, at), one.job ? bytes(one.resident_bytes) : "", one.job ? this.stop(one.job) : ""];
  }

  fill(list, head, rows, none, of = rows.length) {
    const more = make("button", {type: "button", "data-key": "more", hidden: this.whole || rows.length < SHORT,
      click: () => { this.whole = true; this.draw(); }}, "Show more");
    list.replaceChildren(rows.length ? table(head, rows, list.section.firstChild.textContent) : make("p", {}, none));
    if (of > rows.length)
      list.append(make("p", {class: "buttons"}, more, make("span", {class: "told"}, `${rows.length} of ${of}, by turn`)));
  }

  // Overviews as they are sent, or by asking where that fails.
  async follow() {
    for (let failures = 0; !this.signal.aborted;) {
      const polls = failures >= MOST_FAILURES;
      try {
        if (polls) this.tell(await read("admin", {signal: this.signal}));
        else for await (const one of events(await call("admin/events", {signal: this.signal}))) this.tell(one);
      } catch (error) {
        if (this.signal.aborted) return;
        if (error instanceof Problem && error.status >= 400 && error.status < 500) return this.problem(error.message);
        failures += 1;
        this.lost();
      }
      await pause(polls ? POLL_SECONDS : RETRY_SECONDS, this.signal);
    }
  }
}

export async function showAdministration(root, signal, problem) {
  const told = await read("admin", {signal}), page = new Administration(root, signal, problem);
  page.tell(told);
  page.follow();
}
