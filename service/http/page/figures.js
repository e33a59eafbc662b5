// What the page shows of an answer that is no plan: numbers, timelines, charts and tables.
import {make, section, table} from "./dom.js";
import {facts, memory, timeline} from "./plan.js";

function chart(one) {
  const root = make("div", {class: "chart"});
  requestAnimationFrame(() => window.stagewright.drawChart(root, one.chart));
  return section(one.title, root);
}

// A table that is wider than its section is scrolled by keys too.
function tabled(one, ...more) {
  const root = section(one.title, ...more, table(one.head, one.rows, one.title));
  root.tabIndex = 0;
  return root;
}

// The first cell of each row, such as a layout, can be explained, which is another job.
function explained(one, explain) {
  const what = one.head[0].replace("<", "");
  const rows = one.rows.map(([name, ...rest]) =>
    [make("button", {type: "button", title: `Why this ${what}?`, click: () => explain(name)}, name), ...rest]);
  const more = {job: "why it has this and no more, and what would change it",
    layout: "part by part and price by price, against the best"};
  return tabled({...one, rows}, make("p", {class: "sub"}, `Choose a ${what} to have it explained: ${more[what]}.`));
}

// A sentence, whose commands are between backticks.
const said = (line) => make("p", {}, ...line.split("`").map((part, i) => i % 2 ? make("code", {}, part) : part));

export function showFigures(root, told, explain) {
  const shown = told.tables.map((one) => one.title === told.explains ? explained(one, explain) : tabled(one));
  const first = shown.splice(0, 1 + told.tables.findIndex((one) => one.title === told.explains));
  const lead = told.lead.length ? [section(told.lead[0], ...told.lead.slice(1).map(said))] : [];
  root.replaceChildren(facts(told), ...lead, ...first,
    ...told.timelines.map((one) => section(one.title, timeline(one))),
    make("div", {class: "charts"}, ...(told.memory.length ? [memory(told.memory)] : []), ...told.charts.map(chart)),
    ...shown,
    ...(told.lines.length ? [section("What is said of it", ...told.lines.map(said))] : []));
}
