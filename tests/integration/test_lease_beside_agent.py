"""The agent's side of the lease process: it tells it what to do, and keeps it running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from nodeagent.agent import leaseprocess
from nodeagent.agent.leaseprocess import LocalLeaseProcess
from nodeagent.agent.questions import UdpPeers
from nodeagent.lease.grants import NOTHING
from nodeagent.lease.order import LeasePort, read_order
from nodeagent.lease.statefiles import find_holder
from nodeagent.model.timing import Timing
from nodeagent.osutil.linux import POWER, boot_id, boottime, is_running, pids
from nodeagent.osutil.units import lease_command, lease_unit
from nodeagent.pods.folder import folder_name
from nodeagent.spec.agentconfig import AgentConfig, DirsConfig, SavingConfig
from nodeagent.spec.storeconfig import RedisConfig, TlsConfig
from nodeagent.store import endpoint
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.endpoint import LOOK_LIMIT
from nodeagent.store.wire import Reached
from tests.contract.bench import Bench
from tests.integration.lease_support import BOUND, CLUSTER, LIFE, NODE, SECRET, Node
from tests.integration.redis_support import Server, Yard, frozen, yard
from tests.processes import command_line

pytestmark = pytest.mark.redis
POD = folder_name("u1")
DOOR = LeasePort("127.0.0.1", (0, 0), SECRET)
SYSTEMD_RUN = r"""
import os, pathlib, sys
words = sys.argv[1:]
taken = pathlib.Path(__file__).with_name("taken")
if taken.exists():
    sys.exit("Failed to start transient service unit: Unit nodeagent-lease.service was already loaded")
taken.touch()
command = words[words.index("--") + 1:]
environ = dict(w.removeprefix("--setenv=").split("=", 1) for w in words if w.startswith("--setenv="))
if os.fork() == 0:
    os.setsid()
    os.dup2(os.open(pathlib.Path(__file__).with_name("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.execvpe(command[0], command, environ)
"""
SYSTEMCTL = r"""
import pathlib, sys
assert sys.argv[1:] == ["--quiet", "--no-ask-password", "stop", "nodeagent-lease.service"]
pathlib.Path(__file__).with_name("taken").unlink()
"""
"""Stand-ins for systemd's; the real one, in tests/nodes."""
QUICK = Timing(heartbeat=0.1, fence=1.6, failsafe=0.5)


class Agent:
    """As much of one as there is here."""

    def __init__(self, run: Path, url: str, store: RedisStore, password: Path | None = None, unit: str = "") -> None:
        self.dirs = DirsConfig(run=run, state=run / "state", logs=run / "logs")
        redis = RedisConfig(url=url, password_file=password)
        config = AgentConfig(
            cluster=CLUSTER, redis=redis, dirs=self.dirs, timing=QUICK, without_agent=3600.0,
            saving=SavingConfig(regroup=7200.0),
        )  # fmt: skip
        self.config = config
        self.process = LocalLeaseProcess(config, NODE, store, unit, DOOR)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self.process.run())

    async def die(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task


def begun(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


class World:
    def __init__(self, server: Server, node: Node, bench: Bench, era: str, make: Callable[..., Agent]) -> None:
        self.server, self.node, self.bench, self.era, self.make = server, node, bench, era, make
        self.agent = make()

    def tend(self, start: int = 1) -> None:
        self.agent.process.tend(LIFE, start, self.era, "c1")

    def pid(self) -> int:
        holder = find_holder(self.node.folder)
        return holder[0] if holder is not None else 0

    async def up(self) -> int:
        """The lease process that grants."""
        self.agent.begin()
        self.tend()
        await self.node.until(lambda: self.node.grant(POD).until > boottime())
        return self.pid()

    async def another(self, than: int) -> int:
        await self.node.until(lambda: self.pid() not in (0, than))
        await self.node.renewed_again()
        return self.pid()

    async def gone(self) -> None:
        await self.node.until(lambda: self.pid() == 0)


@pytest.fixture
def servers() -> Iterator[Yard]:
    with yard() as found:
        yield found


@pytest.fixture
async def world(servers: Yard, tmp_path: Path) -> AsyncIterator[World]:
    server = await servers.server("requirepass pw")
    password = tmp_path / "password"
    password.write_text("pw")
    password.chmod(0o600)
    config = RedisConfig(url=f"redis://localhost:{server.port}/0", password_file=password)
    store = connect(config, CLUSTER, 5.0)
    node = Node(tmp_path)
    (tmp_path / "log").touch()
    node.add(POD)
    bench = Bench(store)
    await bench.join(NODE, LIFE)
    era = (await bench.beat(NODE)).era
    made = World(server, node, bench, era, lambda unit="": Agent(tmp_path, config.url, store, password, unit))
    yield made
    await made.agent.die()
    for pid in pids():  # one that has just been started holds nothing yet
        if str(tmp_path) in command_line(pid):
            os.kill(pid, signal.SIGKILL)
    node.close()
    await store.close()


async def test_it_follows_the_order_that_it_reads(world: World) -> None:
    pid = await world.up()
    order = read_order(world.node.folder, boot_id())
    assert order is not None
    assert order.server.greeting == (("AUTH", "pw"),)
    assert order.server.host in ("127.0.0.1", "::1"), "no name: the lease process looks none up"
    assert (order.life, order.start, order.era, order.fence) == (LIFE, 1, world.era, QUICK.fence)
    assert (world.node.folder / "order.json").stat().st_mode & 0o777 == 0o600
    assert world.agent.process.status() == ("holding", "")
    await world.node.until(lambda: (pulse := world.agent.process.pulse()) and pulse.until > boottime())
    assert os.getsid(pid) == pid


async def test_a_started_agent_sees_that_the_lease_runs_in_another_store(world: World, servers: Yard) -> None:
    pid = await world.up()
    other = await servers.server()
    store = connect(RedisConfig(url=other.url), CLUSTER, 5.0)
    started = Agent(world.agent.dirs.run, other.url, store).process
    assert started.elsewhere(None), "nobody knows yet"
    assert started.elsewhere((await store.identity()).era).endswith(f":{world.server.port}")
    assert started.elsewhere(world.era) == "", "it has the same history: a fail-over, or another name of that server"
    assert world.agent.process.elsewhere("") == "", "its own server was emptied"
    await world.agent.die()
    os.kill(pid, signal.SIGKILL)
    await world.node.until(lambda: started.elsewhere("") == "")  # nobody renews it there any more
    await store.close()


async def test_others_are_answered_by_which_store_its_node_has_its_lease(world: World, servers: Yard) -> None:
    await world.up()
    other = await servers.server()
    here, there = (
        connect(RedisConfig(url=url, password_file=password), CLUSTER, 5.0)
        for url, password in ((world.server.url, world.agent.config.redis.password_file), (other.url, None))
    )
    peers = UdpPeers(DOOR)
    await peers.listen()
    await world.node.until(lambda: world.agent.process.address() != "")
    answer = await peers.ask_lease(world.agent.process.address(), BOUND)
    assert answer is not None and answer.age is not None
    assert answer[:3] == (NODE, "c1", world.era) and answer.store.endswith(f":{world.server.port}")
    assert 0.0 <= answer.age < BOUND and not answer.away
    same, another = await here.identity(), await there.identity()
    assert same.goes_on(answer.era) and another.process and not another.goes_on(answer.era)
    assert (another.era, another.place) == ("", f"127.0.0.1:{other.port}")
    peers.close()
    for store in (here, there):
        await store.close()


async def test_an_order_is_written_only_when_it_differs(world: World) -> None:
    await world.up()
    file = world.node.folder / "order.json"
    before = file.stat()
    world.tend()
    assert file.stat().st_ino == before.st_ino
    world.agent.process.config = world.agent.config.model_copy(update={"without_agent": 5.0})
    world.tend()
    order = read_order(world.node.folder, boot_id())
    assert order is not None and order.patience == 5.0


async def test_one_that_dies_is_started_again(world: World) -> None:
    pid = await world.up()
    for number in (signal.SIGKILL, signal.SIGTERM):
        os.kill(pid, number)
        pid = await world.another(pid)


async def test_workers_keep_their_grant_while_starts_fail(world: World) -> None:
    """Seven processes are killed before they have their lock. Pauses of a second each would leave no time for them."""
    timing = QUICK.model_copy(update={"fence": 20.0, "lease": 30.0, "promise": 30.0})
    world.agent.process.config = world.agent.config.model_copy(update={"timing": timing})
    first = await world.up()
    ours, killed = psutil.Process(), set[int]()
    others = {child.pid for child in ours.children()}
    began = boottime()
    os.kill(first, signal.SIGKILL)

    def kill_next() -> bool:
        assert world.node.grant(POD).until > boottime(), f"fenced after {len(killed)} starts that failed"
        for child in ours.children():
            if child.pid not in others | killed:
                child.kill()
                killed.add(child.pid)
        return len(killed) >= 7

    await world.node.until(kill_next)
    assert boottime() - began < 6.0
    await world.node.renewed_again()


async def test_one_that_ends_before_it_renews_is_started_ever_more_slowly(world: World) -> None:
    """The pauses alone leave time for nine in 3 s, with the first, and for one in each further second."""
    await world.up()
    looks, killed, began = Counter[int](), set[int](), boottime()

    def kill_each() -> bool:
        pid = world.pid()
        looks[pid] += 1
        if pid and looks[pid] > 5:  # its agent, which looks half as often, has seen it too
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return boottime() > began + 3 and len(killed) > 2

    with frozen(world.server):
        await world.node.until(kill_each)
    assert len(killed) < 10 + (boottime() - began - 3)


async def test_one_that_hangs_is_killed_and_started_again(world: World) -> None:
    pid = await world.up()
    os.kill(pid, signal.SIGSTOP)
    assert await world.another(pid)
    assert not is_running(pid)


async def test_one_of_another_version_is_replaced(world: World, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import sys, time, pathlib\nfrom nodeagent.lease.statefiles import take_lock\n"
        "fd = take_lock(pathlib.Path(sys.argv[1]), '0.0.0')\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    )
    command = [sys.executable, str(tmp_path / "other.py"), str(world.node.folder)]
    with begun(command) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert find_holder(world.node.folder) == (other.pid, "0.0.0")
        world.agent.begin()
        world.tend()
        await world.another(other.pid)
        assert other.wait(BOUND) == -signal.SIGTERM


async def test_it_outlives_its_agent_and_the_next_one_finds_it(world: World) -> None:
    pid = await world.up()
    await world.agent.die()
    await world.node.renewed_again()
    world.agent = world.make()
    world.agent.begin()
    world.tend(start=2)
    await world.node.until(lambda: world.node.status.of[1] == 2)
    assert world.pid() == pid


async def test_a_lease_that_was_given_back_needs_no_process(world: World) -> None:
    pid = await world.up()
    world.agent.process.end()
    await world.gone()
    assert world.node.grant(POD) == NOTHING
    await asyncio.sleep(0.3)
    assert world.pid() == 0
    world.tend()
    assert await world.another(pid)


async def test_one_that_has_left_is_not_started_again_before_there_is_a_new_order(world: World) -> None:
    world.agent.process.config = world.agent.config.model_copy(update={"without_agent": 0.5})
    pid = await world.up()
    await world.node.until(lambda: world.node.grant(POD).stop_before > 0)
    world.node.obey(boottime(), POD)
    await world.gone()
    assert world.agent.process.status()[0] == "left"
    await asyncio.sleep(0.3)
    assert world.pid() == 0
    await world.agent.die()
    world.agent = world.make()
    world.agent.begin()
    await asyncio.sleep(0.3)
    assert world.pid() == 0, "the order is an earlier agent's"
    await world.bench.join(NODE, LIFE, start=2)
    world.tend(start=2)
    assert await world.another(pid)


async def test_in_a_local_cluster_it_ends_with_the_supervisor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(["sleep", "1000"]) as supervisor:
        monkeypatch.setenv(POWER, "c/n1")
        monkeypatch.setattr(os, "getppid", lambda: supervisor.pid)
        pid = await world.up()
        assert f"{POWER}=c/n1".encode() in environ(pid)
        await world.agent.die()
        await world.node.renewed_again()
        supervisor.kill()
    await world.gone()


async def test_its_log_is_bounded(world: World) -> None:
    log = world.node.folder / "lease.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("x" * (2 << 20))
    await world.up()
    assert log.read_text().startswith("nodeagent lease: holding")


async def test_it_starts_without_a_folder_for_logs(world: World) -> None:
    """A node whose folder for logs is missing, full or hangs still has its lease renewed."""
    world.agent.dirs.logs.write_text("no folder")
    await world.up()
    await world.node.renewed_again()


async def test_a_password_file_that_hangs_holds_up_no_beat(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO without a writer hangs whoever opens it as any file. The new password is ordered once it has come."""
    await world.up()
    file, plain = tmp_path / "password", tmp_path / "new"
    plain.touch(mode=0o600)
    plain.write_text("new")
    file.unlink()
    os.mkfifo(file, 0o600)
    monkeypatch.setattr(endpoint, "open_plain", partial(Path.open, mode="rb"))
    greetings = list[object]()

    def ordered() -> object:
        world.tend()
        order = read_order(world.node.folder, boot_id())
        assert order is not None
        greetings.append(order.server.greeting)
        return greetings[-1]

    monkeypatch.setattr(leaseprocess, "PASSWORD_LATE", 1.0)
    with capture_logs() as logs:
        world.tend()
        await world.node.renewed_again()
        assert ordered() == (("AUTH", "pw"),)
        await asyncio.sleep(3 * LOOK_LIMIT)
        assert not logs, "a look that is slow is no trouble"
        await world.node.until(lambda: bool(ordered() and logs))
        for _ in range(3):
            ordered()
            await world.node.renewed_again()
        assert len(logs) == 1, "it is said once"
    with file.open("w") as late:  # the look that is under way
        plain.replace(file)
        late.write("new")
    await world.node.until(lambda: ordered() == (("AUTH", "new"),))
    assert set(greetings) == {(("AUTH", "pw"),), (("AUTH", "new"),)}


async def test_others_ask_it_where_the_node_is_reached_now(world: World) -> None:
    """By the same process, which goes on renewing."""
    pid = await world.up()
    await world.node.until(lambda: world.agent.process.address().startswith("127.0.0.1:"))
    world.agent.process.relocate("127.0.0.2")
    await world.node.until(lambda: world.agent.process.address().startswith("127.0.0.2:"))
    await world.node.renewed_again()
    assert world.pid() == pid


async def test_nothing_is_ordered_before_the_store_was_reached(world: World, tmp_path: Path) -> None:
    class Nowhere:
        reached = None

    process = LocalLeaseProcess(world.agent.config, NODE, Nowhere(), "", DOOR)
    process.tend(LIFE, 1, "e", "c1")
    for word in (process.wake, lambda: process.alive(cut_off=False), process.end):
        word()
    assert not (world.node.folder / "order.json").exists()


@pytest.mark.parametrize(("check", "name"), [(True, "redis.example"), (False, "")])
def test_tls_is_for_the_name_that_the_agent_asked_for(tmp_path: Path, check: bool, name: str) -> None:
    class There:
        reached = Reached("", "redis.example", "10.0.0.1", 6379)

    (tmp_path / "lease").mkdir()
    dirs = DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path)
    redis = RedisConfig(url="rediss://redis.example/3", tls=TlsConfig(check_hostname=check))
    LocalLeaseProcess(AgentConfig(redis=redis, dirs=dirs), NODE, There(), "", DOOR).tend(LIFE, 1, "e", "c1")
    order = read_order(tmp_path / "lease", boot_id())
    assert order is not None and order.server.tls is not None
    assert (order.server.host, order.server.tls.server) == ("10.0.0.1", name)
    assert order.server.greeting == (("SELECT", "3"),)


# --- as a unit of systemd's


@pytest.mark.parametrize(
    ("agent", "unit"),
    [
        ("nodeagent.service", "nodeagent-lease.service"),
        ("nodeagent@two.service", "nodeagent-lease@two.service"),
        ("gpu.service", "lease-of-gpu.service"),
    ],
)
def test_each_agents_unit_has_one_beside_it(agent: str, unit: str) -> None:
    words = lease_command(agent, {"A": "b"}, ["python", "$x"])
    assert lease_unit(agent) == unit
    assert {f"--unit={unit}", f"--property=Before={agent}", "--setenv=A=b", "--property=Restart=always"} <= set(words)
    assert words[-2:] == ["python", "$$x"]
    assert not [word for word in words if "PartOf" in word or "BindsTo" in word or "Requires" in word]


async def test_systemd_is_asked_to_run_it_and_first_to_forget_what_has_its_name(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("systemd-run", SYSTEMD_RUN), ("systemctl", SYSTEMCTL)):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!{sys.executable}\n{script}")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    world.agent = world.make("nodeagent.service")
    pid = await world.up()
    os.kill(pid, signal.SIGKILL)  # this systemd does not start it again, and does not forget it
    assert await world.another(pid)
    assert not (world.node.folder / "lease.log").exists()
