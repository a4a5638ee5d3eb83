"""Who has read nothing yet is given everything, the nodes by one plain read; and whatever became of the copy that this
reads, nobody gets less or older than the records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.model.node import Cordon, NodeRecord, Readiness
from nodeagent.store import client, codec, nodetable
from nodeagent.store.base import StoreUnavailableError
from nodeagent.store.calls import Calls
from nodeagent.store.messages import BeatReply
from nodeagent.store.nodetable import FoundNodes, NodeTable
from tests.contract.bench import Bench

NODES = ("n1", "n2", "n3")


async def newcomer(bench: Bench) -> BeatReply:
    return await bench.beat("n1", rev=0)


async def reported(bench: Bench) -> dict[str, NodeRecord]:
    return {node.id: node for node in (await newcomer(bench)).nodes}


async def stored(bench: Bench) -> dict[str, NodeRecord]:
    """As the records themselves are."""
    found = {}
    async with bench.calls.link() as link:
        prefix = bench.calls.prefix
        for key in await link.ask("KEYS", prefix + "node:*"):
            if str(key).startswith(prefix + "node:"):
                node = str(key).removeprefix(prefix + "node:")
                cordon = await link.ask("HGET", prefix + "cordons", node)
                found[node] = codec.decode_node(await link.ask("HGETALL", str(key)), cordon or "")
    return found


async def ask(bench: Bench, *command: str) -> object:
    async with bench.calls.link() as link:
        name, key, *rest = command
        return await link.ask(name, bench.calls.prefix + key, *rest)


async def test_a_newcomer_reads_what_each_nodes_record_says(bench: Bench) -> None:
    await bench.up(*NODES)
    await bench.beat("n2", readiness={"u": Readiness(state="ready", reason="it is")})
    await bench.store.cordon("n3", Cordon(reason="out", by="ann", at=1.0), "r1")
    await bench.store.leave("n3", bench.lives["n3"])
    assert await reported(bench) == await stored(bench)
    assert (await reported(bench))["n3"].cordon is not None
    await bench.join("n3")
    assert await reported(bench) == await stored(bench)


@pytest.mark.parametrize("text", ["", "x", "n2\na\n1\n0\n0\n0\nx\n{}\n{}", "n2\na\n1\n0\n0\n0\n0\n{}\n{}"])
async def test_a_copy_that_is_missing_old_or_no_copy_is_not_used(bench: Bench, text: str) -> None:
    await bench.up(*NODES)
    before = await stored(bench)
    await ask(bench, "HSET", "nodes", "n2", text)
    await ask(bench, "HDEL", "nodes", "n3")
    await ask(bench, "HSET", "nodes", "n9", text)
    assert await reported(bench) == before
    await ask(bench, "DEL", "nodes")
    assert await reported(bench) == before


async def test_a_copy_of_another_type_costs_nobody_anything(bench: Bench) -> None:
    await bench.up(*NODES)
    before = await stored(bench)
    await ask(bench, "DEL", "nodes")
    await ask(bench, "SET", "nodes", "x")
    assert await reported(bench) == before


async def test_jobs_come_with_it_and_what_changes_later_by_itself(bench: Bench) -> None:
    await bench.up(*NODES)
    await bench.submit()
    first = await newcomer(bench)
    assert (len(first.nodes), len(first.jobs), first.more) == (3, 1, False)
    assert (await bench.beat("n1", rev=first.rev)).nodes == ()
    await bench.beat("n2", readiness={"u": Readiness(state="ready")})
    assert [node.id for node in (await bench.beat("n1", rev=first.rev)).nodes] == ["n2"]


async def test_nodes_are_read_once_however_many_pages_the_jobs_take(bench: Bench) -> None:
    await bench.up(*NODES)
    for number in range(260):
        await bench.submit(f"u{number}", name=f"job{number}")
    await bench.beat("n2", readiness={"u": Readiness(state="ready")})
    first = await newcomer(bench)
    assert first.more and len(first.nodes) == len(NODES)
    second = await bench.beat("n1", rev=first.rev, era=first.era)
    assert (second.nodes, len(second.jobs), second.more) == ((), 4, False)


async def test_a_node_that_was_removed_is_no_news(bench: Bench) -> None:
    await bench.up(*NODES)
    await bench.store.leave("n3", bench.lives["n3"])
    assert (await bench.store.forget("n3", "ann")).removed
    assert set(await reported(bench)) == {"n1", "n2"}
    assert await ask(bench, "HGET", "nodes", "n3") is None


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reads one node, or lists two changes."""
    for name, value in (("AT_A_TIME", 1), ("LISTED_AT_A_TIME", 2), ("SECONDS", -1.0)):
        monkeypatch.setattr(nodetable, name, value)


async def era(bench: Bench) -> str:
    return str(await ask(bench, "HGET", "meta", "era"))


async def whole(bench: Bench, table: NodeTable, calls: int = 100) -> tuple[int, FoundNodes]:
    """The table, and in how many calls it was read."""
    for call in range(1, calls + 1):
        if found := await table.read(await era(bench)):
            return call, found
    raise AssertionError(f"it is not read after {calls} calls")


class Late:
    """Calls on links on which a reply with more than so many texts comes too late."""

    def __init__(self, calls: Calls, most: int) -> None:
        self._calls, self.prefix, self.most = calls, calls.prefix, most
        self.asked: list[int] = []

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Late]:
        async with self._calls.link() as self._link:
            yield self

    async def ask_beside(self, *commands: tuple[str | int, ...]) -> object:
        return await self._link.ask_beside(*commands)

    async def ask(self, *words: str | int) -> object:
        if words[0] == "HMGET" and str(words[1]).endswith("nodes"):
            self.asked.append(len(words) - 2)
            if self.asked[-1] > self.most:
                raise StoreUnavailableError("it did not answer in time")
        return await self._link.ask(*words)


async def test_on_a_slow_link_fewer_nodes_are_read_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodetable, "AT_A_TIME", 8)
    monkeypatch.setattr(nodetable, "LEAST_AT_A_TIME", 1)
    names = [f"n{number}" for number in range(1, 9)]
    await bench.up(*names)
    late = Late(bench.calls, 2)
    _, found = await whole(bench, NodeTable(cast(Calls, late), codec.decode_node))
    assert {node.id for node in found.nodes} == set(names)
    assert late.asked[:3] == [8, 4, 2]


@pytest.mark.usefixtures("small_parts")
async def test_a_reading_that_takes_long_goes_on_where_it_was(bench: Bench) -> None:
    """And brings what has changed meanwhile: a beat after it asks only for what is newer than the whole table."""
    await bench.up(*NODES, "n4", "n5", "n6")
    table = NodeTable(bench.calls, codec.decode_node)
    alone, _ = await whole(bench, table)
    for number in range(alone):
        if number == 4:
            await bench.store.cordon("n1", Cordon(reason="out", by="ann", at=1.0), "r1")
            await bench.store.leave("n6", bench.lives["n6"])
            await bench.join("n7")
        if number == alone - 2:
            assert (await bench.store.forget("n6", "ann")).removed
            await bench.beat("n2", readiness={"u": Readiness(state="ready")})
        assert await table.read(await era(bench)) is None
    calls, found = await whole(bench, table)
    assert {node.id: node for node in found.nodes} == await stored(bench)
    assert found.rev == table.upto.rev == int(str(await ask(bench, "HGET", "meta", "rev")))
    assert calls < 2 * alone, "it is not begun anew"


@pytest.mark.parametrize("nodes", [0, 1, 3])
async def test_cordons_are_read_at_once_unless_they_are_many(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """The names of all nodes cost more than few cordons: an eighth of all that a newcomer cost Redis."""
    for name, value in (("AT_A_TIME", 2), ("FEW_CORDONS", 2)):
        monkeypatch.setattr(nodetable, name, value)
    await bench.up(*NODES)
    for node in NODES[:nodes]:
        await bench.store.cordon(node, Cordon(reason="out", by="ann", at=1.0), f"r-{node}")
    noted = Noted(bench.calls)
    found = await NodeTable(noted, codec.decode_node).read(await era(bench))
    assert found is not None
    assert {node.id: node for node in found.nodes} == await stored(bench)
    about = {0: ["HLEN"], 1: ["HLEN", "HGETALL"], 3: ["HLEN", "HMGET", "HMGET"]}
    assert [name for name, key, *_ in noted.asked if key.endswith("cordons")] == about[nodes]


class Noted(Calls):
    """The calls of a bench, which keep what was asked for."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self.prefix = calls, calls.prefix
        self.asked: list[Sequence[str]] = []

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Any]:
        async with self._calls.link() as link:

            async def ask(*command: str) -> Any:
                self.asked.append(command)
                return await link.ask(*command)

            async def ask_beside(*commands: Sequence[str]) -> Any:
                self.asked += commands
                return await link.ask_beside(*commands)

            yield SimpleNamespace(ask=ask, ask_beside=ask_beside)


async def test_two_that_read_at_once_get_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodetable, "AT_A_TIME", 1)
    await bench.up(*NODES)
    table, now = NodeTable(bench.calls, codec.decode_node), await era(bench)
    for found in await asyncio.gather(*(table.read(now) for _ in range(3))):
        assert found is not None
        assert {node.id: node for node in found.nodes} == await stored(bench)


@pytest.mark.usefixtures("small_parts")
async def test_it_is_begun_anew_where_removals_are_forgotten_meanwhile(bench: Bench) -> None:
    await bench.up(*NODES)
    table = NodeTable(bench.calls, codec.decode_node)
    for _ in range(6):
        assert await table.read(await era(bench)) is None
    await bench.store.leave("n3", bench.lives["n3"])
    assert (await bench.store.forget("n3", "ann")).removed
    await ask(bench, "ZREM", "changes", "gone:node:n3")
    await ask(bench, "HSET", "meta", "horizon", str(await ask(bench, "HGET", "meta", "rev")))
    _, found = await whole(bench, table)
    assert {node.id for node in found.nodes} == {"n1", "n2"}


@pytest.mark.usefixtures("small_parts")
async def test_nodes_of_one_revision_are_all_read(bench: Bench) -> None:
    """A store that was given back may have some."""
    await bench.up(*NODES, "n4", "n5")
    rev = str(await ask(bench, "HGET", "node:n1", "rev"))
    await ask(bench, "ZADD", "changes", rev, "node:n2")
    _, found = await whole(bench, NodeTable(bench.calls, codec.decode_node))
    assert {node.id for node in found.nodes} == {*NODES, "n4", "n5"}


async def test_of_nodes_that_somebody_invents_no_more_are_read_than_there_is_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were there before stay, whatever the others are called; all agents choose the same ones."""
    await bench.up(*NODES)
    assert len((await newcomer(bench)).nodes) == 3
    monkeypatch.setattr(nodetable, "MOST_NODES", 4)
    await bench.up("a1", "a2", "a3")
    anew = await newcomer(bench)
    assert {node.id for node in anew.nodes} == {*NODES, "a1"}
    assert anew.beyond == ("nodes",)
    await bench.join("a4")
    news = await bench.beat("n1", rev=anew.rev, era=anew.era)
    assert (news.nodes, news.beyond) == ((), ("nodes",))
    other = await NodeTable(bench.calls, codec.decode_node).read(await era(bench))
    assert other is not None
    assert {node.id for node in other.nodes} == {"a1", "a2", "a3", "a4"}


async def test_nor_more_of_their_text(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.up("n1")
    await newcomer(bench)
    monkeypatch.setattr(nodetable, "MOST_OF_NODES", 2 * len("".join(await fields(bench, "n1"))))
    await bench.up("a1", "a2", "a3")
    anew = await newcomer(bench)
    assert "n1" in {node.id for node in anew.nodes}
    assert (len(anew.nodes), anew.beyond) == (2, ("nodes",))


async def fields(bench: Bench, node: str) -> list[str]:
    found = await ask(bench, "HGETALL", f"node:{node}")
    assert isinstance(found, list)
    return found


async def test_of_jobs_that_somebody_invents_no_more_are_read_than_there_is_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.up("n1")
    for number in range(4):
        await bench.submit(f"u{number}", name=f"job{number}")
    monkeypatch.setattr(client, "MOST_JOBS", 2)
    first = await newcomer(bench)
    assert ([job.uid for job in first.jobs], first.beyond, first.unread) == (["u0", "u1"], ("jobs",), ())
    with monkeypatch.context() as more:
        more.setattr(client, "MOST_JOBS", 16)
        await bench.submit("u4", name="job4")
    job = await bench.job("u1")
    await bench.store.control("u1", 1, job.control, "r9", "JobChanged", "changed")
    news = await bench.beat("n1", rev=first.rev, era=first.era)
    assert ([job.uid for job in news.jobs], news.beyond) == (["u1"], ("jobs",)), "what it knows it follows"
    monkeypatch.setattr(client, "MOST_JOBS", 5)
    assert ((anew := await newcomer(bench)).beyond, len(anew.jobs)) == ((), 5)


async def test_a_page_of_records_does_not_keep_the_loop(bench: Bench) -> None:
    await bench.up("n1")
    for number in range(100):
        await bench.submit(f"u{number}", name=f"job{number}")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert len((await newcomer(bench)).jobs) == 100
    counting.cancel()
    assert turns >= 100 // client.DECODED_AT_A_TIME
