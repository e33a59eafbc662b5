// Two plans of one model, side by side.
import {read} from "./api.js";
import {bytes, make, seconds, section, table} from "./dom.js";
import {facts, timeline} from "./plan.js";

const SCALES = {s: 1, ms: 1e3, us: 1e6}, ROUNDING = 1e-9;

function row({cause, first_seconds: first, second_seconds: second}) {
  const more = second - first, same = Math.abs(more) <= ROUNDING * Math.max(first, second);
  return [cause, seconds(first), seconds(second), same ? "none" : `${more > 0 ? "+" : ""}${seconds(more)}`];
}

// Lengthen the axes to that of the longest, so that equal times are equally long.
export function toOneScale(drawings) {
  const [longest, unit] = drawings.map((one) => [one.end / SCALES[one.unit], one.unit])
    .reduce((one, other) => one[0] < other[0] ? other : one);
  for (const one of drawings) {
    one.ticks *= longest / (one.end / SCALES[one.unit]);
    Object.assign(one, {end: longest * SCALES[unit], unit});
  }
}

function plan(name, job, told) {
  return section(name, make("p", {}, make("a", {href: `#/jobs/${job}`}, told.title), ` · ${told.subtitle}`),
    facts(told), timeline(told), ...told.sentences.map((one) => make("p", {}, one)));
}

export async function showComparison(root, jobs, signal) {
  const [found, ...told] = await Promise.all([
    read(`diff?${new URLSearchParams({first: jobs[0], second: jobs[1]})}`, {signal}),
    ...jobs.map((job) => read(`jobs/${job}/timeline`, {signal}))]);
  toOneScale(told.map((one) => one.timeline));
  const [first, second] = found.peak_memory_bytes;
  const rows = [found.iteration, ...found.parts].map(row);
  rows.push(["peak memory", bytes(first), bytes(second), ""]);
  root.replaceChildren(make("h1", {tabindex: "-1"}, "Two plans"),
    section("How long each takes, by cause", table(["<cause", "first", "second", "difference"], rows, "Differences by cause")),
    section("What is different", found.changes.length
      ? make("ul", {}, ...found.changes.map((one) => make("li", {}, one))) : make("p", {}, "Nothing.")),
    make("div", {class: "charts"}, plan("First", jobs[0], told[0]), plan("Second", jobs[1], told[1])));
}
