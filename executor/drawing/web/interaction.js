// What a reader does with a timeline: zoom, move, select; by pointer, touch and keys.
"use strict";
(() => {
const {AXIS, Timeline, after, clamp, make, unpack} = window.stagewright;
const MOST_ZOOM = 2e4;

class Interactive extends Timeline {
  show(from, to) {
    const span = clamp(to - from, this.data.ticks / MOST_ZOOM, this.data.ticks);
    this.from = clamp(from, 0, this.data.ticks - span);
    this.to = this.from + span;
    this.ask();
  }

  zoom(factor, x = this.gutter + this.plot() / 2) {
    const at = this.tick(x);
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(pixels) {
    const by = pixels / this.plot() * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  // What is at a point: a row, and a bar or an idle interval of it.
  at(x, y) {
    const place = Math.floor((y - AXIS + this.scroller.scrollTop) / this.pitch), row = this.rows[place];
    if (y < AXIS || !row) return null;
    if (x < this.gutter || (this.narrow && y < this.top(place) + 14)) return {row, place, i: -1};
    const tick = this.tick(x), near = 2 / this.plot() * (this.to - this.from), {lane} = row;
    for (let i = after(lane.until, tick - near); i < lane.starts.length && lane.starts[i] <= tick + near; i++)
      if (lane.ends[i] >= tick - near) return {row, place, i};
    const g = after(lane.gapEnds, tick), gap = lane.gaps[g];
    return {row, place, i: -1, gap: gap && gap.from <= tick ? gap : null};
  }

  about({row, i, gap}) {
    const {lane} = row;
    if (i < 0 && !gap) return [row.name];
    const [from, to] = gap ? [gap.from, gap.to] : [lane.starts[i], lane.ends[i]];
    const times = `${this.text(from)} to ${this.text(to)}, ${this.text(to - from)} long`;
    if (gap) return [`idle ${this.data.causes[gap.cause].name}`, row.name, times];
    const {texts} = this.data, detail = texts[lane.detail[i]];
    const kind = this.data.kinds[lane.kind[i]].name + (lane.critical[i] ? ", on the critical path" : "");
    const name = texts[lane.stem[i]] + (lane.number[i] < 0 ? "" : lane.number[i]);
    return [`${name} ${kind}`, row.name, times, ...(detail ? [detail] : [])];
  }

  pick(place, i) {
    const row = this.rows[place];
    this.picked = {row, place, i};
    const from = row.lane.starts[i], to = row.lane.ends[i], span = this.to - this.from;
    if (to <= this.from || from >= this.to) this.show((from + to - span) / 2, (from + to + span) / 2);
    const top = place * this.pitch, room = this.height - AXIS - this.pitch;
    this.scroller.scrollTop = clamp(this.scroller.scrollTop, top - room, top);
    this.status.textContent = this.about(this.picked).join(" · ");
    this.ask();
  }

  nextCritical() {
    const found = [];
    const seen = new Set();
    this.rows.forEach(({lane, l}, place) => {
      if (!seen.has(l)) lane.critical.forEach((one, i) => one && found.push([lane.starts[i], lane.ends[i], place, i]));
      seen.add(l);
    });
    if (!found.length) return;
    found.sort((one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2]);
    const held = this.picked;
    const here = held ? found.findIndex(([, , place, i]) => place === held.place && i === held.i) : -1;
    const [, , place, i] = found[(here + 1) % found.length];
    this.pick(place, i);
  }

  step(rows, bars) {
    if (!this.picked) {
      const place = this.rows.findIndex((row) => row.lane.starts.length);
      return place < 0 ? undefined : this.pick(place, 0);
    }
    let {row, place, i} = this.picked;
    if (bars) return this.pick(place, clamp(i + bars, 0, row.lane.starts.length - 1));
    const middle = (row.lane.starts[i] + row.lane.ends[i]) / 2;
    for (place += rows; this.rows[place] && !this.rows[place].lane.starts.length;) place += rows;
    if (!this.rows[place]) return undefined;
    const {lane} = this.rows[place];
    return this.pick(place, clamp(after(lane.until, middle), 0, lane.starts.length - 1));
  }

  press(event) {
    const acts = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.show(0, this.data.ticks), c: () => this.nextCritical(),
      f: () => this.foldAll(this.unfolded.size > 0),
      Enter: () => this.picked && this.turn(this.picked.row),
      ArrowLeft: () => event.shiftKey ? this.move(-80) : this.step(0, -1),
      ArrowRight: () => event.shiftKey ? this.move(80) : this.step(0, 1),
      ArrowUp: () => this.step(-1, 0), ArrowDown: () => this.step(1, 0),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  listen() {
    const fingers = new Map();
    let moved = 0;
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.scroller.addEventListener("scroll", () => { this.tip.hidden = true; this.ask(); });
    this.scroller.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(1.0015 ** event.deltaY, place(event)[0]);
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX || event.deltaY);
      else return;
      event.preventDefault();
    }, {passive: false});
    this.canvas.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, place(event)); moved = 0; });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event), held = fingers.get(event.pointerId);
      if (!held) return this.hover(x, y, event);
      fingers.set(event.pointerId, [x, y]);
      moved += Math.abs(x - held[0]);
      const other = [...fingers].find(([id]) => id !== event.pointerId);
      if (other) {
        const [before, now] = [Math.abs(held[0] - other[1][0]), Math.abs(x - other[1][0])];
        if (before > 5 && now > 5) this.zoom(before / now, (x + other[1][0]) / 2);
      } else this.move(held[0] - x);
      return undefined;
    });
    const release = (event) => {
      const held = fingers.delete(event.pointerId);
      if (!held || moved > 4 || event.type !== "pointerup") return;
      const found = this.at(...place(event));
      if (!found) return;
      if (found.i >= 0) this.pick(found.place, found.i);
      else if (!found.gap) this.turn(found.row);
      else this.status.textContent = this.about(found).join(" · ");
    };
    for (const type of ["pointerup", "pointercancel", "pointerleave"]) this.canvas.addEventListener(type, release);
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  hover(x, y, event) {
    const found = this.at(x, y);
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.replaceChildren(...this.about(found).flatMap((line) => [line, document.createElement("br")]).slice(0, -1));
    this.tip.style.left = `${clamp(event.clientX + 14, 4, innerWidth - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }
}

window.stagewright.drawTimeline = (root, data) => { root.timeline = new Interactive(root, data); };
for (const root of document.querySelectorAll(".timeline")) {
  const held = root.querySelector("script");
  unpack(held.textContent)
    .then((data) => window.stagewright.drawTimeline(root, data))
    .catch((error) => { make("p", root, {}, `The timeline cannot be drawn: ${error}`); throw error; });
}
})();
