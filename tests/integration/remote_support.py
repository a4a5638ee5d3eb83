"""Agents that serve others over https, and the certificates and tokens around them."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api.https import HttpsServer, ServerBounds
from nodeagent.spec.sections import ApiConfig
from tests.unit.api.fakes import FakeView, LiveAgent

ADDRESS = "127.0.0.1"
BOUNDS = ServerBounds()
TOKENS = {"reads": "may: read", "operates": "may: operate"}


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)


def make_ca(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-keyout", str(pair.key), "-out", str(pair.cert),
    )  # fmt: skip
    return pair


def sign(folder: Path, ca: Pair, name: str, *, names: str = f"IP:{ADDRESS}", days: int = 2) -> Pair:
    """A certificate for ``name`` that the CA signed."""
    pair, request, more = Pair(folder / f"{name}.pem", folder / f"{name}.key"), folder / "request", folder / "more"
    openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-keyout", str(pair.key), "-out", str(request),
    )  # fmt: skip
    more.write_text(f"subjectAltName={names}\n")
    openssl(
        "x509", "-req", "-in", str(request), "-CA", str(ca.cert), "-CAkey", str(ca.key), "-CAcreateserial",
        "-days", str(days), "-extfile", str(more), "-out", str(pair.cert),
    )  # fmt: skip
    return pair


def write_tokens(file: Path, entries: Mapping[str, str]) -> Path:
    """Each token is its own name with -secret."""
    lines = [
        f'  {n}: {{sha256: "{hashlib.sha256(f"{n}-secret".encode()).hexdigest()}", {e}}}' for n, e in entries.items()
    ]
    file.touch(mode=0o600)
    file.write_text("\n".join(["tokens:", *lines, ""]))
    return file


def token(folder: Path, name: str) -> str:
    """The path of a file with this token."""
    file = folder / f"{name}.token"
    file.touch(mode=0o600)
    file.write_text(f"{name}-secret\n")
    return str(file)


@dataclass
class Door:
    """One agent's https side."""

    url: str
    certificate: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def speak(self, data: bytes, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        """A connection on which this was sent."""
        context = context or trusting()
        with ExitStack() as closing:  # a connection that is reset may be taken for one that never was
            link = closing.enter_context(socket.create_connection((ADDRESS, self.port), 30))
            secure = closing.enter_context(context.wrap_socket(link, server_hostname=ADDRESS))
            secure.sendall(data)
            closing.pop_all()
        return secure


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@contextmanager
def https(
    agent: LiveAgent,
    view: FakeView,
    bounds: ServerBounds = BOUNDS,
    **api: Any,
) -> Iterator[Door]:
    """``view`` served over https in the loop of ``agent``; what it tells of itself is in its facts from then on."""
    view.config = view.config.model_copy(update={"api": ApiConfig.model_validate({"listen": ADDRESS} | api)})
    view.config.dirs.run.mkdir(parents=True, exist_ok=True)
    reported: list[tuple[str, str]] = []
    server = HttpsServer(
        view, MetricsPage(Metrics()), ADDRESS, lambda url, certificate: reported.append((url, certificate)), bounds
    )
    running = asyncio.run_coroutine_threadsafe(server.run(), agent.loop)
    agent.until(lambda: bool(reported))
    try:
        yield Door(*reported[0])
    finally:
        running.cancel()
        agent.until(running.done)
        agent.do(_settled)


async def _settled() -> None:
    """Until what was cancelled has ended."""
    mine = asyncio.current_task()
    for _ in range(200):
        if not [t for t in asyncio.all_tasks() if t is not mine and "Https" in repr(t.get_coro())]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the https side did not end")
