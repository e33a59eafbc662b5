// What the page shows of an answer that is no plan: numbers, timelines, charts and tables.
import {make, section, table} from "./dom.js";
import {facts, timeline} from "./plan.js";

function chart(one) {
  const root = make("div", {class: "chart"});
  requestAnimationFrame(() => window.stagewright.drawChart(root, one.chart));
  return section(one.title, root);
}

export function showFigures(root, told) {
  root.replaceChildren(facts(told),
    ...told.timelines.map((one) => section(one.title, timeline(one))),
    ...told.charts.map(chart),
    ...told.tables.map((one) => section(one.title, table(one.head, one.rows, one.title))));
}
