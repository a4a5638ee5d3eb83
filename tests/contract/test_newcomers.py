"""Who has read nothing yet is given everything, the nodes by one plain read; and whatever became of the copy that this
reads, nobody gets less or older than the records."""

from __future__ import annotations

import pytest

from nodeagent.model.node import Cordon, NodeRecord, Readiness
from nodeagent.store import codec
from nodeagent.store.messages import BeatReply
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
