"""The status page in a real Chromium: what it shows of a cluster, on a wide and a narrow screen, in light and dark;
that what people wrote stays text; and what it says when the agent, the store or the right to look is missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import status
from nodeagent.api.server import ApiServer
from nodeagent.store.errors import waits_for
from tests.integration.browser_support import CHROMIUM, WHY_NOT, Page, browser
from tests.integration.page_scenes import MARKUP, busy
from tests.integration.remote_support import TOKENS, https, write_tokens
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, live_agent, spec_of_roles

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

WIDE, NARROW = 1440, 390
SHOWN = "!document.getElementById('shown').hidden"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
DIM = """
[...document.querySelectorAll('body *')].filter((e) => e.offsetParent && [...e.childNodes].some(
  (n) => n.nodeType === 3 && n.data.trim())).map((e) => {
  const parse = (c) => { const v = c.match(/[\\d.]+/g).map(Number); return v.length > 3 && v[3] === 0 ? null : v; };
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map((v) => v / 255).map(
    (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  let under = e, ground = null;
  while (under && !(ground = parse(getComputedStyle(under).backgroundColor))) under = under.parentElement;
  const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground)];
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.textContent.slice(0, 40)];
}).filter(([ratio]) => ratio < 4.5)
"""
"""Texts whose contrast is below what WCAG asks for (AA)."""


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with browser(tmp_path / "chromium") as tab:
        yield tab


def no_fault(page: Page, url: str) -> None:
    """Nothing failed or was blocked, and nobody else was asked for anything."""
    assert page.problems == []
    assert [asked for asked in page.asked if not asked.startswith(url)] == []


async def test_it_shows_the_cluster_on_wide_and_narrow_screens(page: Page, tmp_path: Path) -> None:
    async with ApiServer(await busy(tmp_path), MetricsPage(Metrics())) as server:
        await page.open(server.http_url, WIDE)
        await page.until(SHOWN, "the cluster is shown")
        assert await page.value(OVERFLOW) == 0
        rows = (await page.text("#jobs tbody")).replace("\t", " ")
        message = (
            "resnet50",
            "running",
            "3 of 3",
            "may be 2-3, chief n1",
            "llama-8b",
            "queued",
            "smoke",
            "succeeded",
            "1 of 10 spent",
            "goodput",
        )
        for words in (*message, "needs 4 nodes, 3 fit: n4 is cordoned"):
            assert words in rows
        reported = await page.text("#stories article")
        for words in ("4 restarts", "3 faults", "worker failed", "rank 3 on n2 failed first", "node lost", "join"):
            assert words in reported, words
        assert (await page.text("#summary")).split("\n")[:5] == [
            "Nodes ready",
            "3 of 4",
            "1 cordoned",
            "GPUs healthy",
            "31 of 32",
        ]
        use = await page.text("#use")
        assert "prod" in use and "GPU hours, goodput 99.0 %" in use
        assert await page.value("document.querySelectorAll('#use .day').length") == 14
        assert await page.value("document.querySelector('#use .day').children.length") == 3, "queues of GPUs only"
        assert await page.value("document.querySelector('#use .share-0').getBoundingClientRect().height > 10")
        nodes = await page.text("#nodes tbody")
        assert (
            "7 of 8 healthy" in nodes and "GPU 5: fell off the bus (fatal)" in nodes and "reboot the machine" in nodes
        )
        assert await page.value("document.querySelector('#nodes [role=img]').ariaLabel.startsWith('GPU 0 free')")
        for width in (NARROW, WIDE):
            for scheme in ("light", "dark"):
                await page.open(server.http_url, width, scheme=scheme)
                await page.until(SHOWN, "the cluster is shown")
                assert await page.value(OVERFLOW) == 0, f"nothing sticks out at {width}"
                assert await page.value(DIM) == [], scheme
                await page.picture(tmp_path / f"{width}-{scheme}.png")  # for whoever looks: pytest keeps it
        no_fault(page, server.http_url)


async def test_it_shows_roles_and_their_places(page: Page, tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    await submit_one(view.store, "u1", spec_of_roles(), 1000, time.time(), "alice", "r1")
    await view.refresh()
    await view.form(view.job("ctr"), 2)
    await view.refresh()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        await page.open(server.http_url, WIDE)
        await page.until(SHOWN, "the cluster is shown")
        assert "server 2/2, trainer 2/2" in await page.text("#jobs tbody")
        nodes = await page.text("#nodes tbody")
        assert "ctr ranks 0-1: server.0, trainer.0" in nodes and "ctr ranks 2-3: server.1, trainer.1" in nodes
        no_fault(page, server.http_url)


async def test_of_many_nodes_the_page_says_how_many_are_not_shown(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_NODES", 2)
    async with ApiServer(await busy(tmp_path), MetricsPage(Metrics())) as server:
        await page.open(server.http_url, WIDE)
        await page.until(SHOWN, "the cluster is shown")
        assert [row.split()[0] for row in (await page.text("#nodes tbody")).splitlines() if row[:1] == "n"] == [
            "n2",
            "n4",
        ]
        assert await page.text("#more-nodes") == "2 more nodes: nodeagentctl nodes"
        assert (await page.text("#summary")).split("\n")[1] == "3 of 4"
        no_fault(page, server.http_url)


async def test_of_many_jobs_the_summary_counts_all(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_LIVE", 1)
    async with ApiServer(await busy(tmp_path), MetricsPage(Metrics())) as server:
        await page.open(server.http_url, WIDE)
        await page.until(SHOWN, "the cluster is shown")
        assert await page.text("#more-jobs") == "1 more job: nodeagentctl get"
        summary = (await page.text("#summary")).split("\n")
        live = summary.index("Live jobs")
        assert summary[live + 1] == "2"
        assert sorted(summary[live + 2].split(", ")) == ["1 queued", "1 running", "1 succeeded"]


async def test_date_and_time_are_of_one_place(page: Page, tmp_path: Path) -> None:
    """Of the viewer's, where it was the next day already."""
    async with ApiServer(await busy(tmp_path), MetricsPage(Metrics())) as server:
        await page.open(server.http_url, WIDE)
        await page.until(SHOWN, "the cluster is shown")
        await page.do("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
        script = "import('./page/draw.js').then((draw) => draw.at(Date.UTC(2026, 2, 1, 20, 30, 5) / 1000))"
        assert await page.value(script) == "2026-03-02 05:30:05"


async def test_what_people_wrote_stays_text(page: Page, tmp_path: Path) -> None:
    async with ApiServer(await busy(tmp_path), MetricsPage(Metrics())) as server:
        await page.open(server.http_url)
        await page.until(SHOWN, "the cluster is shown")
        shown = await page.text()
        assert shown.count(MARKUP) >= 3, "of the node's cordon, of a fault and of a queue"
        assert await page.value("document.images.length") == 0
        assert await page.value("document.scripts.length") == 1
        assert await page.value("document.title") == "nodeagent default"
        no_fault(page, server.http_url)


async def test_it_stays_where_it_is_while_it_lives(page: Page, tmp_path: Path) -> None:
    """What changes is changed in place: what is open stays open, and what has not changed is left alone."""
    view = await busy(tmp_path)
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        await page.open(server.http_url)
        await page.until(SHOWN, "the cluster is shown")
        await page.value("document.querySelector('#stories details').open = true")
        await page.value("document.querySelector('#nodes tbody tr').mine = true")
        await view.form(view.job("resnet50"), 2)
        await view.refresh()
        await page.until("document.querySelector('#jobs tbody').innerText.includes('2 of 3')", "the change is shown")
        assert await page.value("document.querySelector('#stories details').open")
        assert await page.value("document.querySelectorAll('#nodes tbody tr').length") == 4


async def test_an_agent_that_is_gone_and_comes_back(page: Page, tmp_path: Path) -> None:
    view = await busy(tmp_path)
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        await page.open(server.http_url)
        await page.until(SHOWN, "the cluster is shown")
        port = int(server.http_url.rpartition(":")[2])
    await page.until("document.getElementById('notices').innerText.includes('has not answered since')", "it says so")
    assert "resnet50" in await page.text("#jobs"), "what was known stays"
    assert await page.value("document.getElementById('shown').classList.contains('old')")
    view.config = view.config.model_copy(update={"ports": view.config.ports.model_copy(update={"api": port})})
    async with ApiServer(view, MetricsPage(Metrics())):
        await page.until("!document.getElementById('shown').classList.contains('old')", "it is live again")
        assert await page.text("#notices") == ""


async def test_a_store_that_waits_or_is_away_and_a_cluster_without_jobs(page: Page, tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    async with ApiServer(view, MetricsPage(Metrics())) as server:
        await page.open(server.http_url)
        await page.until(SHOWN, "the cluster is shown")
        assert "No job has been submitted yet" in await page.text("main")
        assert not await page.value("document.getElementById('timeline').checkVisibility()")
        view.store_waits = waits_for(("n2", "n3"), 2, 42.0)
        await page.until("document.getElementById('notices').innerText.includes('may know it: n2, n3;')", "for whom")
        assert "Start the agents of those nodes" in await page.text("#notices")
        assert "Store waits" in " ".join((await page.text("#summary")).split())
        assert not await page.value("document.getElementById('shown').classList.contains('old')"), "it is as it is now"
        assert await page.value(DIM) == []
        view.away_since = time.time() - 65
        view.store.away = True
        await page.until("document.getElementById('notices').innerText.includes('The store has not answered')", "so")
        notices = await page.text("#notices")
        assert "not answered the agent of node n1" in notices and "failsafe" not in notices, "its lease is renewed"
        assert "Running jobs go on, those on this node on its lease;" in notices
        view.lent = {"u1": 2.0}
        await page.until(
            "document.getElementById('notices').innerText.includes('1 of those on this node')", "now it is"
        )
        view.joined, view._cluster = False, type(view.cluster())(served=0)
        await page.until("document.getElementById('notices').innerText.includes('has not joined')", "that is said too")


async def test_over_https_it_asks_for_a_token(page: Page, tmp_path: Path) -> None:
    with (
        live_agent(tmp_path) as agent,
        https(agent, agent.view, tokens=str(write_tokens(tmp_path / "tokens.yaml", TOKENS))) as door,
    ):
        await page.open(door.url)
        await page.until("!document.getElementById('door').hidden", "it asks")
        assert not await page.value(SHOWN)
        await _enter(page, "nobodys-secret")
        await page.until(
            "document.getElementById('notices').innerText.includes('does not know this token')", "it says so"
        )
        await _enter(page, "reads-secret")
        await page.until(SHOWN, "the cluster is shown")
        assert await page.value("document.getElementById('door').hidden")
        assert "n1" in await page.text("#nodes")
        assert [asked for asked in page.asked if "secret" in asked] == [], "a token is in no address"


async def _enter(page: Page, token: str) -> None:
    await page.value(f"document.getElementById('token').value = {token!r}")
    await page.value("document.querySelector('#door button').click()")
    await asyncio.sleep(0)
