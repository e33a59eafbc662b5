// Draws a cluster on a canvas: servers, their links as lines by bandwidth, devices by their stages.
"use strict";
(() => {
const {clamp, css, dark, isLight, make, shade, unpack} = window.stagewright;
const SANS = "system-ui, sans-serif", MANY = 64, GAP = 14, PAD = 6, TITLE = 18, TRUNK = 26, MOST_LINES = 64;
const CELLS = {large: {wide: 62, tall: 44, across: 8}, open: {wide: 46, tall: 38, across: 8},
  folded: {wide: 10, tall: 10, across: 0}};
const FEW = 32, THIN = 1.5, THICK = 8;

class Topology {
  constructor(root, data) {
    Object.assign(this, {root, data, picked: null});
    const rates = data.levels.map((one) => one.bandwidth)
      .concat(data.servers.flatMap((one) => one.links.map(([, , rate]) => rate)));
    this.least = Math.min(...rates);
    this.most = Math.max(...rates);
    this.homes = [];
    data.servers.forEach((server, s) => server.devices.forEach((i) => { this.homes[i] = s; }));
    this.cell = data.devices.length > FEW ? CELLS.open : CELLS.large;
    this.folded = new Set(data.devices.length > MANY && data.servers.length > 1 ? data.servers.keys() : []);
    this.build();
    this.fit();
    new ResizeObserver(() => requestAnimationFrame(() => this.scroller.clientWidth !== this.width && this.fit()))
      .observe(this.scroller);
    dark.addEventListener("change", () => { this.legend(); this.draw(); });
  }

  build() {
    if (this.data.servers.length > 1) {
      const label = make("label", make("div", this.root, {class: "tools"}));
      this.box = make("input", label, {type: "checkbox"});
      this.box.checked = this.folded.size > 0;
      label.append(" servers as blocks");
      this.box.addEventListener("change", () => this.foldAll(this.box.checked));
    }
    this.keys = make("ul", this.root, {class: "legend"});
    this.scroller = make("div", this.root, {class: "scroller", tabindex: "0", role: "application",
      "aria-label": "cluster: arrows select a device, enter folds or unfolds its server, f all servers"});
    this.canvas = make("canvas", this.scroller);
    this.spacer = make("div", this.scroller);
    this.tip = make("div", this.root, {class: "tip", hidden: ""});
    this.status = make("p", this.root, {class: "status", "aria-live": "polite"},
      "Arrow keys or a press select a device; lines lead to those that it exchanges data with.");
    this.legend();
    this.listen();
  }

  colour(stage) { return shade(stage, this.data.stages); }

  // Lines are as thick as the logarithm of their bandwidth.
  thickness(rate) {
    if (this.most <= this.least) return (THIN + THICK) / 2;
    return THIN + (THICK - THIN) * Math.log(rate / this.least) / Math.log(this.most / this.least);
  }

  legend() {
    const {stages, levels, devices} = this.data, shown = [...Array(stages).keys()];
    const some = stages > 12 ? [0, stages >> 1, stages - 1] : shown;
    const entry = (name, set) => {
      const item = make("li", this.keys);
      set(make("span", item, {class: "key"}).style);
      item.append(name);
    };
    this.keys.replaceChildren();
    for (const s of some) entry(`stage ${s}`, (style) => { style.background = this.colour(s); });
    if (stages > 12) make("li", this.keys, {}, "colours by order");
    if (devices.some((one) => !one.stages.length))
      entry("not used", (style) => { style.border = `1px solid ${css("--soft")}`; });
    if (devices.some((one) => one.share !== null))
      entry("memory used", (style) => { style.height = "4px"; style.background = css("--ink"); });
    for (const one of levels)
      entry(`${one.name}: ${one.text}`, (style) => {
        style.height = `${this.thickness(one.bandwidth)}px`;
        style.background = css("--soft");
      });
  }

  foldAll(folded) {
    this.folded = new Set(folded ? this.data.servers.keys() : []);
    if (this.box) this.box.checked = folded;
    this.fit();
  }

  turn(s) {
    if (this.data.servers.length < 2) return;
    if (!this.folded.delete(s)) this.folded.add(s);
    this.box.checked = this.folded.size > 0;
    this.fit();
  }

  fit() {
    this.width = this.scroller.clientWidth;
    if (!this.width) return;
    this.place();
    this.height = Math.min(this.whole, Math.max(260, Math.round(0.72 * innerHeight)));
    this.scroller.style.height = `${this.height}px`;
    this.spacer.style.height = `${this.whole - this.height}px`;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.height = `${this.height}px`;
    this.draw();
  }

  // Places of all servers, in rows with a line below each, and of their devices.
  place() {
    const racks = new Set(this.data.servers.map((one) => one.rack)).size;
    const left = this.data.servers.length > 1 ? (racks > 1 ? 34 : 18) : 2;
    const inner = {boxes: [], cells: [], rows: []};
    let row = null;
    this.data.servers.forEach((server, s) => {
      const box = this.sized(server, s, this.width - left - 2);
      const full = row && row.right + GAP + box.wide > this.width - 2;
      if (!row || full || row.rack !== server.rack) {
        const top = row ? row.bottom + TRUNK + (row.rack !== server.rack ? GAP : 0) : 2;
        row = {rack: server.rack, top, bottom: top, right: left - GAP, servers: []};
        inner.rows.push(row);
      }
      Object.assign(box, {x: row.right + GAP, y: row.top});
      row.right = box.x + box.wide;
      row.bottom = Math.max(row.bottom, box.y + box.tall);
      row.servers.push(s);
      inner.boxes.push(box);
      box.cells.forEach((cell) => inner.cells[cell.i] = {...cell, x: cell.x + box.x, y: cell.y + box.y});
    });
    Object.assign(this, inner, {racks, whole: row.bottom + (this.data.servers.length > 1 ? TRUNK : 4)});
  }

  // The size of a server's box, and where its devices are in it.
  sized(server, s, room) {
    const folded = this.folded.has(s), {wide, tall, across} = folded ? CELLS.folded : this.cell;
    const count = server.devices.length;
    if (!folded && server.links.length) return this.ring(server, room);
    const most = Math.max(1, Math.floor((room - 2 * PAD) / wide));
    const columns = Math.min(count, most, across || Math.ceil(Math.sqrt(2 * count)));
    const rows = Math.ceil(count / columns), bus = folded || count < 2 ? 0 : 14;
    const cells = server.devices.map((i, n) => ({i, wide: wide - 2, tall: tall - 2,
      x: PAD + n % columns * wide + 1, y: TITLE + Math.floor(n / columns) * tall + 1}));
    return {folded, columns, bus, cells, wide: Math.max(columns * wide + 2 * PAD, folded ? 30 : 74),
      tall: TITLE + rows * tall + bus + PAD};
  }

  // Devices in a ring, so that a line between any two passes no other.
  ring(server, room) {
    const {wide, tall} = this.cell, count = server.devices.length;
    const size = Math.min(room - 2 * PAD, Math.max(3.6 * wide, 32 * count)), radius = (size - wide) / 2;
    const cells = server.devices.map((i, n) => {
      const angle = 2 * Math.PI * (n + 0.5) / count;
      return {i, wide: wide - 2, tall: tall - 2, x: PAD + radius * (1 - Math.cos(angle)),
        y: TITLE + radius * (1 - Math.sin(angle))};
    });
    return {folded: false, columns: 1, bus: 0, cells, wide: size + 2 * PAD, tall: TITLE + 2 * radius + tall + PAD};
  }

  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  draw() {
    if (!this.width) return;
    const pen = this.canvas.getContext("2d"), scale = devicePixelRatio || 1, {scrollTop} = this.scroller;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, this.width, this.height);
    pen.setTransform(scale, 0, 0, scale, 0, -scrollTop * scale);
    this.look = {ink: css("--ink"), soft: css("--soft"), line: css("--line"), page: css("--page"),
      critical: css("--critical"), colours: Array.from({length: this.data.stages}, (_, s) => this.colour(s))};
    pen.textBaseline = "middle";
    this.drawTrunks(pen);
    const seen = (one) => one.y < scrollTop + this.height && one.y + one.tall > scrollTop;
    this.boxes.forEach((box, s) => seen(box) && this.drawServer(pen, box, s));
    this.drawPicked(pen);
  }

  stroke(pen, level, ...points) {
    pen.strokeStyle = this.look.soft;
    pen.lineWidth = level ? this.thickness(level.bandwidth) : 1;
    pen.beginPath();
    points.forEach(([x, y], i) => i ? pen.lineTo(x, y) : pen.moveTo(x, y));
    pen.stroke();
    pen.lineWidth = 1;
  }

  level(name) { return this.data.levels.find((one) => one.name === name); }

  // What joins the servers of a row, the rows of a rack, and the racks.
  drawTrunks(pen) {
    if (this.boxes.length < 2) return;
    const servers = this.level("between servers"), racks = this.level("between racks");
    const x = this.racks > 1 ? 22 : 6, firsts = [];
    this.rows.forEach((row, r) => {
      const y = row.bottom + TRUNK / 2 - 2, before = this.rows[r - 1];
      const ends = row.servers.map((s) => this.boxes[s].x + this.boxes[s].wide / 2);
      if (servers) {
        this.stroke(pen, servers, [x, y], [ends.at(-1), y]);
        for (const s of row.servers)
          this.stroke(pen, servers, [this.boxes[s].x + this.boxes[s].wide / 2, this.boxes[s].y + this.boxes[s].tall],
            [this.boxes[s].x + this.boxes[s].wide / 2, y]);
        if (before && before.rack === row.rack) this.stroke(pen, servers, [x, before.bottom + TRUNK / 2 - 2], [x, y]);
        this.write(pen, servers.text.split(",")[0], x + 8, y + 9);
      }
      if (!before || before.rack !== row.rack) firsts.push([y, row]);
    });
    if (this.racks < 2) return;
    this.stroke(pen, racks, [6, firsts[0][0]], [6, firsts.at(-1)[0]]);
    for (const [y] of firsts) this.stroke(pen, racks, [6, y], [x, y]);
  }

  write(pen, text, x, y, colour = this.look.soft) {
    pen.font = `10px ${SANS}`;
    pen.fillStyle = colour;
    pen.textAlign = "left";
    pen.fillText(text, x, y);
  }

  drawServer(pen, box, s) {
    const server = this.data.servers[s], {ink, line, page} = this.look, inside = this.level("within a server");
    pen.fillStyle = page;
    pen.fillRect(box.x, box.y, box.wide, box.tall);
    pen.strokeStyle = line;
    pen.strokeRect(box.x + 0.5, box.y + 0.5, box.wide - 1, box.tall - 1);
    const fold = this.boxes.length > 1 ? (box.folded ? "▸ " : "▾ ") : "";
    const title = `${fold}${box.folded ? s : `server ${s}`}`, rate = inside ? inside.text.split(",")[0] : "";
    this.write(pen, title, box.x + PAD, box.y + TITLE / 2, ink);
    const right = box.wide - PAD - pen.measureText(rate).width;
    if (right > PAD + pen.measureText(title).width + 8) this.write(pen, rate, box.x + right, box.y + TITLE / 2);
    if (inside && box.bus) {
      const y = box.y + box.tall - PAD - 5;
      for (let c = 0; c < box.columns; c++) {
        const lowest = box.cells.findLast((one, n) => n % box.columns === c), at = box.x + lowest.x + lowest.wide / 2;
        this.stroke(pen, inside, [at, box.y + lowest.y + lowest.tall], [at, y]);
      }
      const ends = [box.cells[0], box.cells[Math.min(box.columns, box.cells.length) - 1]];
      this.stroke(pen, inside, ...ends.map((one) => [box.x + one.x + one.wide / 2, y]));
    }
    for (const [one, other, rate] of box.folded ? [] : server.links)
      this.stroke(pen, {bandwidth: rate}, this.middle(one), this.middle(other));
    for (const i of server.devices) this.drawDevice(pen, i, box.folded);
  }

  middle(i) {
    const cell = this.cells[i];
    return [cell.x + cell.wide / 2, cell.y + cell.tall / 2];
  }

  drawDevice(pen, i, folded) {
    const {x, y, wide, tall} = this.cells[i], device = this.data.devices[i], {stages} = device;
    pen.fillStyle = this.look.page;
    pen.fillRect(x, y, wide, tall);
    stages.forEach((stage, n) => {
      pen.fillStyle = this.look.colours[stage];
      pen.fillRect(x + n * wide / stages.length, y, wide / stages.length, tall);
    });
    if (!stages.length) {
      pen.strokeStyle = this.look.soft;
      pen.strokeRect(x + 0.5, y + 0.5, wide - 1, tall - 1);
    }
    if (folded) return;
    const light = !stages.length || isLight(this.look.colours[stages[0]]);
    pen.fillStyle = stages.length ? (light ? "#10161d" : "#ffffff") : this.look.ink;
    pen.textAlign = "center";
    pen.font = `600 13px ${SANS}`;
    const number = stages.length > 3 ? `${stages[0]}…${stages.at(-1)}` : stages.join(" ");
    pen.fillText(number, x + wide / 2, y + tall / 2 - 8, wide - 4);
    pen.font = `10px ${SANS}`;
    pen.fillText(device.name, x + wide / 2, y + tall / 2 + 6, wide - 4);
    if (device.share === null) return;
    pen.globalAlpha = 0.35;
    pen.fillRect(x + 2, y + tall - 5, wide - 4, 3);
    pen.globalAlpha = 1;
    pen.fillRect(x + 2, y + tall - 5, Math.min(1, device.share) * (wide - 4), 3);
  }

  // The devices of the neighbouring stages.
  partners(i) {
    const near = new Set(this.data.devices[i].stages.flatMap((s) => [s - 1, s + 1]));
    return [...this.data.devices.keys()].filter((k) => k !== i && this.data.devices[k].stages.some((s) => near.has(s)));
  }

  drawPicked(pen) {
    if (this.picked === null) return;
    const cell = this.cells[this.picked], [x, y] = this.middle(this.picked);
    pen.strokeStyle = this.look.critical;
    pen.lineWidth = 1.2;
    for (const other of this.partners(this.picked).slice(0, MOST_LINES)) {
      const [to, down] = this.middle(other);
      pen.beginPath();
      pen.moveTo(x, y);
      pen.quadraticCurveTo((x + to) / 2, Math.min(y, down) - 18, to, down);
      pen.stroke();
    }
    pen.lineWidth = 2.5;
    pen.strokeRect(cell.x, cell.y, cell.wide, cell.tall);
    pen.lineWidth = 1;
  }

  about(i) {
    const one = this.data.devices[i], lines = [`${one.name} · ${one.kind} · server ${this.homes[i]}`];
    lines.push(...(one.about.length ? one.about : ["not used by this plan"]));
    lines.push(`memory ${one.memory}`);
    if (one.sent) lines.push(`${one.sent} sent and received in an iteration`);
    if (one.reduced) lines.push(`${one.reduced} all-reduced in an iteration`);
    return lines;
  }

  aboutServer(s) {
    const {devices} = this.data.servers[s], stages = new Set(devices.flatMap((i) => this.data.devices[i].stages));
    return [`server ${s} · ${devices.length} ${devices.length > 1 ? "devices" : "device"}`,
      stages.size ? `stages ${[...stages].sort((one, other) => one - other).join(", ")}` : "not used by this plan"];
  }

  pick(i) {
    this.picked = i;
    const cell = this.cells[i], {scrollTop} = this.scroller;
    this.scroller.scrollTop = clamp(scrollTop, cell.y + cell.tall + 8 - this.height, Math.max(0, cell.y - TITLE - 4));
    this.status.textContent = this.about(i).join(" · ");
    this.ask();
  }

  step(aside, down) {
    const order = this.data.servers.flatMap((one) => one.devices);
    if (this.picked === null) return this.pick(order[0]);
    if (aside) return this.pick(order[clamp(order.indexOf(this.picked) + aside, 0, order.length - 1)]);
    const [x, y] = this.middle(this.picked);
    let best = null;
    for (const i of order) {
      const [to, at] = this.middle(i), away = (at - y) * down;
      if (away < 4) continue;
      const far = away + 0.5 * Math.abs(to - x);
      if (!best || far < best.far) best = {i, far};
    }
    return best ? this.pick(best.i) : undefined;
  }

  press(event) {
    const acts = {ArrowLeft: () => this.step(-1, 0), ArrowRight: () => this.step(1, 0), ArrowUp: () => this.step(0, -1),
      ArrowDown: () => this.step(0, 1), f: () => this.foldAll(!this.folded.size),
      Enter: () => this.picked !== null && this.turn(this.homes[this.picked]),
      Escape: () => { this.picked = null; this.ask(); }};
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // The device, or the server, at a place of the canvas.
  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const x = event.clientX - bounds.left, y = event.clientY - bounds.top + this.scroller.scrollTop;
    const inside = (one) => x >= one.x && x < one.x + one.wide && y >= one.y && y < one.y + one.tall;
    const s = this.boxes.findIndex(inside);
    if (s < 0) return null;
    return {s, i: this.data.servers[s].devices.find((i) => inside(this.cells[i])) ?? null};
  }

  listen() {
    this.scroller.addEventListener("scroll", () => { this.tip.hidden = true; this.ask(); });
    this.scroller.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => {
      const found = this.at(event);
      if (!found) return;
      if (found.i === null || this.boxes[found.s].folded) this.turn(found.s);
      else this.pick(found.i);
    });
  }

  hover(event) {
    const found = this.at(event);
    this.tip.hidden = !found;
    if (!found) return;
    const lines = found.i === null ? this.aboutServer(found.s) : this.about(found.i);
    this.tip.replaceChildren(...lines.flatMap((line) => [line, document.createElement("br")]).slice(0, -1));
    this.tip.style.left = `${clamp(event.clientX + 14, 4, innerWidth - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }
}

window.stagewright.drawTopology = (root, data) => { root.topology = new Topology(root, data); };
for (const root of document.querySelectorAll(".topology"))
  unpack(root.querySelector("script").textContent)
    .then((data) => window.stagewright.drawTopology(root, data))
    .catch((error) => { make("p", root, {}, `The cluster cannot be drawn: ${error}`); throw error; });
})();
