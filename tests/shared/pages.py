"""Pages in a browser, and the drawings in them."""

import base64
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
    "--virtual-time-budget=10000",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"

# Presses the keys of the timelines, points at all their rows, and tells what it found.
SCRIPT = """<script>addEventListener("load", () => setTimeout(() => {
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
  console.log("FOUND " + JSON.stringify(found));
}, 500));</script>"""


@dataclass(frozen=True, slots=True)
class Visit:
    """What a browser says of a page: ``found`` by the script, and errors of the console."""

    found: dict[str, Any]
    errors: list[str]


def visit(text: str, folder: Path, width: int, dark: bool, height: int = 1600) -> Visit:
    """Open a page at a width; a screenshot is kept in ``folder``.

    The page is in a frame, as a window is at least 500 pixels wide.
    """
    assert CHROMIUM is not None
    name = f"{width}-{'dark' if dark else 'light'}"
    file = folder / f"{name}.html"
    file.write_text(text.replace("</body>", f"{SCRIPT}</body>"))
    frame = folder / f"{name}.frame.html"
    style = f"border: 0; width: {width}px; height: {height}px; display: block"
    scheme = f"<meta name='color-scheme' content='{'dark' if dark else 'light'}'>"
    frame.write_text(f"{scheme}<body style='margin: 0'><iframe src='{file.name}' style='{style}'>")
    run = subprocess.run(
        [CHROMIUM, *FLAGS, *([DARK] if dark else []), f"--window-size={max(width, 500)},{height}",
         f"--user-data-dir={folder}/profile", f"--screenshot={folder / name}.png", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    found = [line for line in said if "FOUND " in line]
    assert len(found) == 1, run.stderr[-2000:]
    told = json.JSONDecoder().raw_decode(found[0].split("FOUND ", 1)[1])[0]
    return Visit(told, [line for line in said if line not in found])


def drawings(text: str) -> list[dict[str, Any]]:
    """The timelines of a page, as its script reads them."""
    packed = re.findall(r'<script type="text/plain">(.*?)</script>', text, flags=re.DOTALL)
    return [json.loads(zlib.decompress(base64.b64decode(one))) for one in packed]
