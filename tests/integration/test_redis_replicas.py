"""Replicas and fail-over, on real servers: what is waited for, who is talked to, and that the new primary is found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.world import PodReport
from nodeagent.plan.findings.store import judge
from nodeagent.spec.storeconfig import RedisConfig, SentinelConfig
from nodeagent.store import calls
from nodeagent.store.base import StoreUnavailableError
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.endpoint import StoreEndpoint
from nodeagent.store.inspect import inspect
from nodeagent.store.link import Links, NoPrimaryError, find_primary
from nodeagent.store.whois import NotPrimaryError, identity
from tests.contract.bench import FAST, Bench, refused, spec
from tests.integration.redis_support import BOUND, Server, Yard, ask, frozen, until, yard
from tests.submitting import submit_one

pytestmark = pytest.mark.redis
TIMEOUT = 5.0
"""Of a store that answers."""
HASTY = 1.5
"""Of one that is not to."""
DOWN_AFTER = 30.0
Watched = tuple[Server, list[Server], list[Server]]
WATCH_PASSWORD, PASSWORD = "watch-pw", "server-pw"
LOGIN = (f"requirepass {PASSWORD}", f"masterauth {PASSWORD}")


@pytest.fixture
def servers() -> Iterator[Yard]:
    with yard() as found:
        yield found


@pytest.fixture
async def stores() -> AsyncIterator[list[RedisStore]]:
    made: list[RedisStore] = []
    yield made
    for store in made:
        await store.close()


def opened(stores: list[RedisStore], config: RedisConfig, timeout: float = TIMEOUT) -> RedisStore:
    stores.append(connect(config, "test", timeout))
    return stores[-1]


async def unavailable(call: object) -> str:
    assert asyncio.iscoroutine(call)
    with pytest.raises(StoreUnavailableError) as caught:
        await call
    return str(caught.value)


async def submit(store: RedisStore, name: str) -> JobRecord:
    return await submit_one(store, f"uid-{name}", spec(name), 0, 1.0, "ann", f"request-{name}")


async def role(server: Server) -> str:
    answer = await ask(server, "ROLE", password=PASSWORD)
    assert isinstance(answer, list)
    return str(answer[0])


# --- WAIT


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that are not there are not waited for: most of a call's time is for its reply."""
    monkeypatch.setattr(calls, "REPLICAS_SHARE", 0.1)


async def test_a_step_that_no_replica_has_counts_as_lost(servers: Yard, stores: list[RedisStore]) -> None:
    primary = await servers.server()
    replica = await servers.replica(primary)
    careful = opened(stores, RedisConfig(url=primary.url, replicas=1), 3.0)  # half of it is for the replica
    plain = opened(stores, RedisConfig(url=primary.url))
    bench = Bench(careful)
    await bench.up("n1", "n2")
    read = await bench.beat("n1")
    await bench.beat("n2")
    with frozen(replica):
        text = await unavailable(submit(careful, "alpha"))
        assert "0 of the 1 replicas" in text
        assert "sent again" in text
        alpha = await submit_one(plain, "uid-alpha", spec("alpha"), 0, 1.0, "ann", "request-alpha")
        assert alpha.phase == "queued", "it was done all the same"
        await careful.remove("nobody")  # nobody acts on it
        await bench.beat("n2", rev=alpha.rev)  # a lease needs no replica: a fail-over opens an amnesty
        text = await unavailable(bench.beat("n1", rev=read.rev))
        assert "0 of the 1 replicas" in text, "what others might never have seen is not acted on"
    assert await submit(careful, "alpha") == alpha
    assert [job.uid for job in (await bench.beat("n1", rev=read.rev)).jobs] == [alpha.uid]
    assert await ask(replica, "EXISTS", f"na:{{test}}:job:{alpha.uid}") == 1


@pytest.mark.usefixtures("soon")
async def test_every_step_that_others_act_on_waits(servers: Yard, stores: list[RedisStore]) -> None:
    """On a server without any replica: none of them succeeds with ``replicas``, and without it each is done."""
    primary = await servers.server()
    bench = Bench(opened(stores, RedisConfig(url=primary.url)))
    store = opened(stores, RedisConfig(url=primary.url, replicas=1), HASTY)
    careful = Bench(store)
    await bench.up("n1")
    careful.lives = bench.lives
    job = await bench.submit()
    assert "0 of the 1" in await unavailable(submit(store, "beta"))
    assert "0 of the 1" in await unavailable(careful.propose(job, "n1"))
    forming = await bench.job()
    assert "0 of the 1" in await unavailable(careful.ack(forming, "n1"))
    active = await bench.job()
    assert active.generation is not None
    assert (active.phase, active.generation.state) == ("running", "active"), "each of them was done"
    assert "0 of the 1" in await unavailable(store.activate(job.uid, active.generation.token))
    report = store.report(job.uid, active.generation.token, "n1", bench.lives["n1"], PodReport(state="running"))
    assert "0 of the 1" in await unavailable(report)
    assert "0 of the 1" in await unavailable(careful.end(active, "holding"))
    assert "0 of the 1" in await unavailable(careful.set_control(job, "r9", target=1))
    assert "0 of the 1" in await unavailable(store.cordon("n1", None, "r8"))
    assert "0 of the 1" in await unavailable(careful.join("n1"))
    await store.leave("n1", bench.lives["n1"])


async def test_a_replica_is_never_talked_to(servers: Yard, stores: list[RedisStore]) -> None:
    primary = await servers.server()
    replica = await servers.replica(primary)
    store = opened(stores, RedisConfig(url=replica.url))
    for call in (submit(store, "alpha"), store.pods({"u": ["n1"]}), store.events("0-0", 9), store.wait("0-0", 0.1)):
        assert f"replica of 127.0.0.1:{primary.port}" in await unavailable(call)
    there = opened(stores, RedisConfig(url=primary.url))
    await submit(there, "alpha")
    await ask(primary, "REPLICAOF", "127.0.0.1", str(replica.port))  # under the feet of a link that is open
    assert "cannot serve now" in await unavailable(submit(there, "beta"))
    facts = await inspect(RedisConfig(url=replica.url), TIMEOUT)
    assert (facts.problem, facts.role) == ("", "slave")
    assert any("is a replica" in finding.what for finding in judge(facts, FAST))


# --- Sentinel


@pytest.fixture
async def watched(servers: Yard, request: pytest.FixtureRequest) -> Watched:
    """A primary with two replicas, and three sentinels with a password of their own. Its parameter: in how many
    seconds they take the primary for down."""
    down_after = getattr(request, "param", DOWN_AFTER)
    primary = await servers.server(*LOGIN)
    replicas = [await servers.replica(primary, *LOGIN) for _ in range(2)]
    lines = (
        f"requirepass {WATCH_PASSWORD}", f"sentinel sentinel-pass {WATCH_PASSWORD}",
        f"sentinel auth-pass gpus {PASSWORD}",
    )  # fmt: skip
    return primary, replicas, await servers.sentinels(3, primary, 2, *lines, down_after=down_after)


def through(sentinels: list[Server], folder: Path, **more: object) -> RedisConfig:
    file = folder / "sentinel.pw"
    file.write_text(WATCH_PASSWORD)
    file.chmod(0o600)
    hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
    base: dict[str, object] = {
        "url": f"redis+sentinel://:{PASSWORD}@{hosts}/gpus/0", "sentinel": SentinelConfig(password_file=file),
    }  # fmt: skip
    return RedisConfig.model_validate(base | more)


@pytest.mark.parametrize("watched", [1.0], indirect=True, ids=["soon down"])
async def test_a_fail_over_is_followed_and_nothing_acknowledged_is_lost(
    watched: Watched, stores: list[RedisStore], tmp_path: Path
) -> None:
    primary, replicas, sentinels = watched
    store = opened(stores, through(sentinels, tmp_path))
    bench = Bench(store)
    await bench.up("n1")
    alpha = await submit(store, "alpha")
    before = await bench.beat("n1")
    waiting = asyncio.create_task(_ended(store))
    primary.stop()
    assert "gpus (sentinels" in await unavailable(bench.beat("n1"))
    await asyncio.wait_for(waiting, BOUND)  # the long wait for events ends too

    async def answered() -> bool:
        try:
            await bench.beat("n1")
        except StoreUnavailableError:
            return False
        return True

    await until(answered)  # promoted, found, and followed by the other replica

    async def recovered() -> bool:
        try:
            return not (await bench.beat("n1")).recovering
        except StoreUnavailableError:  # its replica may not have what was written yet
            return False

    await until(recovered)
    after = await bench.beat("n1")
    assert after.era != before.era
    assert (after.cluster_uid, [job.uid for job in after.jobs]) == (before.cluster_uid, [alpha.uid])
    assert after.lapsed == ()
    roles = {await role(replica): replica for replica in replicas}
    assert set(roles) == {"master", "slave"}
    beta = await submit(store, "beta")
    assert await ask(roles["slave"], "EXISTS", f"na:{{test}}:job:{beta.uid}", password=PASSWORD) == 1

    primary.start()  # it comes back, and calls itself a primary until the sentinels tell it otherwise
    await primary.ready()
    anew = opened(stores, through(sentinels, tmp_path))
    gamma = await submit(anew, "gamma")
    assert await ask(roles["master"], "EXISTS", f"na:{{test}}:job:{gamma.uid}", password=PASSWORD) == 1


async def _ended(store: RedisStore) -> None:
    """One long wait for events, however it ends."""
    try:
        await store.wait("9999999999999-0", 2.0)
    except StoreUnavailableError:
        return


async def test_what_the_sentinels_can_tell(watched: Watched, stores: list[RedisStore], tmp_path: Path) -> None:
    primary, _, sentinels = watched
    config = through(sentinels, tmp_path)
    assert await find_primary(StoreEndpoint(config), 5.0) == ("127.0.0.1", primary.port)

    facts = await inspect(config, TIMEOUT)
    assert facts.problem == ""
    seen = facts.sentinel
    assert seen is not None
    assert (seen.listed, seen.answered, seen.known, seen.down_after) == (3, 3, 3, DOWN_AFTER)
    assert seen.primaries == (f"127.0.0.1:{primary.port}",)
    assert (facts.replicas, facts.replicas_wanted, facts.min_replicas, facts.max_lag) == (2, 1, 0, 10)
    assert any("CONFIG SET min-replicas-to-write 1" in finding.fix for finding in judge(facts, FAST))

    stranger = opened(stores, config.model_copy(update={"sentinel": SentinelConfig()}))
    assert "check redis.sentinel" in await unavailable(submit(stranger, "alpha"))
    wrong = through(sentinels, tmp_path, url=config.url.replace("/gpus/", "/cpus/"))
    elsewhere = opened(stores, wrong)
    assert "knows no service 'cpus'" in await unavailable(submit(elsewhere, "alpha"))

    with frozen(sentinels[0]):  # two of three agree: nobody waits for the third
        assert await find_primary(StoreEndpoint(config), BOUND) == ("127.0.0.1", primary.port)
        with frozen(sentinels[1]):  # the one that is left decides when the patience is over
            assert await find_primary(StoreEndpoint(config), 2.0) == ("127.0.0.1", primary.port)
            store = opened(stores, config, HASTY)
            await submit(store, "alpha")
            facts = await inspect(config, HASTY)
            assert facts.sentinel is not None
            assert facts.sentinel.answered == 1
            with frozen(sentinels[2]):
                with pytest.raises(NoPrimaryError, match=r"3 did not answer within 0\.2 s"):
                    await find_primary(StoreEndpoint(config), 0.2)
                await submit(store, "alpha")  # a link that is open needs no sentinel


async def test_a_sentinel_that_names_a_replica_is_not_believed(watched: Watched, servers: Yard) -> None:
    primary, (replica, _), _ = watched
    liar = await servers.server(
        f"sentinel monitor gpus 127.0.0.1 {replica.port} 1", f"sentinel auth-pass gpus {PASSWORD}", sentinel=True
    )
    url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{liar.port}/gpus"
    link = Links(RedisConfig(url=url), 1)
    with pytest.raises(NotPrimaryError, match=f"replica of 127.0.0.1:{primary.port}"):
        async with link.one():
            pass
    await link.close()


async def test_another_process_may_have_forgotten(servers: Yard, stores: list[RedisStore]) -> None:
    server = await servers.server()
    store = opened(stores, RedisConfig(url=server.url))
    bench = Bench(store)
    await bench.up("n1")
    runs = {(await bench.beat("n1")).era for _ in range(2)}
    server.stop()
    server.start()
    await server.ready()
    await refused("behind", bench.beat("n1"))
    await bench.up("n1")
    runs.add((await bench.beat("n1")).era)
    assert len(runs) == 2
    assert "" not in runs


async def test_a_primary_that_was_a_replica_in_between_may_have_forgotten(
    servers: Yard, stores: list[RedisStore]
) -> None:
    """Found by strangers: after a fail-over there and back the process, and so its run id, was the same."""
    first = await servers.server()
    second = await servers.replica(first)
    store, other = (opened(stores, RedisConfig(url=first.url)) for _ in range(2))
    bench = Bench(store)
    await bench.up("n1")
    era = (await bench.beat("n1")).era
    await other.events("0-0", 1)
    await ask(second, "REPLICAOF", "NO", "ONE")
    await ask(first, "REPLICAOF", "127.0.0.1", str(second.port))

    async def is_replica() -> bool:
        return "master_link_status:up" in str(await ask(first, "INFO", "replication"))

    await until(is_replica)
    await ask(first, "REPLICAOF", "NO", "ONE")
    await ask(first, "CLIENT", "KILL", "TYPE", "normal")  # as Sentinel does
    await refused("recovering", store.remove("u1"))
    reply = await bench.beat("n1", rev=1, era=era)
    assert reply.recovering
    assert reply.era != era


async def test_a_link_of_before_a_fail_over_there_and_back_asks_again(servers: Yard, stores: list[RedisStore]) -> None:
    """Or it and the new ones would take each other for other servers for ever."""
    server = await servers.server()
    old, new = (opened(stores, RedisConfig(url=server.url)) for _ in range(2))
    bench = Bench(old)
    await bench.up("n1")
    await servers.replica(server)  # with its first replica a server begins another history
    await Bench(new).join("n2")
    await unavailable(bench.beat("n1"))
    eras = {(await bench.beat("n1")).era for _ in range(3)}
    assert len(eras) == 1


def test_a_server_that_does_not_say_who_it_is_is_refused() -> None:
    with pytest.raises(ConnectionError, match="does not say which process"):
        identity({"role": "master", "run_id": ""})
