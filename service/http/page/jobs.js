// The list of jobs, the newest first.
import {now, read} from "./api.js";
import {age, cost, make, percent, table} from "./dom.js";

const REFRESH_SECONDS = 5, PAGE = 20;
const HEAD = ["<compare", "<job", "<what", "<state", "cost", "bound", "gap", "age"];
const chosen = new Set();

export const state = (job) => make("span", {class: `state ${job.state}`, title: job.waits}, job.state);

function row(job, changed) {
  const box = make("input", {type: "checkbox", "aria-label": `compare ${job.id.slice(0, 8)}`,
    checked: chosen.has(job.id), disabled: !job.has_document,
    change: () => { if (box.checked) chosen.add(job.id); else chosen.delete(job.id); changed(); }});
  return [box, make("a", {href: `#/jobs/${job.id}`}, job.id.slice(0, 8)), job.title ? `${job.title} · ${job.kind}` : job.kind, state(job),
    cost(job, job.cost), cost(job, job.bound), percent(job.gap), age(job.created, now())];
}

export async function showJobs(root, signal, before = "") {
  const list = make("div", {class: "list"}), states = make("select", {change: () => refresh()},
    make("option", {value: ""}, "all"),
    ...["queued", "solving", "optimal", "feasible", "infeasible", "failed"].map((one) => make("option", {}, one)));
  const compare = make("button", {type: "button", click: () => {
    location.hash = `#/compare/${[...chosen].join("/")}`;
  }}, "Compare two plans");
  const more = make("p", {class: "buttons"});
  const changed = () => {
    compare.disabled = chosen.size !== 2;
    compare.title = compare.disabled ? "choose two plans of one model" : "";
  };
  async function refresh() {
    const query = new URLSearchParams({limit: PAGE, ...(before && {before}), ...(states.value && {state: states.value})});
    const page = await read(`jobs?${query}`, {signal});
    if (list.contains(document.activeElement) && document.activeElement !== list.firstChild) return;
    list.replaceChildren(page.jobs.length ? table(HEAD, page.jobs.map((job) => row(job, changed)), "Jobs")
      : make("p", {}, "There are none. ", make("a", {href: "#/new"}, "Plan a model"), "."));
    more.replaceChildren(
      ...(before ? [make("a", {href: "#/jobs"}, "« newest")] : []),
      ...(page.next ? [make("a", {href: `#/jobs/before/${page.next}`}, "older »")] : []));
    more.hidden = !more.firstChild;
  }
  root.replaceChildren(make("h1", {tabindex: "-1"}, "Jobs"), make("section", {},
    make("div", {class: "tools"}, make("label", {}, "State ", states), compare), list, more));
  changed();
  await refresh();
  const timer = setInterval(() => document.hidden || refresh().catch(() => {}), REFRESH_SECONDS * 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}
