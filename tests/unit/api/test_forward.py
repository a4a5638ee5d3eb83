"""What another agent answers is looked at before a caller gets it: each line of output, and any other answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.view import AgentView
from nodeagent.api import forward
from nodeagent.api.auth import Caller
from nodeagent.api.forward import ANSWER, PeerRefusedError, Way, peer_lines
from nodeagent.api.locallogs import Query
from nodeagent.api.server import ApiServer
from nodeagent.ctl.client import Client
from tests.unit.api.fakes import FakeView

GOOD: dict[str, Any] = {
    "rank": 1, "stream": "stdout", "node": "n2", "generation": 1, "time": "2026-01-01T00:00:01.000000Z", "text": "one",
    "partial": False,
}  # fmt: skip
END = b'{"end": true}\n'


@asynccontextmanager
async def answering(path: Path, body: bytes, status: str = "200 OK") -> AsyncIterator[list[bytes]]:
    """Somebody who answers every request at this socket with these bytes; yields what was asked."""
    asked = list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    path.parent.mkdir(exist_ok=True)
    server = await asyncio.start_unix_server(serve, path)
    async with server:
        yield asked


async def lines(path: Path, body: bytes, status: str = "200 OK") -> list[dict[str, Any]]:
    async def who() -> Caller:
        return Caller(uid=os.geteuid(), gid=os.getegid(), name="ann", operator=True, trusted=True)

    found = list[dict[str, Any]]()
    async with answering(path, body, status):
        way = Way("n2", "http://agent", socket=str(path))
        answer: AsyncGenerator[dict[str, Any], None] = peer_lines(
            cast("AgentView", None), way, "u", Query(), who, follow=False
        )
        async for line in answer:
            found.append(line)
    return found


def text(line: object) -> bytes:
    return json.dumps(line).encode() + b"\n"


async def test_lines_come_as_they_are_and_signs_of_life_among_them(tmp_path: Path) -> None:
    placed = GOOD | {"place": "trainer.0"}
    body = text(GOOD) + b"{}\n" + text(placed) + END
    assert await lines(tmp_path / "s", body) == [GOOD, {}, placed]


async def test_what_no_line_has_is_left_out(tmp_path: Path) -> None:
    assert await lines(tmp_path / "s", text(GOOD | {"more": [1], "place": {"a": 1}}) + END) == [GOOD]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        *((text({k: v for k, v in GOOD.items() if k != name}), "no output of its node") for name in GOOD),
        (text(GOOD | {"rank": True}), "no output of its node"),
        (text(GOOD | {"generation": 1.5}), "no output of its node"),
        (text(GOOD | {"text": ["one"]}), "no output of its node"),
        (text(GOOD | {"node": "n1"}), "no output of its node"),
        (text([GOOD]), "no JSON object"),
        (b"one\n", "no JSON, or none that it would send"),
        (b"[" * 100_000 + b"\n", "no JSON, or none that it would send"),
        (b"\xff\n", "no JSON, or none that it would send"),
        (b'{"rank": ' + b"1" * 10_000 + b"}\n", "no JSON, or none that it would send"),
        (text(GOOD | {"text": "x" * 300_000}), "a line that is too long"),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else "",
)
async def test_a_line_that_is_none_ends_that_nodes_part(tmp_path: Path, line: bytes, says: str) -> None:
    """Before, one without ``stream`` ended the whole answer to the user, without a word."""
    with pytest.raises(PeerRefusedError, match=says):
        await lines(tmp_path / "s", text(GOOD) + line + END)


async def test_a_compressed_answer_is_not_unpacked(tmp_path: Path) -> None:
    """No agent sends one."""
    packed = gzip.compress(text(GOOD) + END)
    with pytest.raises(PeerRefusedError, match="no JSON, or none that it would send"):
        await lines(tmp_path / "s", packed, "200 OK\r\nContent-Encoding: gzip")


@pytest.mark.parametrize(
    "body", [text({"error": {"message": "no " * 100_000}}), text({"error": []}), text([]), b"", b"no", b"[" * 60_000]
)
async def test_a_refusal_is_short_whatever_it_is(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(PeerRefusedError) as refused:
        await lines(tmp_path / "s", body, "403 Forbidden")
    assert str(refused.value) == "its agent answered 403"
    short = text({"error": {"message": "no " * 1000}})
    with pytest.raises(PeerRefusedError) as refused:
        await lines(tmp_path / "t", short, "403 Forbidden")
    assert len(str(refused.value)) == forward.WORDS


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (text([1]), "no JSON object"),
        (b"[" * 100_000, "no JSON, or none that it would send"),
        (b'"' + b"x" * ANSWER + b'"', f"more than {ANSWER} bytes"),
    ],
    ids=["a list", "deep", "long"],
)
async def test_another_answer_is_an_object_of_bounded_length(tmp_path: Path, body: bytes, says: str) -> None:
    view = FakeView(tmp_path)
    await view.join()
    async with ApiServer(view, MetricsPage(Metrics())) as server, answering(Path(view.near["n2"]), body) as asked:
        client = Client([str(server.socket_path)])
        with pytest.raises(Exception, match=says):
            await asyncio.to_thread(client.get, "/v1/nodes/n2/diag")
        assert b"GET /v1/nodes/n2/diag?local_only=1 HTTP/1.1\r\n" in asked[0]


async def test_a_good_answer_is_passed_on(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    async with ApiServer(view, MetricsPage(Metrics())) as server, answering(Path(view.near["n2"]), text({"a": [1]})):
        assert await asyncio.to_thread(Client([str(server.socket_path)]).get, "/v1/nodes/n2/diag") == {"a": [1]}
