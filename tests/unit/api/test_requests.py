"""A query parameter that a path does not have is refused: a misspelt one would be as if it had not been given."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from nodeagent.agent.metrics import Metrics
from nodeagent.api.server import ApiServer
from tests.unit.api.fakes import FakeView


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/v1/nodes?limt=5", "did you mean limit?"),
        ("/v1/nodes?limit=5&limit=6", ""),
        ("/v1/history?after=x&size=3", "it has: after, limit"),
        ("/v1/jobs?limit=5", "it has: none"),
        ("/v1/doctor?peer", "did you mean peers?"),
        ("/v1/events?folow=1", "did you mean follow?"),
        ("/v1/usage?group=user", "it has: by, since, until"),
        ("/v1/jobs?local_only=1", ""),
        ("/v1/status?now=1", "it has: none"),
    ],
)
async def test_unknown_query_parameters(tmp_path: Path, path: str, step: str) -> None:
    view = FakeView(tmp_path, ("n1",))
    await view.join()
    async with ApiServer(view, Metrics()) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session, session.get(f"http://agent{path}") as answer:
            error = (await answer.json()).get("error", {})
    assert (answer.status, error.get("next", "")) == ((400 if step else 200), step), error
