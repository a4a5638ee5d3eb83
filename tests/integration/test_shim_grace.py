"""The grace of several roles in one pod: a role's own, and whose turn it is to leave."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.roles_support import begin, spec
from tests.integration.shim_support import UID, Bench, open_bench, token, wait_for

STUBBORN = """
import signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: None)
Path("stubborn").touch()
while True: time.sleep(60)
"""


async def test_a_role_may_have_less_grace_than_the_others(tmp_path: Path) -> None:
    job = spec(tmp_path, None)
    (tmp_path / "server.py").write_text(STUBBORN)
    async with open_bench(tmp_path) as bench:
        await begin(bench, job, places=("server.0", "trainer.0"))
        await wait_for((tmp_path / "stubborn").exists)
        bench.host.stop(UID, 300.0, sooner={"server": 0.5})
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.place, e.signal, e.stopped, e.overdue) for e in status.exits] == [("server.0", 9, True, 0.5)]


LEAVES = """
import os, signal, sys, time
from pathlib import Path
def leave(*_):
    Path(f"asked-{sys.argv[1]}").touch()
    while not Path(f"leave-{sys.argv[1]}").exists(): time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
Path(f"up-{sys.argv[1]}").touch()
while True: time.sleep(60)
"""


async def leaving(bench: Bench, folder: Path) -> None:
    """A server and a trainer that comes after it run, and leave once they are asked and a file is there."""
    (folder / "leaves.py").write_text(LEAVES)
    job = spec(folder, None)
    roles = tuple(r.model_copy(update={"command": (sys.executable, "leaves.py", r.name)}) for r in job.roles)
    await begin(bench, job.model_copy(update={"roles": roles}))
    await bench.until(lambda s: s.ready == ("server.0",))
    bench.host.release(UID, token(1), ("trainer",))
    await wait_for(lambda: all((folder / f"up-{name}").exists() for name in ("server", "trainer")))


async def test_a_server_is_asked_to_stop_once_its_trainer_has_left(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await leaving(bench, tmp_path)
        (tmp_path / "leave-server").touch()
        bench.host.stop(UID, 60.0)
        await wait_for((tmp_path / "asked-trainer").exists)
        assert not (tmp_path / "asked-server").exists()
        (tmp_path / "leave-trainer").touch()
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.place, e.code, e.stopped) for e in status.exits] == [("trainer.0", 0, True), ("server.0", 0, True)]


async def test_a_server_waits_for_trainers_elsewhere_until_they_have_left(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await leaving(bench, tmp_path)
        (tmp_path / "leave-server").touch()
        (tmp_path / "leave-trainer").touch()
        bench.host.stop(UID, 60.0, later=("server",))
        status = await bench.until(lambda s: len(s.exits) == 1)
        assert (status.exits[0].place, status.phase) == ("trainer.0", "stopping")
        bench.host.stop(UID, 60.0, later=("server",))
        assert not (tmp_path / "asked-server").exists()
        bench.host.stop(UID, 60.0)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.place, e.code) for e in status.exits] == [("trainer.0", 0), ("server.0", 0)]


async def test_who_is_last_has_half_of_the_grace(tmp_path: Path) -> None:
    """A trainer that does not leave costs the servers no more."""
    async with open_bench(tmp_path) as bench:
        await leaving(bench, tmp_path)
        (tmp_path / "leave-server").touch()
        bench.host.stop(UID, 8.0, later=("server",))
        status = await bench.until(lambda s: s.exits)
        assert [(e.place, e.code, e.signal, e.overdue) for e in status.exits] == [("server.0", 0, None, None)]
        bench.host.stop(UID, 0.3, later=("server",))  # the other half is for nobody
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(e.place, e.signal, e.overdue) for e in status.exits[1:]] == [("trainer.0", 9, 0.3)]


async def test_a_role_s_own_grace_begins_when_it_is_asked(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await leaving(bench, tmp_path)
        bench.host.stop(UID, 300.0, sooner={"server": 2.0}, later=("server",))
        (tmp_path / "leave-trainer").touch()
        status = await bench.until(lambda s: len(s.exits) == 1)
        bench.host.stop(UID, 300.0, sooner={"server": 2.0})
        status = await bench.until(lambda s: s.phase == "exited")
        assert (tmp_path / "asked-server").exists()
        assert [(e.place, e.overdue) for e in status.exits] == [("trainer.0", None), ("server.0", 2.0)]
