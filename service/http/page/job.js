// One job: its life as it happens, what can be done with it, and its plan.
import {call, download, follow, now, read} from "./api.js";
import {age, cost, make, percent, section} from "./dom.js";
import {showFigures} from "./figures.js";
import {state} from "./jobs.js";
import {measured} from "./measured.js";
import {showPlan} from "./plan.js";
import {open} from "./submit.js";

const ENDED = new Set(["optimal", "feasible", "infeasible", "failed"]);
const AGAIN = new Set(["feasible", "failed"]);
const FORMATS = ["torch-csv", "torchtitan", "nemo", "megatron", "deepspeed", "torchrun", "slurm", "kubernetes"];
const LAYOUT_FORMATS = ["megatron", "megatron-bridge", "nemo", "torchtitan", "deepspeed", "accelerate", "axolotl", "trl",
  "transformers", "nnscaler", "plan"];
const DOCUMENTS = {place: "plan", "train-plan": "layout", "train-plan-profiles": "plan", calibrate: "rates",
  tune: "tuning", "tune-read": "tuning"};  // in answers
const COMPILING = new Set(["plan", "train-plan"]);
const LAUNCHERS = new Set(["torchrun", "slurm", "kubernetes"]);

const SILENT_SECONDS = 3;  // after which a search has told of something, once its kernels are compiled

// Costs and bounds over the time of the search, from its events.
class Curve {
  constructor(root) {
    Object.assign(this, {root, began: null, until: 0, costs: [], bounds: []});
  }

  add(event) {
    if (event.name === "solving") Object.assign(this, {began: event.at, costs: [], bounds: []});
    if (this.began === null) return;
    const at = this.until = event.at - this.began;
    if (event.cost === undefined) return;
    const best = this.costs.at(-1)?.[1] ?? Infinity;
    if (event.cost !== null && event.cost < best) this.costs.push([at, event.cost]);
    if (event.bound !== null && event.bound !== this.bounds.at(-1)?.[1]) this.bounds.push([at, event.bound]);
  }

  draw(unit, until = this.until) {
    const series = [["best cost", this.costs, "steps", "--best"], ["proved lower bound", this.bounds, "dashes", "--critical"]]
      .filter(([, points]) => points.length)
      .map(([name, points, style, colour]) => {
        const end = 1.02 * Math.max(until, this.until);  // so that what is last is seen too
        const whole = [...points, [end, points.at(-1)[1]]];
        return {name, style, colour, names: [], x: whole.map(([x]) => x), y: whole.map(([, y]) => y)};
      });
    if (!series.length) return;
    const data = {x: "seconds since its begin", y: unit, height: 240, close: true, series};
    if (!this.root.chart) window.stagewright.drawChart(this.root, data);
    this.root.chart.data = data;
    this.root.chart.draw();
  }
}

const webhook = (told) => told && [`webhook ${told.state}`, told.attempts > 1 && `after ${told.attempts} attempts`,
  told.reason && `(${told.reason})`].filter(Boolean).join(" ");

const how = (job) => [job.waits, job.finished !== null && job.started !== null && `${age(job.started, job.finished)} of search`,
  job.stopped_by && `stopped by ${job.stopped_by}`, job.reason,
  webhook(job.webhook),
  job.cached_from && `answered before, by ${job.cached_from.slice(0, 8)}`].filter(Boolean).join(" · ");

function factsOf(job) {
  const told = [[cost(job, job.cost) || "none", "best cost"], [cost(job, job.bound) || "none", "lower bound"],
    [percent(job.gap) || "unknown", "gap"]];
  if (!ENDED.has(job.state))
    told.push([age(job.started ?? job.created, now()), job.started === null ? "in the queue" : "so far"]);
  return told.map(([value, what]) =>
    make("div", {class: "fact"}, make("b", {}, value), make("span", {}, what)));
}

class JobPage {
  constructor(root, id, signal, problem) {
    Object.assign(this, {root, id, signal, problem, drawn: null, asked: null});
    this.build();
  }

  build() {
    this.title = make("h1", {tabindex: "-1"}, `Job ${this.id.slice(0, 8)}`);
    this.life = make("p", {class: "sub", "aria-live": "polite"});
    this.facts = make("div", {class: "facts"});
    const chart = make("div", {class: "chart"});
    this.curve = new Curve(chart);
    this.note = make("p", {class: "told"},
      "The bound is of the class of the best plan so far: it falls where a better plan of another class is found.");
    this.gap = section("Cost and bound", chart, this.note);
    this.gap.classList.add("gap");
    this.gap.hidden = true;
    this.warm = make("p", {class: "told", hidden: true},
      "In the first seconds a process starts for the job and loads its libraries; the first search on a machine also compiles its kernels, up to half a minute and once. The first answer is shown as soon as there is one.");
    this.better = make("button", {type: "button", hidden: true, click: () => this.act(() => this.plan())},
      "Show the better plan");
    this.buttons = make("div", {class: "buttons", role: "group", "aria-label": "What to do with the job"});
    this.shown = make("div");
    this.root.replaceChildren(this.title, this.life, this.facts, this.warm, this.buttons, this.gap,
      make("p", {}, this.better), this.shown);
    this.makeButtons();
  }

  makeButtons() {
    const button = (name, text, act) => this[name] = make("button", {type: "button", click: () => this.act(act)}, text);
    const send = (path, method) => async () => { this.tell(await read(`jobs/${this.id}${path}`, {method})); };
    const format = make("select", {"aria-label": "Framework of the export", change: () => {
      command.hidden = !LAUNCHERS.has(format.value);
      image.hidden = format.value !== "kubernetes";
    }});
    this.format = format;
    const command = make("input", {hidden: true, "aria-label": "Command of every process",
      placeholder: "command of every process", size: 24});
    const image = make("input", {hidden: true, "aria-label": "Image of the container", placeholder: "image of the container", size: 24});
    const query = () => new URLSearchParams(
      Object.entries({command, image}).filter(([, one]) => !one.hidden && one.value).map(([name, one]) => [name, one.value]));
    button("stop", "Stop, keep the best", send("", "DELETE"));
    button("abort", "Abort", send("/abort", "POST"));
    button("retry", "Try again", async () => { await send("/retry", "POST")(); this.watch(); });
    button("discard", "Discard", () => this.discardTwice());
    button("answer", "Download answer", () => download(`jobs/${this.id}/answer`));
    button("file", "Download plan", () => download(`jobs/${this.id}/plan`));
    button("drawing", "Download page", () => download(`jobs/${this.id}/timeline.html`));
    button("trace", "Download trace", () => download(`jobs/${this.id}/trace`));
    button("export", "Export", () => download(`jobs/${this.id}/export/${format.value}?${query()}`));
    button("launches", "Download launch folders", () => download(`jobs/${this.id}/${this.folder}.zip`));
    button("trials", "Add trials", () => this.addTrials());
    this.exporting = make("span", {class: "export"}, format, command, image, this.export);
    this.buttons.append(this.stop, this.abort, this.retry, this.trials, this.launches, this.file, this.drawing, this.trace, this.answer, this.exporting, this.discard);
  }

  // What cannot be undone takes two presses.
  async discardTwice() {
    if (!this.discard.dataset.sure) {
      this.discard.dataset.sure = "yes";
      this.discard.textContent = "Discard for good?";
      return;
    }
    await call(`jobs/${this.id}/discard`, {method: "POST"});
    location.hash = "#/jobs";
  }

  async act(what) {
    this.problem("");
    try {
      await what();
    } catch (error) {
      if (!this.signal.aborted) this.problem(error.message);
    }
  }

  hasEnded() { return this.job !== undefined && ENDED.has(this.job.state); }

  count() {
    const {kind, state: is, started, bound} = this.job;
    this.facts.replaceChildren(...factsOf(this.job));
    this.warm.hidden = !COMPILING.has(kind) || is !== "solving" || bound !== null || now() - started < SILENT_SECONDS;
  }

  tell(job) {
    this.job = job;
    const ended = ENDED.has(job.state), more = how(job);
    this.life.replaceChildren(state(job), ` ${job.kind} of ${job.user}${more && ` · ${more}`}`);
    this.count();
    this.facts.hidden = ended && (job.has_document || job.cost === null || job.kind !== "plan");
    if (this.drawn === null) this.title.textContent = job.title || `${job.kind} ${this.id.slice(0, 8)}`;
    this.stop.hidden = this.abort.hidden = ended;
    this.retry.hidden = !AGAIN.has(job.state);
    this.discard.hidden = this.answer.hidden = !ended;
    if (job.state === "failed") this.answer.hidden = true;
    const what = ended && job.state !== "failed" && job.state !== "infeasible" && DOCUMENTS[job.kind];
    this.exporting.hidden = !job.has_document && what !== "layout";
    if (!this.format.length) this.format.append(...(job.kind === "train-plan" ? LAYOUT_FORMATS : FORMATS).map((one) => make("option", {}, one)));
    this.file.hidden = !job.has_document && !what;
    this.file.textContent = `Download ${what || "plan"}`;
    this.trials.hidden = what !== "tuning";
    this.launches.hidden = !this.folder;
    this.drawing.hidden = this.trace.hidden = !(job.kind === "place" && what);
    (ended ? this.shown : this.buttons).after(this.gap);
  }

  async plan() {
    const shown = this.job.cost, told = await read(`jobs/${this.id}/timeline`, {signal: this.signal});
    this.drawn = shown;
    this.better.hidden = true;
    this.title.textContent = told.title;
    showPlan(this.shown, told);
    if (!this.compared) this.shown.after(this.compared = measured(this.id, this.signal));
  }

  // The answer of a kind that has no plan to draw.
  async figures() {
    const told = await read(`jobs/${this.id}/figures`, {signal: this.signal});
    this.drawn = this.job.finished;
    this.folder = told.folder;
    this.tell(this.job);
    showFigures(this.shown, told, (what) => this.act(() => this.explain(what)));
  }

  // The form of trials with this tuning, and a line for each layout that is next.
  async addTrials() {
    const [tuning, {next}] = await Promise.all(["plan", "answer"].map((one) => read(`jobs/${this.id}/${one}`, {signal: this.signal})));
    open(["tune-read", "tuning"], tuning, {trials: next.map(({layout}) => `${layout}: `).join("\n")});
  }

  // The same question with a layout or a job to explain, which is another job.
  async explain(what) {
    const asked = await read(`jobs/${this.id}/request`, {signal: this.signal});
    const body = JSON.stringify({...asked, explain: what});
    const job = await read(this.job.kind, {method: "POST", body, headers: {"Content-Type": "application/json"}});
    location.hash = `#/jobs/${job.id}`;
  }

  // A better plan is drawn at once where there is none, and at the end; else the reader decides.
  async refresh() {
    this.tell(await read(`jobs/${this.id}`, {signal: this.signal}));
    const {kind, state: ends, finished} = this.job;
    if (kind !== "plan" && this.hasEnded() && ends !== "failed" && this.drawn !== finished)
      await this.act(() => this.figures());
    if (!this.job.has_document || this.drawn === this.job.cost) return;
    if (this.drawn === null || this.hasEnded()) await this.act(() => this.plan());
    else this.better.hidden = false;
  }

  async happened(event) {
    if (ENDED.has(event.name)) {
      await this.refresh();
      // The answer, which need not have been told of as progress; earlier ends are of earlier tries.
      if (Math.abs(this.job.finished - event.at) < 1)
        this.curve.add({...event, cost: this.job.cost, bound: this.job.bound});
    } else this.curve.add(event);
    if (!this.asked) this.asked = setTimeout(() => { this.asked = null; this.act(() => this.refresh()); }, 300);
    this.drawCurve();
  }

  drawCurve(until) {
    // An answer known before has no search.
    if (this.curve.began === null || !(this.curve.costs.length || this.curve.bounds.length)) return;
    const plans = this.job?.kind === "plan";
    this.gap.hidden = false;
    this.note.hidden = !plans;
    this.curve.draw(COMPILING.has(this.job?.kind) ? "seconds of an iteration" : "cost", until);
  }

  tick() {
    if (this.job === undefined || this.hasEnded()) return;
    this.count();
    if (this.job.state === "solving" && this.curve.began !== null) this.drawCurve(now() - this.curve.began);
  }

  async watch() {
    const timer = setInterval(() => this.tick(), 1000);
    this.signal.addEventListener("abort", () => clearInterval(timer));
    await this.act(() => follow(this.id, (event) => this.happened(event), () => this.hasEnded(), this.signal));
    clearInterval(timer);
  }
}

export async function showJob(root, id, signal, problem) {
  const page = new JobPage(root, id, signal, problem);
  await page.refresh();
  page.watch();
}
