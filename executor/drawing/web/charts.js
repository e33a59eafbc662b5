// Draws charts of steps and points on canvases, with named axes and a legend.
"use strict";
(() => {
const {css, dark, shade} = window.stagewright;
const SANS = "system-ui, sans-serif", MOST_NAMED = 8;
function ticks(from, to, most) {
  const span = to - from || 1;
  let step = 10 ** Math.floor(Math.log10(span / most));
  for (const factor of [1, 2, 5, 10]) if (span / (step * factor) <= most) { step *= factor; break; }
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + 1e-9 * span; i++) found.push(+(i * step).toPrecision(10));
  return found;
}

class Chart {
  constructor(root, data) {
    Object.assign(this, {root, data, near: null});
    this.keys = root.appendChild(document.createElement("ul"));
    this.keys.className = "legend";
    this.canvas = root.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${data.y} by ${data.x}`);
    this.status = root.appendChild(document.createElement("p"));
    this.status.className = "status";
    this.status.textContent = "\u00a0";
    this.draw();
    new ResizeObserver(() => requestAnimationFrame(() => root.clientWidth !== this.width && this.draw())).observe(root);
    dark.addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.near = null; this.draw(); });
  }

  colour(s) {
    const {series} = this.data;
    return series[s].colour ? css(series[s].colour) : shade(s, series.length);
  }

  legend() {
    const {series} = this.data, entries = [...new Map(series.map((one, s) => [one.name, this.colour(s)]))];
    const shown = entries.length > MOST_NAMED ? [entries[0], entries[entries.length >> 1], entries.at(-1)] : entries;
    this.keys.replaceChildren(...shown.map(([name, colour]) => {
      const item = document.createElement("li"), key = document.createElement("span");
      key.className = "key";
      key.style.background = colour;
      item.append(key, name);
      return item;
    }));
    if (entries.length > MOST_NAMED) this.keys.append("colours by order");
  }

  draw() {
    const width = this.root.clientWidth, {height, series} = this.data, scale = devicePixelRatio || 1;
    if (!width) return;
    this.width = width;
    this.legend();
    Object.assign(this.canvas, {width: Math.round(width * scale), height: Math.round(height * scale)});
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = `11px ${SANS}`;
    const xs = series.flatMap((one) => one.x), ys = series.flatMap((one) => one.y);
    const most = (values, start) => values.reduce((one, other) => Math.max(one, other), start);
    const points = series.some((one) => one.style === "points"), close = points || this.data.close;
    const low = points ? xs.reduce((one, other) => Math.min(one, other), Infinity) : 0;
    const high = most(xs, low) + (points ? 0.02 * (most(xs, low) - low) : 0), top = most(ys, 0) * 1.06 || 1;
    const floor = close ? ys.reduce((one, other) => Math.min(one, other), Infinity) * 0.94 : 0;
    const rows = ticks(floor, top, 6), left = 14 + Math.max(...rows.map((y) => pen.measureText(`${y}`).width));
    const box = {left, right: width - 10, top: 18, bottom: height - 34};
    this.x = (x) => box.left + (x - low) / (high - low || 1) * (box.right - box.left);
    this.y = (y) => box.bottom - (y - floor) / (top - floor) * (box.bottom - box.top);
    this.axes(pen, box, rows, ticks(low, high, Math.max(2, (width - left) / 80)));
    this.texts = [];
    series.forEach((one, s) => this.line(pen, one, this.colour(s), this.near && this.near.s === s));
  }

  axes(pen, box, rows, columns) {
    pen.strokeStyle = css("--line");
    pen.fillStyle = css("--soft");
    pen.textBaseline = "middle";
    for (const y of rows) {
      pen.beginPath(); pen.moveTo(box.left, this.y(y)); pen.lineTo(box.right, this.y(y)); pen.stroke();
      pen.textAlign = "right";
      pen.fillText(`${y}`, box.left - 5, this.y(y));
    }
    pen.textAlign = "center";
    for (const x of columns) {
      const half = pen.measureText(`${x}`).width / 2;
      pen.fillText(`${x}`, Math.min(this.x(x), box.right + 8 - half), box.bottom + 10);
    }
    pen.fillText(this.data.x, (box.left + box.right) / 2, box.bottom + 26);
    pen.textAlign = "left";
    pen.fillText(this.data.y, 2, 8);
  }

  line(pen, one, colour, bold) {
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = bold ? 3.5 : 1.8;
    pen.setLineDash(one.style === "dashes" ? [6, 4] : []);
    if (one.style === "points") return this.points(pen, one);
    pen.beginPath();
    one.x.forEach((x, i) => {
      if (i) pen.lineTo(this.x(x), this.y(one.y[i - 1]));
      pen.lineTo(this.x(x), this.y(one.y[i]));
    });
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 1;
    return undefined;
  }

  points(pen, one) {
    one.x.forEach((x, i) => {
      const [at, y] = [this.x(x), this.y(one.y[i])], size = pen.measureText(one.names[i]).width;
      pen.beginPath();
      pen.moveTo(at, y - 5); pen.lineTo(at + 5, y); pen.lineTo(at, y + 5); pen.lineTo(at - 5, y);
      pen.fill();
      const left = Math.max(2, at + 8 + size > this.canvas.clientWidth - 4 ? at - 8 - size : at + 8);
      // A name that would cover another is told where it is pointed at.
      if (this.texts.some((other) => Math.abs(other.y - y) < 12 && left < other.right + 4 && left + size > other.left - 4)) return;
      this.texts.push({left, right: left + size, y});
      pen.textAlign = "left";
      pen.fillText(one.names[i], left, y - 7);
    });
  }

  // The series whose line is nearest to the pointer, and its value there.
  hover(event) {
    const box = this.canvas.getBoundingClientRect(), [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    this.data.series.forEach((one, s) => one.x.forEach((x, i) => {
      const until = one.style === "points" ? this.x(x) : this.x(one.x[i + 1] ?? x);
      const aside = Math.max(this.x(x) - px, 0, px - until), away = aside + Math.abs(this.y(one.y[i]) - py);
      if (!best || away < best.away) best = {s, i, away};
    }));
    if (!best) return;
    this.near = best.away < 40 ? best : null;
    this.draw();
    if (!this.near) return;
    const one = this.data.series[best.s];
    this.status.textContent = `${one.names[best.i] ?? one.name}: ${one.y[best.i]} at ${one.x[best.i]}`;
  }
}

window.stagewright.drawChart = (root, data) => { root.chart = new Chart(root, data); };
for (const root of document.querySelectorAll(".chart"))
  window.stagewright.drawChart(root, JSON.parse(root.dataset.chart));
})();
