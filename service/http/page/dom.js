// Nodes of the page, and numbers as text.
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((one) => one !== null));
  return node;
}

export const number = (value) => value === null ? "" : `${+value.toPrecision(4)}`;

export function seconds(value) {
  if (value === null) return "";
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]])
    if (Math.abs(value) >= scale) return `${number(value / scale)} ${unit}`;
  return `${number(value)} s`;
}

// Costs of these kinds are seconds, as jobs/kinds.py says; of others they are in the unit of the request.
const TIMED = new Set(["plan", "train-plan", "train-plan-profiles", "place", "partition"]);
export const cost = (job, value) => (TIMED.has(job.kind) ? seconds : number)(value);
export const percent = (value) => value === null ? "" : `${(100 * value).toFixed(2)}%`;

export function bytes(value) {
  if (value === null) return "";
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (value >= scale) return `${number(value / scale)} ${unit}`;
  return `${number(value)} B`;
}

export function age(since, now) {
  const past = Math.max(0, now - since);
  for (const [unit, scale] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (past >= scale) return `${Math.floor(past / scale)} ${unit}`;
  return `${Math.floor(past)} s`;
}

// A problem's line begins with the place in the document that is wrong.
export function tell(node, text) {
  const found = /^([\w.[\]-]+): (.*)$/s.exec(text);
  node.replaceChildren(...(found ? [make("code", {}, found[1]), ` ${found[2]}`] : [text]));
  node.hidden = !text;
}

// Head and rows as a table, which is a list of cards where there is little room.
export function table(head, rows, caption) {
  const names = head.map((name) => name.replace(/^</, ""));
  const kind = (i) => ({class: head[i].startsWith("<") ? "text" : null});
  return make("table", {class: "cards"}, make("caption", {class: "unseen"}, caption),
    make("thead", {}, make("tr", {}, ...names.map((name, i) => make("th", {...kind(i), scope: "col"}, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {},
      ...row.map((cell, i) => make("td", {...kind(i), "data-name": names[i]}, cell))))));
}

export const section = (title, ...children) => make("section", {}, make("h2", {}, title), ...children);
