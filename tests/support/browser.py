"""A real browser without a window, led by its DevTools protocol over a pipe, and what it finds wrong with a page."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60.0

# What is wrong with the pictures and tables of a page, in words. A picture that is not shown yet is waited for.
_EXAMINE = """
(async () => {
  const wrong = [];
  for (const image of document.images) {
    try { await image.decode(); } catch (error) { wrong.push(`a picture does not load: ${image.alt}`); continue; }
    if (!(image.naturalWidth > 0 && image.clientWidth > 0)) wrong.push(`a picture has no size: ${image.alt}`);
    if (!image.alt) wrong.push("a picture has no text in its place");
  }
  for (const table of document.querySelectorAll("table")) {
    const name = table.caption ? table.caption.textContent : "";
    if (!name) wrong.push("a table has no caption");
    if (!table.tBodies.length || !table.tBodies[0].rows.length) wrong.push(`a table has no rows: ${name}`);
    for (const row of table.rows)
      if (row.cells.length != table.rows[0].cells.length) wrong.push(`a row has other columns: ${name}`);
  }
  if (document.documentElement.scrollWidth > document.documentElement.clientWidth)
    wrong.push("the page is wider than its window");
  return {wrong, images: document.images.length, tables: document.querySelectorAll("table").length,
          headings: [...document.querySelectorAll("h1, h2")].map(heading => heading.textContent)};
})()
"""


class Page(NamedTuple):
    """What a browser has to say of a page.

    Attributes:
      problems: in words: pictures that do not load, tables without rows, errors of scripts, requests to anywhere.
      images, tables: how many there are.
      headings: the texts of h1 and h2.
    """

    problems: list[str]
    images: int
    tables: int
    headings: list[str]


def find_browser() -> str | None:
    """The first browser on the PATH."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A browser that was started; see `started_browser`."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def examine(self, file: Path, *, dark: bool = False, width: int = 1200) -> Page:
        """Opens a page and looks at all of it."""
        self._events.clear()
        address = file.resolve().as_uri()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=scheme)
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._ask("Page.navigate", url=address)
        self._wait_for("Page.loadEventFired")
        found = self._ask("Runtime.evaluate", expression=_EXAMINE, awaitPromise=True, returnByValue=True)
        value = found["result"]["value"]
        problems = value["wrong"] + [text for event in self._events if (text := _problem(event, address))]
        return Page(problems, value["images"], value["tables"], value["headings"])

    def screenshot(self, file: Path) -> None:
        """Writes a PNG of the whole page that was examined last."""
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def print_to(self, file: Path) -> None:
        """Writes a PDF of the page that was examined last."""
        file.write_bytes(base64.b64decode(self._ask("Page.printToPDF", printBackground=True)["data"]))

    def _ask(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "result" in answer, f"{method}: {answer.get('error')}"
                return answer["result"]
            self._events.append(answer)

    def _wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def started_browser(program: str) -> Iterator[Browser]:
    """Starts a browser with a profile of its own, and ends it."""
    # It reads commands from its descriptor 3 and writes answers to 4.
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()
    descriptors = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                   f"--user-data-dir={profile}", "--remote-debugging-pipe")  # fmt: skip
        process = subprocess.Popen(
            ["bash", "-c", descriptors, program, *options],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _problem(event: dict[str, Any], address: str) -> str | None:
    """What an event of the browser says is wrong."""
    about: dict[str, Any] = event.get("params", {})
    match event.get("method"):
        case "Network.requestWillBeSent":
            url = about["request"]["url"]
            return None if url == address or url.startswith("data:") else f"a request to {url}"
        case "Runtime.exceptionThrown":
            return f"an error of a script: {about['exceptionDetails']['text']}"
        case "Runtime.consoleAPICalled" if about["type"] in ("error", "assert"):
            return f"a script complains: {about['args'][:1]}"
        case "Log.entryAdded" if about["entry"]["level"] == "error":
            return f"the browser complains: {about['entry']['text']} {about['entry'].get('url', '')}"
    return None
