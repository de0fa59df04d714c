"""Headless Chromium over the WebDriver protocol, with the HTTP client that the tests have anyway."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.server.live import up, wait_for

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


def missing() -> str | None:
    """Why no browser can be started here, or None."""
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    absent = [name for name, path in found.items() if path is None]
    return f"{' and '.join(absent)} not found; on Debian: apt install chromium chromium-driver" if absent else None


class Browser:
    """One window. `run` executes a function's body in the page; what isn't there yet is waited for with `until`."""

    def __init__(self, driver: str, profile: str):
        self._http = httpx.Client(base_url=driver, timeout=60)
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._ask("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self._http.base_url = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        self._ask("/url", {"url": url})

    def run(self, body: str, *args: Any) -> Any:
        return self._ask("/execute/sync", {"script": body, "args": list(args)})

    def until(self, expression: str, seconds: float = 60) -> None:
        wait_for(lambda: self.run(f"return Boolean({expression})"), seconds)

    def type(self, keys: str) -> None:
        """Press keys in whatever has the focus."""
        presses = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]})

    def click(self, selector: str) -> None:
        (element,) = self._ask("/element", {"using": "css selector", "value": selector}).values()
        self._ask(f"/element/{element}/click", {})

    def cdp(self, command: str, **params: Any) -> Any:
        """A command of the Chrome DevTools protocol."""
        return self._ask("/goog/cdp/execute", {"cmd": command, "params": params})

    def screenshot(self) -> bytes:
        """The window's content as PNG."""
        return base64.b64decode(self.cdp("Page.captureScreenshot", format="png")["data"])

    def console(self) -> list[str]:
        """Messages that the page has logged since the last call, errors and refused resources among them."""
        return [entry["message"] for entry in self._ask("/se/log", {"type": "browser"})]

    def close(self) -> None:
        ended = self._http.delete(str(self._http.base_url).rstrip("/"))
        assert ended.status_code == 200, "the browser would outlive the test"
        self._http.close()

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        reply = self._http.post(path, json=body)
        value = reply.json()["value"]
        assert reply.status_code == 200, value
        return value


@contextmanager
def browser(profile: str) -> Iterator[Browser]:
    """A browser with a new profile in the folder `profile`, gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: up(f"http://127.0.0.1:{port}/status"))
        opened = Browser(f"http://127.0.0.1:{port}", profile)
        try:
            yield opened
        finally:
            opened.close()
    finally:
        driver.terminate()
        driver.wait()
