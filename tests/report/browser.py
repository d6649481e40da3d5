"""A headless browser for tests, spoken to over its DevTools pipe: nothing needs installing beside the browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Programs that are tried, in this order; ``DELTAFUSE_BROWSER`` names another one.
NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
TIMEOUT = 60.0


def find() -> str | None:
    """The browser's path; None where there is none."""
    named = os.environ.get("DELTAFUSE_BROWSER")
    if named:
        return named
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser does not start, does not answer, or says no."""


class Page:
    """One page, and all that the browser says of it.

    Attributes:
        requests: URLs that were asked for, the page's own first.
        complaints: what stood on the console, exceptions, and broken policies.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def heard(self, method: str, said: dict[str, Any]) -> None:
        """Take an event in."""
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console: {[a.get('value') for a in said['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {said['exceptionDetails'].get('exception', said)}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"log: {said['entry']['text']}")

    def show(self, path: Path, width: int, *, height: int = 800, dark: bool = False) -> None:
        """Load a file in a window of this width."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="screen", features=scheme)
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + TIMEOUT
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            if time.monotonic() > end:
                raise BrowserError(f"{path} does not load")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Write the page as a picture, down to its end or to ``height``."""
        size = self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(height or size[1], size[1]), "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, path: Path) -> None:
        """Print the page into a file."""
        self.call("Emulation.setEmulatedMedia", media="print")
        found = self.call("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(found["data"]))


class Browser:
    """A running browser; see :func:`opened`."""

    def __init__(self, program: str, folder: str) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        arguments = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
        ]

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            low, high = os.dup(to_browser), os.dup(from_browser)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            arguments,
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._pages: dict[str, Page] = {}
        self._buffer = b""
        self._number = 0

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """Ask, and wait for the answer; events that come before it go to their pages."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        try:
            os.write(self._out, json.dumps(message).encode() + b"\0")
        except OSError as error:
            raise BrowserError(f"the browser is gone: {error}") from error
        while True:
            found = self._read()
            if found.get("id") == self._number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            page = self._pages.get(found.get("sessionId", ""))
            if page is not None and "method" in found:
                page.heard(found["method"], found["params"])

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                raise BrowserError("the browser does not answer" if not ready else "the browser ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def page(self) -> Page:
        """A new, empty page."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        return page

    def close(self) -> None:
        """End the browser and all that it started."""
        for end in (self._in, self._out):
            os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session, made above
        self._process.wait()


@contextlib.contextmanager
def opened(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own, for as long as it is needed.

    Raises:
        BrowserError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="deltafuse.browser.", ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder)
        try:
            browser.call("Browser.getVersion", {})
            yield browser
        finally:
            browser.close()
