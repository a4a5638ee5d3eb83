"""Workers, places and roles of a pod that are started again alone, and when they are not any more."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from nodeagent.model.jobspec import Hang, JobSpec, Policy, Ready, RestartLimits
from nodeagent.osutil.linux import is_running
from nodeagent.pods.base import PodStatus
from tests.integration.roles_support import begin, spec
from tests.integration.shim_support import NOBODY, UID, Bench, open_bench, pid_of, start_stranger, token, wait_for

FRAGILE = """
import os, signal, socket, subprocess, sys, time
with open("starts", "a") as file:
    print(os.getpid(), file=file)
child = subprocess.Popen(["sleep", "600"], process_group=0)
with open("children", "a") as file:
    print(child.pid, file=file)
while not os.path.exists("listen"): time.sleep(0.01)
server = socket.create_server(("127.0.0.1", int(os.environ["NODEAGENT_PORT"])))
while not os.path.exists("fail"): time.sleep(0.01)
os.remove("fail")
os.remove("listen")
sys.exit(7)
"""


def service(folder: Path, fork_server: bool, limits: RestartLimits) -> JobSpec:
    """A server that restarts alone, and a trainer that waits for it."""
    job = spec(folder, Ready(port=True), fork_server)
    (folder / "server.py").write_text(FRAGILE)
    server = job.roles[0].model_copy(update={"restart": "alone"})
    return job.model_copy(update={"roles": (server, job.roles[1]), "restarts": limits})


def starts(folder: Path) -> int:
    """How often the service was started."""
    file = folder / "starts"
    return len(file.read_text().split()) if file.exists() else 0


@pytest.mark.parametrize("fork_server", [True, False], ids=["fork_server", "plain"])
async def test_a_service_that_fails_is_started_again_alone(tmp_path: Path, fork_server: bool) -> None:
    job = service(tmp_path, fork_server, RestartLimits(max=2, backoff_min=0.3))
    async with open_bench(tmp_path) as bench:
        first = await begin(bench, job)
        (tmp_path / "listen").touch()
        await bench.until(lambda s: s.ready == ("server.0",))
        (tmp_path / "fail").touch()
        status = await bench.until(lambda s: len(s.restarted) == 1)
        assert (status.phase, status.exits, status.ready) == ("running", (), ()), "its port has to be listened on again"
        ended = status.restarted[0]
        assert (ended.rank, ended.code, ended.place) == (0, 7, "server.0")
        status = await bench.until(lambda s: s.workers[0].state == "running")
        assert status.workers[0].pid != first.workers[0].pid
        children = (tmp_path / "children").read_text().split()
        assert not is_running(int(children[0])), "what it left in its session is dead before it starts again"
        (tmp_path / "listen").touch()
        await bench.until(lambda s: s.ready == ("server.0",))
        await bench.logged("started again alone in 0.3 s", "g1/rank0.log")
        bench.host.release(UID, token(1), ("trainer",))
        status = await bench.until(lambda s: len(s.exits) == 1)
        assert (status.exits[0].rank, status.exits[0].code) == (1, 0), "others see nothing"
        bench.host.stop(UID, None)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [e.rank for e in status.exits if not e.stopped] == [1]


REPORTS = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from nodeagent.train import progress
if not os.path.exists("again"):
    progress(5)
    time.sleep(1)
    open("again", "x")
    sys.exit(7)
end = time.monotonic() + 3
while time.monotonic() < end: pass
"""


async def test_a_service_that_is_started_again_has_its_own_progress(tmp_path: Path) -> None:
    """It computes, and has reported nothing; the one before had, and was silent for a while."""
    job = service(tmp_path, False, RestartLimits(max=2)).model_copy(update={"hang": Hang(progress=2.0)})
    (tmp_path / "server.py").write_text(REPORTS)
    stalls = []

    def over(status: PodStatus) -> bool:
        stalls.append(status.stall)
        return bool(status.exits)

    async with open_bench(tmp_path) as bench:
        await begin(bench, job)
        await bench.until(over)
        assert not any(stalls)
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_service_that_fails_again_and_again_fails_in_the_end(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        job = service(tmp_path, False, RestartLimits(max=2))
        await begin(bench, job)
        for times in (1, 2, 3):
            await wait_for(lambda times=times: starts(tmp_path) == times)  # type: ignore[misc]
            (tmp_path / "listen").touch()
            (tmp_path / "fail").touch()
            await bench.until(lambda s, times=times: len(s.restarted) + len(s.exits) == times)  # type: ignore[misc]
        status = bench.host.status()[UID]
        assert [e.order for e in status.restarted] == [0, 1]
        assert [(e.rank, e.code, e.stopped) for e in status.exits] == [(0, 7, False)]
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_service_that_waits_for_its_restart_is_not_started_after_a_stop(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await begin(bench, service(tmp_path, False, RestartLimits(max=2, backoff_min=5.0)))
        (tmp_path / "listen").touch()
        (tmp_path / "fail").touch()
        await bench.until(lambda s: len(s.restarted) == 1)
        bench.host.stop(UID, 5.0)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.rank, e.code, e.stopped) for e in status.exits] == [(0, 7, True)]
        assert starts(tmp_path) == 1


WHOLE = """
import os, sys, time
from pathlib import Path
me = os.environ["NODEAGENT_PORT"]
Path(f"started-{me}-{os.getpid()}").touch()
while not os.path.exists(f"fail-{me}"): time.sleep(0.01)
code = int(open(f"fail-{me}").read())
os.remove(f"fail-{me}")
sys.exit(code)
"""


def begun(folder: Path) -> int:
    """How often any worker was started."""
    return len(list(folder.glob("started-*")))


async def test_a_place_is_started_again_whole_and_nobody_else(tmp_path: Path) -> None:
    job = spec(tmp_path, None)
    (tmp_path / "server.py").write_text(WHOLE)
    rules = (
        Policy(on=("WorkerFailed",), exit_code=9, do="RestartJob"),
        Policy(on=("WorkerFailed",), do="RestartPod"),
    )
    server = job.roles[0].model_copy(update={"policies": rules})
    roles = (server, job.roles[1].model_copy(update={"command": server.command}))
    job = job.model_copy(update={"roles": roles, "restarts": RestartLimits(max=2)})

    async with open_bench(tmp_path) as bench:
        first = await begin(bench, job, places=("server.0", "server.0", "server.1", "trainer.0"))
        one, two, other, _ = (w.pid for w in first.workers)
        ports = bench.host.status()[UID].ports

        def fail(worker: int, code: int) -> None:
            (tmp_path / "code").write_text(str(code))
            (tmp_path / "code").rename(tmp_path / f"fail-{ports[worker]}")

        await wait_for(lambda: begun(tmp_path) == 3)
        fail(1, 7)
        await wait_for(lambda: begun(tmp_path) == 5)
        status = await bench.until(lambda s: all(w.pid for w in s.workers[:3]))
        assert [(e.rank, e.code) for e in status.restarted] == [(1, 7)], "the other one of its place is no failure"
        assert status.exits == ()
        assert {status.workers[0].pid, status.workers[1].pid}.isdisjoint({one, two, None})
        assert (status.workers[2].pid, status.phase) == (other, "running")
        assert not is_running(one or 0)
        await bench.logged("rank 1 ended; it is started again with the others of server.0", "g1/rank1.log")
        fail(0, 9)
        status = await bench.until(lambda s: s.exits)
        assert [(e.rank, e.code, e.stopped) for e in status.exits] == [(0, 9, False)], "a policy says RestartJob of it"
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_workers_of_a_place_that_fail_together_cost_one_restart(tmp_path: Path) -> None:
    """As a collective fails in all of them when a peer is gone: none has to be killed."""
    job = spec(tmp_path, None, fork_server=True)
    (tmp_path / "server.py").write_text(WHOLE)
    server = job.roles[0].model_copy(update={"policies": (Policy(on=("WorkerFailed",), do="RestartPod"),)})
    job = job.model_copy(update={"roles": (server, job.roles[1]), "restarts": RestartLimits(max=1)})
    async with open_bench(tmp_path) as bench:
        first = await begin(bench, job, places=("server.0",) * 3 + ("trainer.0",))
        await wait_for(lambda: begun(tmp_path) == 3)
        os.kill(first.shim_pid or 0, signal.SIGSTOP)  # so that it sees all of them dead at once
        for worker in first.workers[:3]:
            os.kill(pid_of(worker), signal.SIGKILL)
        os.kill(first.shim_pid or 0, signal.SIGCONT)
        await wait_for(lambda: begun(tmp_path) == 6)
        status = await bench.until(lambda s: all(w.pid for w in s.workers[:3]))
        assert (len(status.restarted), status.exits) == (1, ())
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_place_that_is_about_to_start_again_is_not_after_a_stop(tmp_path: Path) -> None:
    job = spec(tmp_path, None)
    (tmp_path / "server.py").write_text(WHOLE)
    server = job.roles[0].model_copy(update={"policies": (Policy(on=("WorkerFailed",), do="RestartPod"),)})
    job = job.model_copy(update={"roles": (server, job.roles[1]), "restarts": RestartLimits(max=2, backoff_min=30.0)})
    async with open_bench(tmp_path) as bench:
        await begin(bench, job, places=("server.0", "server.0", "trainer.0"))
        port = bench.host.status()[UID].ports[0]
        await wait_for(lambda: begun(tmp_path) == 2)
        (tmp_path / "code").write_text("7")
        (tmp_path / "code").rename(tmp_path / f"fail-{port}")
        status = await bench.until(lambda s: len(s.restarted) == 1 and [w.pid for w in s.workers] == [None] * 3)
        assert (status.phase, status.exits) == ("running", ())
        bench.host.stop(UID, 5.0)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.rank, e.stopped) for e in status.exits] == [(0, True), (1, True)]
        assert begun(tmp_path) == 2


def whole(folder: Path, **limits: float) -> JobSpec:
    """Its servers need each other: those of all nodes are started again together."""
    job = spec(folder, None)
    (folder / "server.py").write_text(WHOLE)
    rules = (
        Policy(on=("WorkerFailed",), exit_code=8, do="RestartPod"),
        Policy(on=("WorkerFailed",), do="RestartTask"),
    )
    server = job.roles[0].model_copy(update={"policies": rules})
    roles = (server, job.roles[1].model_copy(update={"command": server.command, "after": ()}))
    return job.model_copy(update={"roles": roles, "restarts": RestartLimits.model_validate({"max": 3, **limits})})


def end_worker(bench: Bench, folder: Path, worker: int, code: int) -> None:
    (folder / "code").write_text(str(code))
    (folder / "code").rename(folder / f"fail-{bench.host.status()[UID].ports[worker]}")


FOUR = ("server.0", "server.0", "server.1", "trainer.0")


async def test_a_role_that_failed_waits_until_it_is_down_everywhere(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        first = [w.pid for w in (await begin(bench, whole(tmp_path), places=FOUR)).workers]
        await wait_for(lambda: begun(tmp_path) == 4)
        end_worker(bench, tmp_path, 2, 0)
        await bench.until(lambda s: [(e.rank, e.code) for e in s.exits] == [(2, 0)])
        end_worker(bench, tmp_path, 1, 7)
        down = await bench.until(lambda s: s.down == ("server",))
        assert (down.rounds, down.phase, down.exits) == ({"server": 1}, "running", ())
        assert [(e.rank, e.code, e.round) for e in down.restarted] == [(1, 7, 1)]
        assert [w.pid for w in down.workers] == [None] * 3 + first[3:]
        assert not any(is_running(pid or 0) for pid in first[:3])
        bench.host.start_role(UID, token(1), "server", 2, 0.0)  # not promised
        bench.host.start_role(UID, token(9), "server", 1, 0.0)  # of another generation
        bench.host.start_role(UID, token(1), "server", 1, 0.0)
        again = await bench.until(lambda s: all(w.pid for w in s.workers))
        assert (again.down, again.rounds, again.workers[3].pid) == ((), {"server": 1}, first[3])
        await wait_for(lambda: begun(tmp_path) == 7)  # also the one that had ended well
        bench.host.stop_role(UID, token(1), "server", 1)  # once more: it has been stopped for that
        bench.host.start_role(UID, token(1), "server", 1, 0.0)
        bench.host.stop_role(UID, token(1), "trainer", 1)
        status = await bench.until(lambda s: s.down == ("trainer",))
        assert [w.pid for w in status.workers[:3]] == [w.pid for w in again.workers[:3]]
        await bench.logged("it is started again with all of server", "g1/rank1.log")
        bench.host.stop(UID, 0.0)
        await bench.until(lambda s: s.phase == "exited" and s.down == ())


async def test_a_role_is_stopped_for_a_failure_elsewhere_whatever_it_was_about_to_do(tmp_path: Path) -> None:
    """A place of it waits to be started again by itself; then the role for its round; then the next round is asked
    for. Both of those waits are over before that one starts."""
    async with open_bench(tmp_path) as bench:
        await begin(bench, whole(tmp_path, backoff_min=3.5), places=FOUR)
        await wait_for(lambda: begun(tmp_path) == 4)
        end_worker(bench, tmp_path, 0, 8)
        await bench.until(lambda s: [w.pid for w in s.workers[:2]] == [None, None])
        bench.host.stop_role(UID, token(1), "server", 1)
        status = await bench.until(lambda s: s.down == ("server",))
        assert [(e.rank, e.round) for e in status.restarted] == [(0, 0)], "no failure of its own for this round"
        bench.host.start_role(UID, token(1), "server", 1, 3.5)
        await bench.until(lambda s: s.down == ())
        bench.host.stop_role(UID, token(1), "server", 2)
        await bench.until(lambda s: s.rounds == {"server": 2})
        bench.host.start_role(UID, token(1), "server", 2, 4.0)
        await bench.until(lambda s: s.rounds == {"server": 2} and all(w.pid for w in s.workers))
        await wait_for(lambda: begun(tmp_path) >= 7)
        assert begun(tmp_path) == 7, "neither its place nor the first round has started"
        bench.host.stop_role(UID, token(1), "server", 3)
        bench.host.stop(UID, 0.0)
        status = await bench.until(lambda s: s.phase == "exited")
        bench.host.start_role(UID, token(1), "server", 3, 0.0)
        assert all(e.stopped for e in status.exits) and begun(tmp_path) == 7


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process is started by root")
@pytest.mark.parametrize("action", ["alone", "RestartPod", "RestartTask"])
async def test_nobody_is_started_again_alone_for_a_port_that_a_stranger_has(tmp_path: Path, action: str) -> None:
    """It would meet it again, and pay for that each time."""
    job = spec(tmp_path, None)
    alone: dict[str, object] = {"restart": "alone"}
    if action != "alone":
        alone = {"policies": (Policy.model_validate({"on": ("WorkerFailed",), "do": action}),)}
    job = job.model_copy(update={"roles": (job.roles[0].model_copy(update=alone), job.roles[1])})
    async with open_bench(tmp_path) as bench:
        first = await begin(bench, job, places=("server.0", "server.0", "trainer.0"))
        port = bench.host.status()[UID].ports[0]
        stranger = start_stranger(str(port))
        try:
            assert stranger.stdout is not None and await asyncio.to_thread(stranger.stdout.readline) == "has it\n"
            (tmp_path / "listen").touch()
            status = await bench.until(lambda s: s.exits or s.restarted)
            assert status.taken == f"uid {NOBODY} listens on port {port}"
            assert [(e.rank, e.code, e.stopped) for e in status.exits] == [(0, 1, False)]
            assert (status.restarted, status.waiting, status.rounds) == ((), (), {})
            assert [w.pid for w in status.workers] == [w.pid for w in first.workers[:2]]
            bench.host.stop_role(UID, token(1), "server", 1)  # for a failure elsewhere
            bench.host.stop(UID, None)
            status = await bench.until(lambda s: s.phase == "exited")
            assert ([e.stopped for e in status.exits], status.rounds) == ([False, True], {})
        finally:
            stranger.kill()
            stranger.communicate()


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process is started by root")
async def test_a_role_that_is_stopped_for_its_port_elsewhere_is_not_promised_to_start_again(tmp_path: Path) -> None:
    """Its worker here waits, unaware; peers on another node failed since they spoke to the stranger."""
    async with open_bench(tmp_path) as bench:
        await begin(bench, whole(tmp_path), places=("server.0", "server.0", "trainer.0"))
        await wait_for(lambda: begun(tmp_path) == 3)
        port = bench.host.status()[UID].ports[0]
        stranger = start_stranger(str(port))
        try:
            assert stranger.stdout is not None and await asyncio.to_thread(stranger.stdout.readline) == "has it\n"
            bench.host.stop_role(UID, token(1), "server", 1)
            status = await bench.until(lambda s: len(s.exits) == 2)
            assert (status.taken, status.rounds) == (f"uid {NOBODY} listens on port {port}", {})
            assert [(e.signal, e.stopped) for e in status.exits] == [(9, True), (9, True)]
            bench.host.stop(UID, None)
            await bench.until(lambda s: s.phase == "exited")
        finally:
            stranger.kill()
            stranger.communicate()
