// A measured run above the plan's prediction, from the trace that the run has written.
import {read} from "./api.js";
import {toOneScale} from "./compare.js";
import {make, number, percent, seconds, section, table, tell} from "./dom.js";
import {facts, timeline} from "./plan.js";

const pair = ({predicted, measured, ratio}) => [seconds(predicted), seconds(measured), number(ratio)];

function causes({causes: found, rest_seconds: rest}, whole) {
  const row = (name, value, work) => [name, seconds(value), percent(value === null ? null : value / whole),
    ...(work ? pair(work) : ["", "", ""])];
  return section("Where the difference is", table(
    ["<cause", "seconds", "of the prediction", "work predicted", "work measured", "ratio"],
    [...found.map((one) => row(one.name, one.seconds, one.work_seconds)), row("not explained", rest, null)], "Causes"));
}

function show(root, told, plan) {
  const whole = told.iteration_seconds, drawings = [told.measured.timeline, plan.timeline];
  toOneScale(drawings);
  const [predicted, measured, ratio] = pair(whole);
  root.replaceChildren(
    facts({facts: [[measured, `measured, from ${seconds(whole.least)} to ${seconds(whole.most)}`], [predicted, "predicted"],
      [ratio, "measured over predicted"], [told.machine, `${told.backend}, ${told.world_size} processes, ${told.steps} steps`]]}),
    section("Measured", timeline({timeline: drawings[0]})),
    section("Predicted", timeline({timeline: drawings[1]})),
    ...(told.explanation ? [causes(told.explanation, whole.predicted)] : []),
    section("Stages", table(["stage", "<devices", "forward predicted", "measured", "ratio", "backward predicted", "measured", "ratio"],
      told.stages.map((one, s) => [s, one.devices.join(", "), ...pair(one.forward_seconds), ...pair(one.backward_seconds)]), "Stages")));
}

// Where a trace is dropped, and what it says next to the plan of a job.
export function measured(job, signal) {
  const root = make("div"), alert = make("p", {class: "problem-text", role: "alert", hidden: true});
  const input = make("input", {id: "trace-file", type: "file", accept: ".json,application/json", "aria-describedby": "trace-told"});
  async function take(file) {
    tell(alert, "");
    place.setAttribute("aria-busy", "true");
    try {
      const {id} = await read(`uploads/trace?${new URLSearchParams({name: file.name})}`,
        {method: "POST", body: file, headers: {"Content-Type": "application/json"}, signal});
      show(root, ...await Promise.all([read(`jobs/${job}/comparison?trace=${id}`, {signal}), read(`jobs/${job}/timeline`, {signal})]));
    } catch (error) {
      if (!signal.aborted) tell(alert, error.message);
    } finally {
      place.removeAttribute("aria-busy");
    }
  }
  const over = (event) => { event.preventDefault(); place.classList.add("over"); };
  const place = make("section", {class: "drop", dragenter: over, dragover: over, dragleave: () => place.classList.remove("over"),
    drop: (event) => {
      event.preventDefault();
      place.classList.remove("over");
      if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
    }},
    make("h2", {}, make("label", {for: "trace-file"}, "Compare with a run")), input,
    make("p", {id: "trace-told", class: "told"}, "Choose or drop the trace of a run of this plan, which ",
      make("code", {}, "stagewright run --trace"), " writes."), alert);
  input.addEventListener("change", () => input.files.length && take(input.files[0]));
  return make("div", {class: "measured"}, place, root);
}
