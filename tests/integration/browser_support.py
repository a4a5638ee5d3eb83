"""A real Chromium for a test, told over its DevTools protocol what to open, at which size, and asked what it shows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
WHY_NOT = "no chromium here: apt-get install chromium-headless-shell"
START_LIMIT = 30.0
ANSWER_LIMIT = 20.0


class Page:
    """One tab. ``problems`` are exceptions, blocked loads, errors of its console; ``asked`` all URLs it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.asked: list[str] = []

    async def listen(self) -> None:
        """Take what it says, until it ends."""
        async for message in self._socket:
            shown = message.json()
            if "id" in shown:
                self._waiting.pop(shown["id"]).set_result(shown)
            elif shown["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(shown["params"]["exceptionDetails"]))
            elif shown["method"] == "Log.entryAdded" and shown["params"]["entry"]["level"] == "error":
                self.problems.append(shown["params"]["entry"]["text"])
            elif shown["method"] == "Network.requestWillBeSent":
                self.asked.append(shown["params"]["request"]["url"])

    async def do(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        shown = await asyncio.wait_for(answer, ANSWER_LIMIT)
        assert "error" not in shown, (method, shown["error"])
        result: dict[str, Any] = shown["result"]
        return result

    async def open(self, url: str, width: int = 1440, height: int = 900, scheme: str = "light") -> None:
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.do(f"{domain}.enable")
        await self.resize(width, height)
        await self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.do("Page.navigate", url=url)
        there = f"location.href.startsWith({url!r}) && document.readyState === 'complete'"
        await self.until(there, f"{url} is loaded")

    async def resize(self, width: int, height: int = 900) -> None:
        narrow = width < 760
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow
        )

    async def value(self, script: str) -> Any:
        """Of an expression of JavaScript."""
        shown = await self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in shown, (script, shown["exceptionDetails"])
        return shown["result"].get("value")

    async def until(self, script: str, what: str, limit: float = 30.0) -> None:
        """Until the expression is true."""
        end = time.monotonic() + limit
        while not await self.value(script):
            if time.monotonic() >= end:
                raise AssertionError(f"not within {limit:g} s: {what}\n{await self.value('document.body?.innerText')}")
            await asyncio.sleep(0.05)

    async def text(self, selector: str = "body") -> str:
        found: str = await self.value(f"document.querySelector({selector!r}).innerText")
        return found

    async def picture(self, file: Path) -> None:
        """The whole page, as PNG."""
        whole = (await self.do("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": whole["width"], "height": whole["height"], "scale": 1}
        shown = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shown["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """An empty tab of a Chromium of its own; it ends with the block."""
    assert CHROMIUM is not None, WHY_NOT
    command = [
        CHROMIUM, "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
        f"--user-data-dir={folder}", "--remote-debugging-port=0", "--ignore-certificate-errors", "about:blank",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        port = await asyncio.to_thread(_port, folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                (tab,) = [t for t in await reply.json() if t["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=64 << 20) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                yield page
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)  # Debian's is a script that waits for the program
        await process.wait()


def _port(file: Path) -> int:
    end = time.monotonic() + START_LIMIT
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < end, "chromium does not say where it listens"
        time.sleep(0.05)
    return int(file.read_text().split()[0])
