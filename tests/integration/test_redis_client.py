"""The Redis client against a server that is frozen, killed, locked, read-only, full or forgetful.

Whatever happens: StoreUnavailableError with a sentence, soon, and right replies again afterwards.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import JobEvent, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store import codec
from nodeagent.store.base import StoreUnavailableError, StoreUnusableError, TooMuchError
from nodeagent.store.calls import Calls
from nodeagent.store.client import CALLERS_LINKS, COMMAND_LINKS, RedisStore, connect
from nodeagent.store.endpoint import StoreEndpoint
from nodeagent.store.link import BusyError, CallersLinks, Links, StoreLink
from nodeagent.store.nodetable import DECODED_AT_A_TIME, LEAST_DECODED, MOST_NODES, NodeTable
from tests.contract.bench import FAST, Bench, facts, refused, spec
from tests.integration.redis_support import slowed, withheld
from tests.submitting import submit_one

pytestmark = pytest.mark.redis
BOUND = 10.0


@pytest.fixture
def server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture
async def store(server: PrivateRedis) -> AsyncIterator[RedisStore]:
    """One that has time: its server answers."""
    store = connect(server.url, "test", BOUND / 2)
    yield store
    await store.close()


@pytest.fixture
async def hasty(server: PrivateRedis) -> AsyncIterator[RedisStore]:
    """One whose calls have 1.2 s: its server is to be silent."""
    hasty = connect(server.url, "test", 1.2)
    yield hasty
    await hasty.close()


async def raw(server: PrivateRedis, *command: str) -> object:
    link = StoreLink(StoreEndpoint(RedisConfig(url=server.url)), 1.0)
    await link.open()
    reply: object = await link.ask(*command)
    await link.drop()
    return reply


async def unavailable(call: object) -> str:
    assert asyncio.iscoroutine(call)
    async with asyncio.timeout(BOUND):
        with pytest.raises(StoreUnavailableError) as caught:
            await call
    return str(caught.value)


async def test_a_frozen_server_costs_one_timeout_and_confuses_no_reply(server: PrivateRedis, hasty: RedisStore) -> None:
    jobs = [await submit_one(hasty, f"u{n}", spec(f"job{n}"), 0, 1.0, "ann", f"r{n}") for n in range(8)]
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        text = await unavailable(submit_one(hasty, "u9", spec("job9"), 0, 1.0, "ann", "r9"))
        assert str(server.socket) in text
        assert "1.2 s" in text
        calls = [submit_one(hasty, f"u{n}", spec(f"job{n}"), 0, 1.0, "ann", f"r{n}") for n in range(8)]
        async with asyncio.timeout(BOUND):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, StoreUnavailableError) for outcome in outcomes)
        await unavailable(hasty.wait("0-0", 0.1))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    again = [await submit_one(hasty, f"u{n}", spec(f"job{n}"), 0, 1.0, "ann", f"r{n}") for n in range(8)]
    assert again == jobs
    kinds = [event.uid for event in await hasty.events("0-0", 100)]
    assert [uid for uid in kinds if uid != "u9"] == [f"u{n}" for n in range(8)]


async def test_a_call_that_has_to_connect_first_has_the_time_for_both(server: PrivateRedis, store: RedisStore) -> None:
    """Where a round trip takes more than half of the bound."""
    await store.remove("u1")  # the server knows the script from now on
    for seconds, answers in ((1.0, True), (2.7, False)):
        async with slowed(server.socket, seconds) as place:
            slow = connect(f"unix://{place}", "test", 1.8)
            if answers:
                await slow.remove("u1")
                await slow.remove("u1")
            else:
                assert "did not answer within 1.8 s" in await unavailable(slow.remove("u1"))
            await slow.close()


async def test_a_killed_server_is_named_and_found_again(server: PrivateRedis, store: RedisStore) -> None:
    bench = Bench(store)
    await bench.up("n1")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    text = await unavailable(bench.beat("n1"))
    assert str(server.socket) in text
    await unavailable(bench.beat("n1"))
    server.stop()
    server.start()  # another process at the same address, and empty
    await refused("behind", bench.beat("n1"))
    await bench.up("n1")
    await bench.beat("n1")


async def test_the_run_id_is_that_of_the_serving_process(server: PrivateRedis, store: RedisStore) -> None:
    for _ in range(2):
        await store.remove("u1")
        links = Links(server.url, 1)
        async with links.one() as link:
            assert await link.ask("HGET", "na:{test}:meta", "run") == link.run_id != ""
        await links.close()
        server.stop()
        server.start()
        await unavailable(store.remove("u1"))  # only the first call meets the old connection


async def test_a_link_that_was_closed_while_nobody_used_it_costs_no_request(
    server: PrivateRedis, store: RedisStore
) -> None:
    """By the server's own ``timeout``, or by what lies between: the first request of each kind after an hour failed, as
    if the store were away."""
    bench = Bench(store)
    await bench.up("n1")
    await store.events("0-0", 1)
    await submit_one(store, "u1", spec(), 0, 1.0, "ann", "r1")
    await raw(server, "CLIENT", "KILL", "TYPE", "normal")
    await until_clients(server, 1)
    await store.events("0-0", 1)
    await submit_one(store, "u2", spec("other"), 0, 1.0, "ann", "r2")
    await bench.beat("n1")


async def test_a_wrong_password_is_reported_as_wrong(server: PrivateRedis) -> None:
    await raw(server, "CONFIG", "SET", "requirepass", "secret")
    store = connect(f"unix://:guess@{server.socket}", "test", 2.0)
    text = await unavailable(store.remove("u1"))
    assert "password" in text
    assert "guess" not in text
    await store.close()
    nobody = connect(server.url, "test", 2.0)
    assert "password" in await unavailable(nobody.remove("u1"))
    await nobody.close()
    right = connect(f"unix://:secret@{server.socket}", "test", 2.0)
    await right.remove("u1")
    await right.close()


async def test_a_read_only_server_is_unavailable(server: PrivateRedis, store: RedisStore) -> None:
    await store.remove("u1")
    await raw(server, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnusableError, match="cannot serve"):
        await store.remove("u1")
    for call in (store.remove("u1"), store.pods({"u1": ["n1"]}), store.events("0-0", 1), store.wait("0-0", 0.1)):
        assert "replica of 127.0.0.1:1" in await unavailable(call)  # whose reads would be old
    await raw(server, "REPLICAOF", "NO", "ONE")
    await store.remove("u1")


async def test_a_full_server_is_unavailable_and_changes_nothing(server: PrivateRedis, store: RedisStore) -> None:
    bench = Bench(store)
    await bench.up("n1")
    before = await bench.beat("n1")
    await raw(server, "CONFIG", "SET", "maxmemory", "1")
    text = await unavailable(bench.submit())
    assert "maxmemory" in text
    await raw(server, "CONFIG", "SET", "maxmemory", "0")
    after = await bench.beat("n1")
    assert (after.rev, after.jobs) == (before.rev, ())


async def test_a_server_that_forgot_the_scripts_gets_them_again(server: PrivateRedis, store: RedisStore) -> None:
    await store.remove("u1")
    await raw(server, "SCRIPT", "FLUSH")
    await store.remove("u1")


async def test_nobody_answers_at_the_address() -> None:
    store = connect("redis://127.0.0.1:1/0", "test", 0.5)
    assert "127.0.0.1:1 cannot be reached" in await unavailable(store.remove("u1"))
    await store.close()


async def test_cancelled_calls_leave_nothing_behind(server: PrivateRedis) -> None:
    rng = random.Random(7)
    patient = connect(server.url, "test", 5.0)
    jobs = [await submit_one(patient, f"u{n}", spec(f"job{n}"), 0, 1.0, "ann", f"r{n}") for n in range(6)]

    async def call(n: int) -> JobRecord:
        return await submit_one(patient, f"u{n}", spec(f"job{n}"), 0, 1.0, "ann", f"r{n}")

    async def events() -> tuple[JobEvent, ...]:
        return await patient.events("0-0", 100)

    for _ in range(40):
        chosen = [rng.randrange(6) for _ in range(10)]
        tasks = [asyncio.create_task(call(n)) for n in chosen]
        other = asyncio.create_task(events())
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.random() * 0.002)
        doomed = rng.sample(tasks, 5)
        for task in doomed:
            task.cancel()
        async with asyncio.timeout(BOUND):
            done = await asyncio.gather(*tasks, other, return_exceptions=True)
        for task, n, result in zip(tasks, chosen, done, strict=False):
            if task in doomed and isinstance(result, asyncio.CancelledError):
                continue
            assert result == jobs[n]
        assert isinstance(done[-1], tuple)
        assert len(done[-1]) == 6
    assert [await call(n) for n in range(6)] == jobs
    await patient.close()
    await until_clients(server, 1)


async def until_clients(server: PrivateRedis, most: int) -> None:
    """Until the server counts no more connections than these (ours asking is one)."""
    async with asyncio.timeout(BOUND):
        while True:
            found = str(await raw(server, "CLIENT", "LIST", "TYPE", "normal")).strip().splitlines()
            if len(found) <= most:
                return
            await asyncio.sleep(0.02)


async def test_connections_are_bounded_and_waits_do_not_block_commands(server: PrivateRedis) -> None:
    store = connect(server.url, "test", 5.0)
    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as group:
        waits = [group.create_task(store.wait("0-0", 60.0)) for _ in range(6)]
        for _ in range(30):
            group.create_task(store.remove("nobody"))
        await asyncio.sleep(0.05)
        found = str(await raw(server, "CLIENT", "LIST", "TYPE", "normal")).strip().splitlines()
        assert len(found) <= 6 + COMMAND_LINKS + 1
        for task in waits[:5]:
            task.cancel()
        await submit_one(store, "u1", spec(), 0, 1.0, "ann", "r")
        await waits[5]
    await store.close()
    await until_clients(server, 1)


async def test_what_callers_read_holds_up_no_call_of_the_agents_and_drops_no_link(server: PrivateRedis) -> None:
    """However many reads are under way, and fail."""
    async with asyncio.timeout(BOUND), withheld(server.socket, b"$6\r\nXRANGE\r\n") as (place, let, connections):
        store = connect(f"unix://{place}", "test", 1.0)
        bench = Bench(store)
        await bench.up("n1")
        reads = [asyncio.create_task(store.events("0-0", 100)) for _ in range(12)]
        while True:
            if sum(connections) == CALLERS_LINKS:
                break
            await asyncio.sleep(0.01)
        before = connections.count(False)
        changes = 0
        while not all(read.done() for read in reads[:CALLERS_LINKS]):
            await bench.beat("n1")
            await submit_one(store, f"u{changes}", spec(f"job{changes}"), 0, 1.0, "ann", f"r{changes}")
            changes += 1
        await bench.beat("n1")
        assert isinstance(reads[0].exception(), StoreUnavailableError)
        assert connections.count(False) <= before + 1, "the first change; no link of the agent's was opened again"
        let.set()
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        assert not isinstance(outcomes[-1], BaseException), "a read that waited for its turn is not late for that"
        await store.close()


async def test_a_read_that_never_has_its_turn_says_so(server: PrivateRedis) -> None:
    async with asyncio.timeout(BOUND), withheld(server.socket, b"$6\r\nXRANGE\r\n") as (place, let, _):
        own, reads = Links(f"unix://{place}", 1, 5.0), Links(f"unix://{place}", 1, 5.0, 0.1)
        store = RedisStore(Calls(own, own, "p:", 5.0, reads=reads))
        first = asyncio.create_task(store.events("0-0", 100))
        await asyncio.sleep(0)
        assert "none of 1 links to the store became free within 0.1 s" in await unavailable(store.events("0-0", 1))
        let.set()
        assert await first == ()
        await store.close()


LATE = "local function ms() local t = redis.call('TIME') return t[1] * 1000 + t[2] / 1000 end "
LATE += "local began = ms() repeat until ms() > began + 150"


async def test_where_the_store_answers_late_what_callers_ask_for_is_held_back(server: PrivateRedis) -> None:
    now = asyncio.get_running_loop().time

    async def asked(links: Links, *command: str | int) -> float:
        async with links.one() as link:
            await link.ask(*command)
            return now()

    patient, hasty = CallersLinks(server.url, 1, 5.0, 5.0), CallersLinks(server.url, 1, 5.0, 0.1)
    answered = await asked(patient, "EVAL", LATE, 0)
    assert await asked(patient, "PING") - answered >= 0.15
    await asked(hasty, "WAIT", 1, 150)  # what is waited for on purpose is no late answer
    await asked(hasty, "PING")
    answered = await asked(hasty, "EVAL", LATE, 0)
    with pytest.raises(BusyError, match="answers late"):
        await asked(hasty, "PING")
    await asyncio.sleep(max(0.0, answered + 1.0 - now()))
    await asked(hasty, "PING")
    for links in (patient, hasty):
        await links.close()


async def test_a_store_that_is_far_away_holds_no_caller_back(server: PrivateRedis) -> None:
    """Found by a stranger: each answer was a late one, and from the fourth question on all were refused."""
    async with slowed(server.socket, 0.11) as place:
        links = CallersLinks(f"unix://{place}", 1, 5.0, 0.05)
        for _ in range(8):
            async with links.one() as link:
                await link.ask("PING")
        await links.close()


async def test_a_server_that_has_no_room_for_a_client_is_quoted() -> None:
    """It says so and ends the connection, whatever the client was about to send: the second of two writes failed."""

    def refuse(listener: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                with listener.accept()[0] as client:
                    client.sendall(b"-ERR max number of clients reached\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=refuse, args=[listener], daemon=True)
        server.start()
        store = connect(f"redis://:secret@127.0.0.1:{listener.getsockname()[1]}/1", "test", BOUND / 2)
        for _ in range(20):
            assert "(ERR max number of clients reached)" in await unavailable(store.remove("u1"))
        await store.close()
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


async def test_closing_ends_what_is_under_way(server: PrivateRedis) -> None:
    store = connect(server.url, "test", 5.0)
    waiting = asyncio.create_task(store.wait("0-0", 60.0))
    await until_blocked(server)
    await store.close()
    await unavailable(_result(waiting))
    await unavailable(store.remove("u1"))


async def _result(task: asyncio.Task[str]) -> str:
    return await task


async def until_blocked(server: PrivateRedis) -> None:
    """Until the server has a client that waits."""
    async with asyncio.timeout(BOUND):
        while True:
            if "blocked_clients:0" not in str(await raw(server, "INFO", "clients")):
                return
            await asyncio.sleep(0.01)


async def test_a_record_that_cannot_be_read_is_named_and_hides_no_other(
    server: PrivateRedis, store: RedisStore
) -> None:
    bench = Bench(store)
    await bench.up("n1")
    await bench.submit()
    await raw(server, "HSET", "na:{test}:job:u1", "mood", "good")
    reply = await bench.beat("n1")
    assert [node.id for node in reply.nodes] == ["n1"]
    assert [(record.key, "mood" in record.why) for record in reply.unread] == [("job:u1", True)]
    await raw(server, "HDEL", "na:{test}:job:u1", "mood")
    assert (await bench.beat("n1")).unread == ()


@pytest.mark.parametrize(
    "damage",
    [
        "'HSET', KEYS[1] .. 'job:u2', 'reason', 'caf\\233'",
        "'HSET', KEYS[1] .. 'job:u2', '\\255', 'x'",
        "'HSET', KEYS[1] .. 'job:u2', 'spec', '\\255'",
    ],
)
async def test_a_byte_that_is_no_text_makes_one_record_unread(
    server: PrivateRedis, store: RedisStore, damage: str
) -> None:
    """Found by strangers: it failed each beat of each agent."""
    bench = Bench(store)
    await bench.up("n1")
    await bench.submit()
    await bench.submit("u2", "other")
    await raw(server, "EVAL", f"return redis.call({damage})", "1", "na:{test}:")
    reply = await bench.beat("n1")
    assert [job.uid for job in reply.jobs] == ["u1"]
    assert [record.key for record in reply.unread] == ["job:u2"]


@pytest.mark.parametrize(
    "damage",
    [
        "'ZADD', KEYS[1] .. 'lease', 99999999999, '\\255'",
        "'HSET', KEYS[1] .. 'saved', '\\255', '\\255'",
        "'XADD', KEYS[1] .. 'events', '*', 'kind', '\\255'",
    ],
)
async def test_a_byte_that_is_no_text_beside_the_records_hurts_none(
    server: PrivateRedis, store: RedisStore, damage: str
) -> None:
    bench = Bench(store)
    await bench.up("n1")
    await bench.submit()
    await raw(server, "EVAL", f"return redis.call({damage})", "1", "na:{test}:")
    assert [job.uid for job in (await bench.beat("n1")).jobs] == ["u1"]
    assert [event.kind for event in await store.events("0-0", 10)] == ["NodeJoined", "JobSubmitted"]
    assert (await store.saved("", 0.0, ["n1"])).nodes == {}


@contextmanager
def at_most(mebibytes: int) -> Iterator[None]:
    """So much more memory of Python's is used at a time within this."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] >> 20 < mebibytes
    finally:
        tracemalloc.stop()


async def test_a_wake_of_megabytes_is_not_read_and_costs_no_other_link(server: PrivateRedis, store: RedisStore) -> None:
    """One entry with one letter that needs four bytes took 230 MB in each agent."""
    bench = Bench(store)
    await bench.up("n1")
    await bench.beat("n1")
    ids = str(await raw(server, "CLIENT", "LIST")).count("\n")
    entry = f"'99999999999999-0', 'e', '\U0001f600' .. string.rep('a', {45 << 20})"
    long = f"return redis.call('XADD', KEYS[1] .. 'wake:all', 'MAXLEN', 1, {entry})"
    await raw(server, "EVAL", long, "1", "na:{test}:")
    with at_most(8), pytest.raises(TooMuchError, match="more than any agent writes"):
        await store.wake("0-0", 1.0, "n1", ["u1"])
    await bench.beat("n1")
    assert str(await raw(server, "CLIENT", "LIST")).count("\n") == ids, "the link of the beats is the same"
    await raw(server, "DEL", "na:{test}:wake:all")
    await bench.submit()
    assert (await store.wake("0-0", 1.0, "n1", ["u1"])).event != "0-0"


@pytest.mark.parametrize("size", ["'reason', string.rep('a', 4194305)", "'spec', string.rep('a', 25 * 1048576)"])
async def test_a_record_that_no_step_writes_stays_in_the_store(
    server: PrivateRedis, store: RedisStore, size: str
) -> None:
    bench = Bench(store)
    await bench.up("n1")
    for uid, name in (("u1", "one"), ("u2", "two"), ("u3", "three")):
        await bench.submit(uid, name)
    await raw(server, "EVAL", f"return redis.call('HSET', KEYS[1] .. 'job:u2', {size})", "1", "na:{test}:")
    reply = await bench.beat("n1")
    assert ([job.uid for job in reply.jobs], reply.gone) == (["u1", "u3"], ())
    assert [(record.key, str(codec.MOST_OF_RECORD) in record.why) for record in reply.unread] == [("job:u2", True)]


INVENT = """
local of = redis.call('HGETALL', KEYS[1] .. 'node:n1')
local node = {}
for i = 1, #of, 2 do node[of[i]] = of[i + 1] end
for i = ARGV[1], ARGV[2] do
  local id, rev = 'x' .. string.format('%.0f', i), redis.call('HINCRBY', KEYS[1] .. 'meta', 'rev', 1)
  node.id, node.rev = id, string.format('%.0f', rev)
  local words, lines = {}, {}
  for field, text in pairs(node) do words[#words + 1] = field words[#words + 1] = text end
  for at, field in ipairs({'id', 'life', 'start', 'lost', 'left', 'joined', 'rev', 'facts', 'readiness'}) do
    lines[at] = node[field] or ''
  end
  redis.call('HSET', KEYS[1] .. 'node:' .. id, unpack(words))
  redis.call('HSET', KEYS[1] .. 'nodes', id, table.concat(lines, '\\n'))
  redis.call('ZADD', KEYS[1] .. 'changes', rev, 'node:' .. id)
end
"""
"""So many copies of node n1."""


async def test_invented_nodes_do_not_keep_the_loop_and_are_read_up_to_a_most(server: PrivateRedis) -> None:
    """All nodes were decoded in one go: agents stood for two seconds at each beat, which was dropped as it took too
    long, and began anew with the next."""
    store = connect(server.url, "test", BOUND)
    await Bench(store).up("n1")
    for start in range(1, MOST_NODES + 2000, 1000):
        await raw(server, "EVAL", INVENT, "1", "na:{test}:", str(start), str(start + 999))
    decoded, at_once, last = 0, 0, 0

    def decode(flat: Sequence[str], cordon: str) -> NodeRecord:
        nonlocal decoded
        decoded += 1
        return codec.decode_node(flat, cordon)

    async def turns() -> None:
        nonlocal at_once, last
        while True:
            at_once, last = max(at_once, decoded - last), decoded
            await asyncio.sleep(0)

    era = str(await raw(server, "HGET", "na:{test}:meta", "era"))
    table, turning = NodeTable(store._calls, decode), asyncio.create_task(turns())
    found = None
    async with asyncio.timeout(6 * BOUND):
        while found is None:
            found = await table.read(era)
    turning.cancel()
    assert (len(found.nodes), table.room.beyond, decoded) == (MOST_NODES, True, MOST_NODES), "none of them twice"
    assert at_once <= DECODED_AT_A_TIME // LEAST_DECODED
    await store.close()


@pytest.mark.parametrize("key", ["nodes", "node:n2", "cordons"])
async def test_a_nodes_text_of_megabytes_hides_no_other(server: PrivateRedis, store: RedisStore, key: str) -> None:
    """A copy of that length is none, and the record is read; with such a cordon the record cannot be."""
    bench = Bench(store)
    await bench.up("n1", "n2", "n3")
    long = "return redis.call('HSET', KEYS[1] .. ARGV[1], ARGV[2], string.rep('a', 26 * 1048576))"
    if key == "node:n2":
        await raw(server, "DEL", "na:{test}:nodes")
    await raw(server, "EVAL", long, "1", "na:{test}:", key, "n2")
    reply = await bench.beat("n1", rev=0)
    for _ in range(10):
        if not reply.unfinished:
            break
        reply = await bench.beat("n1", rev=0)
    unread = [(record.key, "more than any agent writes" in record.why) for record in reply.unread]
    nodes = [node.id for node in reply.nodes]
    assert (nodes, unread) == ((["n1", "n2", "n3"], []) if key == "nodes" else (["n1", "n3"], [("node:n2", True)]))


async def test_what_thousands_of_nodes_have_saved_is_no_reply_to_a_wait(
    server: PrivateRedis, store: RedisStore
) -> None:
    one = "redis.call('HSET', KEYS[1] .. 'saved', string.rep('n', 60) .. i, i .. ' ' .. ARGV[1])"
    await raw(server, "EVAL", f"for i = 1, 8192 do {one} end", "1", "na:{test}:", "e" * 100)
    assert len((await store.saved("", 0.0, [f"{'n' * 60}{i}" for i in range(1, 8193)])).nodes) == 8192


async def test_a_lease_of_what_never_was_goes(server: PrivateRedis, store: RedisStore) -> None:
    bench = Bench(store)
    await bench.up("n1")
    await raw(server, "EVAL", "return redis.call('ZADD', KEYS[1] .. 'lease', 0, '\\255')", "1", "na:{test}:")
    assert (await bench.beat("n1")).lapsed == ()
    assert await raw(server, "ZCARD", "na:{test}:lease") == 1
    assert "StoreDamaged" not in [event.kind for event in await store.events("0-0", 10)]


async def test_what_never_was_is_noticed_once(server: PrivateRedis, store: RedisStore) -> None:
    bench = Bench(store)
    await bench.up("n1")
    damage = "'changes', 99999999999, 'job:\\255'"
    await raw(server, "EVAL", f"return redis.call('ZADD', KEYS[1] .. {damage})", "1", "na:{test}:")
    await refused("behind", bench.beat("n1"))
    for _ in range(600):
        if not (await bench.beat("n1")).recovering:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the store does not recover")
    for _ in range(5):
        await bench.beat("n1")
    kinds = [event.kind for event in await store.events("0-0", 10)]
    assert kinds.count("StoreDamaged") <= 1


async def test_records_of_another_version_are_refused_not_guessed(server: PrivateRedis, store: RedisStore) -> None:
    bench = Bench(store)
    await bench.up("n1")
    await raw(server, "HSET", "na:{test}:meta", "version", "2")
    text = await refused("version", bench.beat("n1"))
    assert "version 2" in text


@pytest.mark.parametrize(
    ("url", "cluster"), [("redis+sentinel://h", "c"), ("http://h", "c"), ("unix:///s", "a b"), ("unix:///s", "")]
)
def test_an_address_or_name_that_cannot_be_is_refused_at_once(url: str, cluster: str) -> None:
    with pytest.raises(ValueError, match=r"names no service|does not start with|cluster name"):
        connect(url, cluster, 0.5)


async def test_a_link_is_dropped_after_an_error(server: PrivateRedis) -> None:
    links = Links(server.url, 1)
    async with links.one() as link:
        first: StoreLink = link
    async with links.one() as link:
        assert link is first
    with pytest.raises(RuntimeError):
        async with links.one() as link:
            raise RuntimeError
    async with links.one() as link:
        assert link is not first
        assert link.run_id == first.run_id
    await links.close()


async def test_keys_all_have_the_prefix_and_pods_a_ttl(server: PrivateRedis, store: RedisStore) -> None:
    bench = Bench(store)
    await bench.up("n1")
    await bench.report(await bench.active(await bench.submit(), "n1"), "n1", "running")
    await bench.store.join("n2", bench.lives["n1"], facts("n2"), FAST)
    found = await raw(server, "KEYS", "*")
    assert isinstance(found, list)
    assert all(str(key).startswith("na:{test}:") for key in found)
    assert {str(key).removeprefix("na:{test}:") for key in found} == {
        "meta", "lease", "changes", "nodes", "events", "names", "highest", "requests", "requests:order",
        "requests:of:1000", "events:of:1000", "events:of:node:n1", "events:of:node:n2",
        "job:u1", "marks:u1", "counts:u1", "packed:u1", "node:n1", "node:n2", "alloc:n1",
        "wake:all", "wake:node:n1", "wake:job:u1",
    }  # fmt: skip
