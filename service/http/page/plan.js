// What the page of a plan shows, from its contents as JSON.
import {make, section, table} from "./dom.js";

function share(told) {
  if (!told.shares.length) return [];
  const bar = make("div", {class: "share", role: "img", "aria-label": told.share_title});
  const keys = make("ul", {class: "legend"}, make("li", {}, `${told.share_title}:`));
  for (const one of told.shares) {
    const part = make("i", {title: one.name}), key = make("span", {class: "key"});
    part.style.width = `${one.percent}%`;
    part.style.background = key.style.background = one.fill;
    bar.append(part);
    keys.append(make("li", {}, key, one.name));
  }
  return [bar, keys];
}

// A bar for each device or rank: of one part, or of parts by kind with their colours.
export function memory(bars, note) {
  const rows = bars.map((one) => {
    const room = make("span", {class: "room"});
    let left = 0;
    for (const [kind, percent, fill] of one.parts ?? [["", one.percent, ""]]) {
      const bar = make("i", {title: kind || null});
      Object.assign(bar.style, {left: `${left}%`, width: `${percent}%`, background: fill});
      room.append(bar);
      left += percent;
    }
    if (one.limit_percent !== null) {
      const limit = make("b");
      limit.style.left = `${one.limit_percent}%`;
      room.append(limit);
    }
    return make("div", {}, make("span", {}, one.name), room, make("span", {}, one.text));
  });
  const keys = (bars[0].parts ?? []).map(([kind, , fill]) => {
    const key = make("span", {class: "key"});
    key.style.background = fill;
    return make("li", {}, key, kind);
  });
  if (bars.some((one) => one.limit_percent !== null))
    keys.push(make("li", {}, make("span", {class: "key dashed"}), "what a device may use"));
  return section("Peak memory", ...(note ? [make("p", {class: "sub"}, note)] : []), make("div", {class: "memory"}, ...rows),
    ...(keys.length ? [make("ul", {class: "legend"}, ...keys)] : []));
}

function bounds(told) {
  const rows = told.bounds.map((one) => {
    const bar = make("div", {class: one.kind});
    bar.style.width = `${one.percent}%`;
    return make("tr", {}, make("td", {class: "text"}, one.proved_by), make("td", {class: "bar"}, bar),
      make("td", {class: "number"}, one.text), make("td", {class: "text of"}, one.plans));
  });
  const others = told.bounds.some((one) => one.kind === "outside")
    ? ["; last, of ", make("b", {class: "outside"}, "plans that this one is not among")] : [];
  return section("Cost and lower bounds",
    make("p", {class: "sub"}, "of ", make("b", {class: "problem"}, "plans of the problem"), ", and of ",
      make("b", {class: "schedule"}, "schedules of these stages"), ...others),
    make("table", {class: "bounds"}, make("tbody", {}, ...rows)));
}

export function facts(told) {
  return make("div", {class: "facts"}, ...told.facts.map(([value, what]) =>
    make("div", {class: "fact"}, make("b", {}, value), make("span", {}, what))));
}

// The timeline; it is drawn once its place is in the document.
export function timeline(told) {
  const root = make("div", {class: "timeline"});
  requestAnimationFrame(() => window.stagewright.drawTimeline(root, told.timeline));
  return root;
}

function topology(told) {
  const root = make("div", {class: "topology"});
  requestAnimationFrame(() => window.stagewright.drawTopology(root, told.topology));
  return section(`Stages on the cluster ${told.cluster}`, root, make("details", {},
    make("summary", {}, "The same as a table"), table(told.topology_head, told.topology_rows, "Devices")));
}

export function showPlan(root, told) {
  const chart = make("div", {class: "chart"});
  root.replaceChildren(
    facts(told),
    section(`Why an iteration takes ${told.duration}`,
      ...told.sentences.map((one) => make("p", {}, one)), ...share(told)),
    section(told.shown, timeline(told)),
    topology(told),
    make("div", {class: "charts"}, ...(told.memory.length ? [memory(told.memory, told.memory_note)] : []),
      section("Microbatches in flight, per stage", chart)),
    ...(told.bounds.length ? [bounds(told)] : []),
    section("Stages", table(told.head, told.stages, "Stages")),
    ...(told.guarantees.length ? [section("Guarantees", table(
      ["<theorem", "cost", "promised at most", "holds", "<premise"], told.guarantees, "Guarantees"))] : []));
  requestAnimationFrame(() => window.stagewright.drawChart(chart, told.in_flight));
}
