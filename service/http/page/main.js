// Which view is shown follows from the address after #; the token is asked for where it is needed.
import {showAdministration} from "./admin.js";
import {read, token} from "./api.js";
import {showComparison} from "./compare.js";
import {tell} from "./dom.js";
import {showJob} from "./job.js";
import {showJobs} from "./jobs.js";
import {showForm} from "./submit.js";

const root = document.getElementById("view"), alert = document.getElementById("problem");
const form = document.getElementById("token"), text = document.getElementById("token-text");
const problem = (line) => tell(alert, line);
let view = new AbortController(), known = null;

const VIEWS = [
  [/^jobs$/, (signal) => showJobs(root, signal)],
  [/^jobs\/before\/(\w+)$/, (signal, before) => showJobs(root, signal, before)],
  [/^jobs\/(\w+)$/, (signal, id) => showJob(root, id, signal, problem)],
  [/^compare\/(\w+)\/(\w+)$/, (signal, ...jobs) => showComparison(root, jobs, signal)],
  [/^admin$/, (signal) => showAdministration(root, signal, problem)],
  [/^new$/, (signal) => showForm(root, "plan", signal)],
  [/^new\/([\w-]+)$/, (signal, kind) => showForm(root, kind, signal)],
];

function failed(error) {
  if (error.name === "AbortError") return;
  problem(error.message);
  if (error.status !== 401) return;
  form.hidden = false;
  text.focus();
}

// Administrators have a view more.
async function offer() {
  if (known === token.get()) return;
  const {scope} = await read("me");
  known = token.get();
  document.getElementById("admin").hidden = scope !== "admin";
}

async function show() {
  view.abort();
  view = new AbortController();
  const {signal} = view, place = location.hash.replace(/^#\//, "") || "jobs";
  const [found, what] = VIEWS.map(([shape, act]) => [shape.exec(place), act]).find(([match]) => match) ?? [];
  problem("");
  for (const link of document.querySelectorAll("nav a"))
    if (place.startsWith(link.hash.slice(2))) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  root.replaceChildren();
  try {
    if (!found) throw new Error("There is no such page here.");
    await what(signal, ...found.slice(1));
    if (signal.aborted) return;
    const title = root.querySelector("h1");
    document.title = `${title.textContent} · Stagewright`;
    title.focus({preventScroll: true});
    scrollTo(0, 0);
    await offer();
  } catch (error) {
    if (!signal.aborted) failed(error);
  }
}

function give(given) {
  token.set(given);
  text.value = "";
  form.hidden = true;
  show();
}

form.addEventListener("submit", (event) => { event.preventDefault(); give(text.value.trim()); });
document.getElementById("forget-token").addEventListener("click", () => give(""));
document.getElementById("change-token").addEventListener("click", () => {
  form.hidden = !form.hidden;
  if (!form.hidden) text.focus();
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); root.focus(); });
addEventListener("unhandledrejection", (event) => { event.preventDefault(); failed(event.reason); });
addEventListener("hashchange", show);
show();
