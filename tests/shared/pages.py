"""Pages in a browser, and the drawings in them."""

import base64
import json
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from browser import Browser

CHROMIUM = shutil.which("chromium")
# Presses the keys of the timelines, points at all their rows, and tells what it found.
SCRIPT = """(() => {
  const found = {timelines: 0, charts: document.querySelectorAll(".chart canvas").length, told: []};
  for (const root of document.querySelectorAll(".timeline")) {
    const one = root.timeline;
    found.timelines += 1;
    const arrows = ["ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"];
    for (const key of ["c", ...arrows, "+", "-", "f", "f", "0"]) {
      one.scroller.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
      found.told.push(root.querySelector(".status").textContent);
    }
    for (let y = 2; y < one.height; y += 7)
      for (const x of [5, one.width / 3, one.width / 2, one.width - 30]) {
        const box = one.canvas.getBoundingClientRect();
        const where = {clientX: box.left + x, clientY: box.top + y, pointerId: 1};
        one.canvas.dispatchEvent(new PointerEvent("pointermove", where));
      }
    one.tip.hidden = true;
    found.rows = one.rows.length;
    one.picked = null;
    one.foldAll(true);
  }
  found.topologies = document.querySelectorAll(".topology canvas").length;
  for (const {topology} of document.querySelectorAll(".topology")) {
    const press = (key) => {
      topology.scroller.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
      return topology.status.textContent;
    };
    found.devices = [press("ArrowRight"), press("ArrowRight"), press("ArrowDown")];
    found.blocks = [topology.folded.size];
    for (const _ of topology.data.devices) press("ArrowRight");
    found.devices.push(topology.status.textContent);
    if (topology.folded.size) press("f");
    found.blocks.push(topology.folded.size);
    for (let y = 2; y < topology.height; y += 7)
      for (let x = 5; x < topology.width; x += 40) {
        const box = topology.canvas.getBoundingClientRect();
        const where = {clientX: box.left + x, clientY: box.top + y};
        topology.canvas.dispatchEvent(new PointerEvent("pointermove", where));
      }
    topology.tip.hidden = true;
  }
  for (const chart of document.querySelectorAll(".chart canvas"))
    chart.dispatchEvent(new PointerEvent("pointermove", {clientX: 0, clientY: 0}));
  found.width = document.documentElement.scrollWidth;
  found.inner = innerWidth;
  return found;
})()"""

# Their data are unpacked beside the loading of the page.
DRAWN = """[...document.querySelectorAll(".timeline")].every((one) => one.timeline)
  && [...document.querySelectorAll(".topology")].every((one) => one.topology)"""


@dataclass(frozen=True, slots=True)
class Visit:
    """What a browser says of a page: ``found`` by the script, and errors of the console."""

    found: dict[str, Any]
    errors: list[str]


def visit(browser: "Browser", text: str, folder: Path, width: int, dark: bool) -> Visit:
    """Open a page at a width; a screenshot is kept in ``folder``."""
    name = f"{width}-{'dark' if dark else 'light'}"
    file = folder / f"{name}.html"
    file.write_text(text)
    browser.errors.clear()
    browser.open(file.as_uri(), width, dark, height=1600)
    browser.await_that(DRAWN)
    found = browser.run(SCRIPT)
    browser.picture(folder / f"{name}.png")
    return Visit(found, list(browser.errors))


def colours(picture: np.ndarray) -> set[tuple[int, ...]]:
    """The colours of a picture, whose values are from 0 to 1, in bytes."""
    pixels = (picture[:, :, :3].reshape(-1, 3) * 255).round().astype(np.uint32)
    packed = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32))
    return {tuple(int(one).to_bytes(3)) for one in packed}


def drawings(text: str) -> list[dict[str, Any]]:
    """The timelines of a page, as its script reads them."""
    packed = re.findall(r'<script type="text/plain">(.*?)</script>', text, flags=re.DOTALL)
    return [json.loads(zlib.decompress(base64.b64decode(one))) for one in packed]
