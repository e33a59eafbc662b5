// Draws rows of bars in time on a canvas: only what is visible, so that many rows stay fluid.
"use strict";
(() => {
const AXIS = 30, NARROW = 640, SANS = "system-ui, sans-serif", CHIP = 6;
const RAMP = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];  // viridis
const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// The colour of one of several in an order, as of stages. Dark ends of the ramp are left out on
// dark pages, light ones on light pages.
function shade(rank, count) {
  const share = count > 1 ? rank / (count - 1) : 0.4;
  const at = (dark.matches ? 0.3 + 0.7 * share : 0.82 * share) * (RAMP.length - 1);
  const i = Math.min(RAMP.length - 2, Math.floor(at)), part = at - i;
  return `#${[1, 3, 5].map((k) => Math.round(
    parseInt(RAMP[i].slice(k, k + 2), 16) * (1 - part) + parseInt(RAMP[i + 1].slice(k, k + 2), 16) * part)
    .toString(16).padStart(2, "0")).join("")}`;
}

function make(tag, parent, attributes = {}, text = "") {
  const node = parent.appendChild(document.createElement(tag));
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Starts, from the pauses before bars and their lengths.
function placed(pauses, lengths) {
  let until = 0;
  return Float64Array.from(pauses, (pause, i) => {
    const start = until + pause;
    until = start + lengths[i];
    return start;
  });
}

// The first index whose value exceeds a limit, in an ascending array.
function after(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function readLane(lane) {
  lane.starts = placed(lane.start, lane.length);
  lane.ends = lane.starts.map((at, i) => at + lane.length[i]);
  let most = -1;
  lane.until = lane.ends.map((at) => (most = Math.max(most, at)));  // ascending
  const begins = placed(lane.idle.map((one) => one[0]), lane.idle.map((one) => one[1]));
  lane.gaps = lane.idle.map(([, length, cause], i) => ({from: begins[i], to: begins[i] + length, cause}));
  lane.gapEnds = Float64Array.from(lane.gaps, (gap) => gap.to);
}

function isLight(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 140;
}

class Timeline {
  constructor(root, data) {
    Object.assign(this, {root, data, from: 0, to: data.ticks, unfolded: new Set(), picked: null});
    data.lanes.forEach(readLane);
    this.build();
    this.fold();
    // In the next frame, as fitting changes the size that is observed.
    new ResizeObserver(() => requestAnimationFrame(() => this.scroller.clientWidth !== this.width && this.fit()))
      .observe(this.scroller);
    dark.addEventListener("change", () => { this.legend(); this.ask(); });
  }

  build() {
    const bar = make("div", this.root, {class: "tools"});
    const button = (text, label, act) => {
      make("button", bar, {type: "button", title: label, "aria-label": label}, text)
        .addEventListener("click", act);
    };
    button("+", "zoom in", () => this.zoom(0.5));
    button("−", "zoom out", () => this.zoom(2));
    button("whole", "show the whole time", () => this.show(0, this.data.ticks));
    if (this.data.lanes.some((lane) => lane.critical.includes(1)))
      button("critical path ›", "go to the next action of the critical path", () => this.nextCritical());
    if (this.data.lanes.some((lane) => lane.members.length > 1)) {
      const label = make("label", bar);
      this.box = make("input", label, {type: "checkbox", checked: ""});
      label.append(" fold identical rows");
      this.box.addEventListener("change", () => this.foldAll(this.box.checked));
    }
    this.keys = make("ul", this.root, {class: "legend"});
    this.scroller = make("div", this.root, {class: "scroller", tabindex: "0", role: "application",
      "aria-label": "timeline: arrows select an action, plus and minus zoom, 0 shows the whole, "
        + "shift with arrows moves, f and enter fold, c follows the critical path"});
    this.canvas = make("canvas", this.scroller);
    this.spacer = make("div", this.scroller);
    this.tip = make("div", this.root, {class: "tip", hidden: ""});
    this.status = make("p", this.root, {class: "status", "aria-live": "polite"},
      "Drag or shift+wheel moves, ctrl+wheel or pinch zooms; arrow keys select actions.");
    this.legend();
    this.listen();
  }

  legend() {
    this.keys.replaceChildren();
    const entry = (name, colour, kind = "") => {
      const item = make("li", this.keys);
      // Not by an attribute, which a page's security policy may forbid.
      make("span", item, {class: `key ${kind}`}).style.background = colour;
      item.append(name);
    };
    const used = new Set(this.data.lanes.flatMap((lane) => lane.kind));
    const named = new Set();
    this.data.kinds.forEach((kind, k) => {
      if (used.has(k) && !named.has(kind.name)) entry(kind.name, this.colour(k));
      if (used.has(k)) named.add(kind.name);
    });
    if (this.data.lanes.some((lane) => lane.gaps.length)) entry("idle", "", "hatch");
    if (this.data.lanes.some((lane) => lane.critical.includes(1))) entry("critical path", "", "strip");
    if (this.data.lanes.some((lane) => lane.bottleneck)) make("li", this.keys, {}, "★ bottleneck");
    for (const name of new Set(this.data.marks.map((mark) => mark.name).filter(Boolean)))
      entry(name, "", "dashed");
  }

  colour(k) { return this.data.kinds[k][dark.matches ? "dark" : "light"]; }

  // Rows: one of each lane, or of each of its members where it is unfolded.
  fold() {
    this.rows = this.data.lanes.flatMap((lane, l) => {
      if (!this.unfolded.has(l)) return [{lane, l, name: lane.name}];
      return lane.members.map((name) => ({lane, l, name: `${name} · ${lane.about}`, alone: true}));
    });
    this.picked = null;
    this.fit();
  }

  foldAll(folded) {
    const several = [...this.data.lanes.keys()].filter((l) => this.data.lanes[l].members.length > 1);
    this.unfolded = new Set(folded ? [] : several);
    if (this.box) this.box.checked = folded;
    this.fold();
  }

  turn(row) {
    if (row.lane.members.length < 2) return;
    if (!this.unfolded.delete(row.l)) this.unfolded.add(row.l);
    this.box.checked = this.unfolded.size === 0;
    this.fold();
  }

  fit() {
    const width = this.scroller.clientWidth;
    if (!width) return;
    this.width = width;
    this.narrow = width < NARROW;
    this.pitch = this.narrow ? 38 : 24;
    this.context = this.canvas.getContext("2d");
    const names = this.rows.slice(0, 200).filter((row) => row.lane.group !== "title").map((row) => {
      this.context.font = `${row.lane.bottleneck ? "600 " : ""}12px ${SANS}`;
      return this.context.measureText(this.title(row)).width;
    });
    this.chip = this.data.lanes.some((lane) => lane.stages.length) ? CHIP : 0;
    this.gutter = this.narrow ? 0 : Math.min(Math.max(...names, 20) + 18 + this.chip, 0.36 * width);
    const whole = AXIS + this.rows.length * this.pitch + 6;
    this.height = Math.min(whole, Math.max(260, Math.round(0.72 * innerHeight)));
    this.scroller.style.height = `${this.height}px`;
    this.spacer.style.height = `${whole - this.height}px`;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.height = `${this.height}px`;
    this.draw();
  }

  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  x(tick) { return this.gutter + (tick - this.from) / (this.to - this.from) * this.plot(); }
  plot() { return this.width - this.gutter - 8; }
  tick(x) { return this.from + (x - this.gutter) / this.plot() * (this.to - this.from); }
  value(tick) { return tick / this.data.ticks * this.data.end; }
  text(tick) { return `${+this.value(tick).toPrecision(6)}${this.data.unit && ` ${this.data.unit}`}`; }

  title(row) {
    const fold = row.lane.members.length < 2 ? "" : row.alone ? "▾ " : "▸ ";
    return fold + (row.lane.bottleneck ? "★ " : "") + row.name;
  }

  draw() {
    const pen = this.context, scale = devicePixelRatio || 1;
    if (!pen) return;  // asked for while it is not shown; fit() draws it
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, this.width, this.height);
    const first = Math.floor(this.scroller.scrollTop / this.pitch);
    const last = Math.min(this.rows.length - 1, first + Math.ceil((this.height - AXIS) / this.pitch));
    this.look = {ink: css("--ink"), soft: css("--soft"), line: css("--line"), critical: css("--critical"),
      colours: this.data.kinds.map((_, k) => this.colour(k))};
    this.look.inks = this.look.colours.map((one) => isLight(one) ? "#10161d" : "#ffffff");
    this.look.hatch = this.hatch(pen);
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, this.width, this.height - AXIS);
    pen.clip();
    this.drawBands(pen, first);
    for (let y = first; y <= last; y++) this.drawRow(pen, y);
    this.drawMarks(pen);
    pen.restore();
    this.drawAxis(pen);
  }

  hatch(pen) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const line = tile.getContext("2d");
    line.strokeStyle = css("--hatch");
    line.beginPath();
    for (const shift of [-6, 0, 6]) { line.moveTo(shift, 6); line.lineTo(shift + 6, 0); }
    line.stroke();
    return pen.createPattern(tile, "repeat");
  }

  top(y) { return AXIS + y * this.pitch - this.scroller.scrollTop; }

  drawBands(pen) {
    for (const band of this.data.bands.filter((one) => one.shaded)) {
      pen.fillStyle = css("--band");
      pen.fillRect(this.x(band.from), AXIS, this.x(band.to) - this.x(band.from), this.height);
    }
  }

  drawAxis(pen) {
    const {ink, soft, line} = this.look;
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, this.width, AXIS);
    const shown = this.value(this.to - this.from), most = Math.max(2, this.plot() / 90);
    let step = 10 ** Math.floor(Math.log10(shown / most));
    for (const factor of [1, 2, 5, 10, 20]) if (shown / (step * factor) <= most) { step *= factor; break; }
    pen.font = `11px ${SANS}`;
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.strokeStyle = line;
    let free = this.gutter;
    for (let i = Math.ceil(this.value(this.from) / step); i * step <= this.value(this.to) * 1.0000001; i++) {
      const at = this.x(i * step / this.data.end * this.data.ticks);
      const text = `${+(i * step).toPrecision(8)}${i === 0 || free === this.gutter ? ` ${this.data.unit}` : ""}`;
      const wide = pen.measureText(text).width, left = clamp(at - wide / 2, this.gutter, this.width - wide - 2);
      pen.beginPath(); pen.moveTo(at, AXIS - 6); pen.lineTo(at, AXIS); pen.stroke();
      if (left < free) continue;
      pen.fillStyle = soft;
      pen.fillText(text, left, this.data.bands.length ? AXIS - 23 : AXIS - 14);
      free = left + wide + 6;
    }
    pen.fillStyle = ink;
    for (const band of this.data.bands) {
      const from = Math.max(this.gutter, this.x(band.from)), to = Math.min(this.width, this.x(band.to));
      const wide = pen.measureText(band.name).width;
      if (to - from > wide + 2) pen.fillText(band.name, (from + to - wide) / 2, AXIS - 9);
    }
    pen.beginPath(); pen.moveTo(this.gutter, AXIS - 0.5); pen.lineTo(this.width, AXIS - 0.5); pen.stroke();
  }

  // Top and height of the bars of a row.
  place(y) {
    const {lane} = this.rows[y], room = 24, above = this.pitch - room;
    const tall = lane.group === "device" ? 16 : 10;
    return [this.top(y) + above + (room - tall) / 2 - 1, tall];
  }

  drawRow(pen, y) {
    const row = this.rows[y], {lane} = row, [top, tall] = this.place(y);
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.fillStyle = lane.group === "device" || lane.group === "title" ? this.look.ink : this.look.soft;
    pen.font = `${lane.bottleneck || lane.group === "title" ? "600 " : ""}12px ${SANS}`;
    const free = lane.group === "title" ? this.width : this.narrow ? this.width - 8 : this.gutter - 10;
    const middle = this.narrow ? this.top(y) + 9 : top + tall / 2 + 0.5;
    pen.fillText(this.cut(pen, this.title(row), free - this.chip), (this.narrow ? 2 : 4) + this.chip, middle);
    lane.stages.forEach((stage, i) => {  // in the colours that stages have elsewhere on the page
      pen.fillStyle = shade(stage, this.data.stages);
      pen.fillRect(0, middle - 7 + i * 14 / lane.stages.length, CHIP - 1, 14 / lane.stages.length);
    });
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, this.top(y), this.width - this.gutter, this.pitch);
    pen.clip();
    this.drawIdle(pen, lane, top, tall);
    this.drawBars(pen, row, top, tall);
    pen.restore();
  }

  cut(pen, text, free) {
    if (pen.measureText(text).width <= free) return text;
    let length = text.length;
    while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > free) length--;
    return `${text.slice(0, length)}…`;
  }

  drawIdle(pen, lane, top, tall) {
    pen.font = `10px ${SANS}`;
    for (let i = after(lane.gapEnds, this.from); i < lane.gaps.length && lane.gaps[i].from < this.to; i++) {
      const gap = lane.gaps[i], left = Math.max(this.gutter, this.x(gap.from));
      const wide = Math.min(this.width, this.x(gap.to)) - left;
      if (wide < 1) continue;
      pen.fillStyle = this.look.hatch;
      pen.fillRect(left, top + 1, wide, tall - 2);
      const name = this.data.causes[gap.cause].short, size = pen.measureText(name).width;
      if (size + 10 > wide) continue;
      pen.fillStyle = css("--card");
      pen.fillRect(left + (wide - size) / 2 - 3, top + 1, size + 6, tall - 2);
      pen.fillStyle = this.look.soft;
      pen.fillText(name, left + (wide - size) / 2, top + tall / 2);
    }
  }

  drawBars(pen, row, top, tall) {
    const {lane} = row, drawn = new Map();
    pen.font = `11px ${SANS}`;
    for (let i = after(lane.until, this.from); i < lane.starts.length && lane.starts[i] < this.to; i++) {
      const kind = lane.kind[i], left = this.x(lane.starts[i]), right = this.x(lane.ends[i]);
      const critical = lane.critical[i];
      // Bars within the same half pixel are drawn once.
      const key = kind * 2 + critical;
      if (right - left < 0.5 && right < (drawn.get(key) ?? -1)) continue;
      const wide = Math.max(0.8, right - left > 3 ? right - left - 0.6 : right - left);
      drawn.set(key, left + 0.5);
      pen.fillStyle = this.look.colours[kind];
      pen.fillRect(left, top, wide, tall);
      if (critical) {
        pen.fillStyle = this.look.critical;
        pen.fillRect(left, top + tall + 1, Math.max(1, right - left), 3);
      }
      if (this.picked && this.picked.row === row && this.picked.i === i) {
        pen.strokeStyle = this.look.ink;
        pen.lineWidth = 2;
        pen.strokeRect(left + 1, top, Math.max(2, wide - 2), tall);
        pen.lineWidth = 1;
      }
      const label = this.data.texts[lane.label[i]], y = top + tall / 2 + 0.5;
      this.drawLabel(pen, label, kind, left, right, y, tall)
        || (lane.stages.length === 1 && this.drawLabel(pen, label.replace(/^\d+\./, ""), kind, left, right, y, tall));
    }
  }

  drawLabel(pen, label, kind, left, right, y, tall) {
    if (!label || tall < 10 || right - left < 7) return false;
    const from = Math.max(left, this.gutter), to = Math.min(right, this.width);
    const size = pen.measureText(label).width;
    if (size + 3 > to - from) return false;
    pen.fillStyle = this.look.inks[kind];
    pen.fillText(label, (from + to - size) / 2, y);
    return true;
  }

  drawMarks(pen) {
    pen.strokeStyle = this.look.critical;
    for (const mark of this.data.marks) {
      const at = this.x(mark.at);
      if (at < this.gutter) continue;
      const lanes = mark.lanes ?? [0, this.data.lanes.length];
      const own = this.rows.map((row, y) => row.l >= lanes[0] && row.l < lanes[1] ? y : -1).filter((y) => y >= 0);
      if (!own.length) continue;
      pen.strokeStyle = mark.name ? this.look.critical : this.look.soft;
      pen.setLineDash(mark.name ? [6, 4] : [2, 3]);
      pen.lineWidth = mark.name ? 1.6 : 1;
      pen.beginPath();
      pen.moveTo(at, Math.max(AXIS, this.top(own[0])));
      pen.lineTo(at, this.top(own[own.length - 1] + 1));
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.lineWidth = 1;
  }
}

window.stagewright = {AXIS, Timeline, after, clamp, css, dark, isLight, make, shade, unpack};
})();
