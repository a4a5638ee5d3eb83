"""The list of nodes comes in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import nodes
from nodeagent.api.server import ApiServer
from nodeagent.model.job import Setback
from tests.unit.api.fakes import FakeView
from tests.unit.plan.build import make_generation, make_job

NAMES = ("n1", "n10", "n2", "n3", "n4")
"""In their order."""


async def asked(view: FakeView, *queries: str) -> list[dict[str, Any]]:
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        connector = aiohttp.UnixConnector(path=str(server.socket_path))
        async with aiohttp.ClientSession(connector=connector) as session:
            answers = []
            for query in queries:
                async with session.get(f"http://agent/v1/nodes{query}") as answer:
                    answers.append(await answer.json())
            return answers


@pytest.fixture
async def view(tmp_path: Path) -> FakeView:
    view = FakeView(tmp_path, NAMES)
    await view.join()
    return view


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ("", NAMES, ""),
        ("?limit=5", NAMES, ""),
        ("?limit=2", NAMES[:2], "n10"),
        ("?limit=2&after=n10", NAMES[2:4], "n3"),
        ("?limit=2&after=n3", NAMES[4:], ""),
        ("?after=n15", NAMES[2:], ""),
        ("?after=n4", (), ""),
    ],
)
async def test_a_page(view: FakeView, query: str, names: tuple[str, ...], more: str) -> None:
    (page,) = await asked(view, query)
    assert (tuple(node["name"] for node in page["items"]), page["next"]) == (names, more)


async def test_no_page_is_longer_than_one_may_be(view: FakeView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PAGE", 3)
    for page in await asked(view, "", "?limit=4", "?limit=0"):
        assert ([node["name"] for node in page["items"]], page["next"]) == (["n1", "n10", "n2"], "n2")


async def test_a_limit_that_is_no_number_is_refused(view: FakeView) -> None:
    (answer,) = await asked(view, "?limit=few")
    assert answer["error"]["code"] == "usage"


async def test_one_node_names_the_jobs_that_go_on_without_it(view: FakeView) -> None:
    late = Setback(node="n3", kind="unanswered", life=view.lives["n3"].life, times=1, at=view.cluster().served)
    job = make_job("running", make_generation(["n1"]), target=3).model_copy(update={"setbacks": (late,)})
    view.shown[job.uid] = job
    away, here = await asked(view, "/n3", "/n2")
    ((name, text),) = ((one["job"], one["text"]) for one in away["setbacks"])
    assert (name, text, here["setbacks"]) == ("a", "did not acknowledge a generation in time", [])
