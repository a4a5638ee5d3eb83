"""What a local cluster's supervisor makes of requests that are none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from nodeagent.local.registry import LocalCluster
from nodeagent.local.supervisor import Supervisor


async def answer(folder: Path, line: bytes) -> bytes:
    """What the supervisor writes to someone who sends this line."""
    cluster = LocalCluster("dev", "0123456789ab", folder / "run/dev", folder / "data/dev", 0.0, False, (20200, 20399))
    supervisor = Supervisor(cluster, [()], 1, [])
    reader = asyncio.StreamReader()
    reader.feed_data(line + b"\n")
    reader.feed_eof()
    writer = mock.create_autospec(asyncio.StreamWriter, instance=True)
    await supervisor._converse(reader, writer)
    writer.close.assert_called_once()
    return b"".join(call.args[0] for call in writer.write.call_args_list)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"\xff", b"[" * 60_000, b"x" * 100_000], ids=lambda x: str(x[:3]))
async def test_what_is_no_request_is_not_answered_and_ends_nothing(tmp_path: Path, line: bytes) -> None:
    assert await answer(tmp_path, line) == b""
