"""A headless browser that is driven by its DevTools protocol, over a pair of pipes."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pages import CHROMIUM

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads commands from its descriptor 3, and writes what happens to 4.
START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 300.0  # seconds, on a busy machine


class Browser:
    """One tab; ``errors`` are what its console has said so far."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._number, self._session, self._buffer = 0, "", b""
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return dict(told["result"])
            self._hear(told)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._read.fileno(), 1 << 16)
            assert more, "the browser has ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _hear(self, told: dict[str, Any]) -> None:
        method, values = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.errors.append(json.dumps(values["args"]))

    def run(self, script: str) -> Any:
        """The value of an expression, or of its promise."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def await_that(self, script: str) -> None:
        """Wait until an expression is true."""
        ends = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({script})"):
            shown = self.run("document.body?.innerText")
            assert time.monotonic() < ends, (script, self.errors, shown)
            time.sleep(0.1)

    def open(self, url: str, width: int, dark: bool = False, height: int = 900) -> None:
        """Open a page in a window of that width."""
        self.look(width, dark, height)
        self.run("window.isLeft = true")  # what answers until the new page is there
        found = self.send("Page.navigate", url=url)
        leaves = "loaderId" in found  # not for another place on the same page
        self.await_that("document.readyState === 'complete'" + " && !window.isLeft" * leaves)

    def look(self, width: int, dark: bool, height: int = 900) -> None:
        """Set the width of the window, and the scheme of colours."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def picture(self, file: Path) -> None:
        """Keep a picture of the whole page."""
        taken = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser that keeps what it must in ``folder``."""
    assert CHROMIUM is not None
    commands, its_write = os.pipe()
    answers, told = os.pipe()
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile"]
    started = [sys.executable, "-c", START, f"{commands}", f"{told}", *command]
    with (folder / "browser.log").open("w") as log:
        process = subprocess.Popen(started, pass_fds=(commands, told), stdout=log, stderr=log)
        os.close(commands)
        os.close(told)
        try:
            yield Browser(answers, its_write)
        finally:
            process.terminate()
            process.wait(PATIENCE)
