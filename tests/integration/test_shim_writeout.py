"""A pod that is given up writes its workers' snapshots out, with a real shim and its real helper; the test is the agent
and says what the store would say."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from nodeagent.pods.base import GivenUp
from nodeagent.train.folder import MARKER, damage, entries, read_manifest
from nodeagent.train.memory import header_of
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, shim_with, token, wait_for

ROOT = Path(__file__).parents[2]
WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from nodeagent.train.link import Link
from nodeagent.train.memory import Header, SharedBuffer, size_of
rank, world, link = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Link.of_environment()
for index, step in enumerate((6, 7)):
    memory = SharedBuffer.of_size(size_of(64, 4))
    link.ask("snapshot.put", 30, fds=(memory.fd,), index=index, bytes=memory.size)
    header = Header(1, step, rank, world, bool(os.environ["SHARED"]), 64, 4, 0, 0)
    memory.map[4096:] = bytes([rank]) * 68
    memory.seal(header)
if "STAYS" in os.environ:
    import signal
    signal.signal(signal.SIGTERM, lambda *_: save())
def save():
    if "COMMITS" in os.environ and rank == 0:
        link.ask("commit", 20, name="own", step=int(os.environ["COMMITS"]), order=9)
print("kept", flush=True)
while True:
    time.sleep(600)
"""
ALL_GO = GivenUp(stays=False, world=0)
SOON = "grace.EARLY = 0.01\nsnapshots.LAST_CALL = 0.9\nsnapshots.LAST_CALL_MAX = 600"
"""Most of the grace is left to what follows the commit's release."""


async def training(bench: Bench, *, shared: str = "", world: int = 2, folder: str | None = "ckpt", **more: str) -> None:
    """Two workers of generation 1, with snapshots of steps 6 and 7."""
    (bench.root / "w.py").write_text(WORKER)
    await bench.ready(make_spec((sys.executable, "w.py"), bench.root, checkpoint_dir=folder))
    common = {"SHARED": shared, "WORLD_SIZE": str(world), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"} | more
    await bench.running(1, tuple(common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)))
    for rank in range(2):
        await bench.output_line("kept", rank=rank)


def unseal(shim: int | None, rank: int, step: int) -> None:
    """As a worker does that begins to write another over it."""
    for fd in Path(f"/proc/{shim}/fd").iterdir():
        with suppress(FileNotFoundError):  # the shim has closed this one
            if "nodeagent-snapshot" not in str(fd.readlink()):
                continue
            with fd.open("r+b") as memory:
                header = header_of(memory.fileno())
                if header is not None and (header.rank, header.step) == (rank, step):
                    memory.write(b"unsealed")


def cut_short(bench: Bench) -> None:
    """What is left of the grace, when all but the workers' end is done."""
    bench.host.stop(UID, 3.0, ALL_GO)


async def written(bench: Bench) -> str:
    return (await bench.until(lambda s: s.phase == "exited")).written


async def test_every_rank_is_written_and_counts_when_the_store_says_so(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench)
        bench.host.stop(UID, 30, ALL_GO)
        status = await bench.until(lambda s: s.commit)
        assert (status.phase, status.commit and status.commit.token) == ("stopping", token(1))
        (entry,) = entries(tmp_path / "ckpt")
        path = tmp_path / "ckpt" / entry.name
        assert (entry.order, entry.step, entry.generation, entry.snapshot) == (1, 7, 1, True)
        assert status.commit is not None
        assert (status.commit.name, status.commit.step, status.commit.order) == (entry.name, 7, 1)
        assert not (path / MARKER).exists(), "nobody has said yet that it counts"
        bench.host.committed(UID, status.commit, "")
        assert (await written(bench)).startswith("snapshot of step 7 written out in ")
        named = read_manifest(path)
        assert sorted(named) == ["rank-00000.snapshot", "rank-00001.snapshot"]
        assert (damage(path, named), (path / MARKER).exists()) == ("", True)
        with (path / "rank-00001.snapshot").open("rb") as file:
            header = header_of(file.fileno())
            assert header is not None
            assert (header.rank, header.step, file.read()[4096:]) == (1, 7, b"\x01" * 68)
        assert [p.name for p in (tmp_path / "ckpt").iterdir() if "writeout" in p.name] == []


async def test_what_the_store_refuses_is_removed_and_reported(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench, shared="yes")
        bench.host.stop(UID, 30, ALL_GO)
        status = await bench.until(lambda s: s.commit)
        assert status.commit is not None
        assert [p.name for p in (tmp_path / "ckpt" / status.commit.name).glob("rank-*")] == ["rank-00000.snapshot"]
        bench.host.committed(UID, status.commit, "generation 1 may commit nothing any more")
        assert await written(bench) == "snapshots not written out: generation 1 may commit nothing any more"
        assert entries(tmp_path / "ckpt") == []


@pytest.mark.parametrize("after", [1, 2])
async def test_it_ends_when_a_gang_of_another_size_is_to_go_on(tmp_path: Path, after: int) -> None:
    """The other node, which would have written its part, has only heard of that one."""
    async with open_bench(tmp_path) as bench:
        await training(bench, world=4, GROUP_WORLD_SIZE="2")
        bench.host.stop(UID, 600, GivenUp(stays=True, world=4))
        await wait_for(lambda: list((tmp_path / "ckpt").glob(".writeout-*/offers-0")))
        bench.host.stop(UID, 600, GivenUp(stays=True, world=4))
        bench.host.stop(UID, 600, GivenUp(stays=True, world=after))
        assert await written(bench) == "snapshots not written out: a gang of another size goes on"


async def test_the_end_of_the_grace_is_final(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench)
        bench.host.stop(UID, 600, ALL_GO)
        status = await bench.until(lambda s: s.commit)
        bench.host.stop(UID, 0.2, ALL_GO)
        reported = await written(bench)
        assert (
            "was not done when the grace of 0.2 s was over" in reported
            or "did not take it within the grace" in reported
        )
        assert bench.state().commit is None, "what it wished is forgotten"
        assert status.commit is not None
        bench.host.committed(UID, status.commit, "")  # it comes too late
        await bench.run_another(2)
        assert not list((tmp_path / "ckpt").glob(f"*/{MARKER}"))


async def test_it_goes_with_the_rest_when_it_is_stopped_at_once_or_fenced(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench)
        bench.host.stop(UID, 600, ALL_GO)
        await bench.until(lambda s: s.commit)
        bench.host.stop(UID, None)
        assert await written(bench) == "snapshots not written out: the helper was stopped"


async def test_a_grant_that_wants_the_workers_stopped_leaves_the_agents_own_stop_as_it_is(tmp_path: Path) -> None:
    async with open_bench(tmp_path, shim_with(tmp_path, SOON)) as bench:
        await training(bench, STAYS="yes")
        bench.host.stop(UID, 20.0, ALL_GO)
        bench.stop_in_order()
        status = await bench.until(lambda s: s.commit)
        assert status.commit is not None
        bench.host.committed(UID, status.commit, "")
        await wait_for((tmp_path / "ckpt" / status.commit.name / MARKER).exists)
        cut_short(bench)
        assert (await written(bench)).startswith("snapshot of step 7 written out in ")


async def test_nobody_grants_time_to_it_alone(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench)
        bench.host.stop(UID, 600, ALL_GO)
        await bench.until(lambda s: s.commit)
        bench.grant(0.0)
        assert "nobody granted this pod time" in await written(bench)


@pytest.mark.parametrize(
    ("shared", "given_up"),
    [
        ("", None),  # the workers start again here
        ("yes", GivenUp(stays=True, world=2)),  # the other nodes have it in memory
        ("", GivenUp(stays=True, world=3)),  # parts of two ranks are of no use to three
        ("", GivenUp(stays=False, world=0, since=(1, 7))),  # a checkpoint is as new
    ],
)
async def test_what_need_not_be_written_is_not(tmp_path: Path, shared: str, given_up: GivenUp | None) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench, shared=shared)
        bench.host.stop(UID, 30, given_up)
        assert await written(bench) == ""
        assert entries(tmp_path / "ckpt") == []


async def test_a_part_that_no_rank_has_leaves_nothing_behind(tmp_path: Path) -> None:
    """A third rank, on another node, has died without a snapshot; its node has none to offer."""
    async with open_bench(tmp_path) as bench:
        await training(bench, world=3, GROUP_WORLD_SIZE="2")
        bench.host.stop(UID, 4.0, ALL_GO)
        await written(bench)
        assert not list((tmp_path / "ckpt").glob("*writeout*"))
        assert entries(tmp_path / "ckpt") == []


async def test_workers_that_take_all_of_the_grace_leave_the_last_of_it_to_the_commit(tmp_path: Path) -> None:
    async with open_bench(tmp_path, shim_with(tmp_path, SOON)) as bench:
        await training(bench, STAYS="yes")
        bench.host.stop(UID, 20.0, ALL_GO)
        status = await bench.until(lambda s: s.commit)
        assert status.commit is not None
        assert all(w.state == "running" for w in status.workers), "it did not wait for their end"
        bench.host.committed(UID, status.commit, "")
        await wait_for((tmp_path / "ckpt" / status.commit.name / MARKER).exists)
        cut_short(bench)
        assert (await written(bench)).startswith("snapshot of step 7 written out in ")
        assert [end.overdue for end in bench.state().exits] == [3.0, 3.0]


async def test_what_the_workers_committed_meanwhile_is_later(tmp_path: Path) -> None:
    async with open_bench(tmp_path, shim_with(tmp_path, SOON)) as bench:
        await training(bench, STAYS="yes", COMMITS="8")
        bench.host.stop(UID, 20.0, ALL_GO)
        status = await bench.until(lambda s: s.commit)
        assert status.commit is not None
        assert status.commit.name == "own"
        await wait_for(lambda: any((tmp_path / "ckpt").glob("ckpt-*/nodeagent-manifest.json")))
        bench.host.committed(UID, status.commit, "")
        await wait_for(lambda: not any((tmp_path / "ckpt").glob("ckpt-*")))
        cut_short(bench)
        assert await written(bench) == ""
        assert entries(tmp_path / "ckpt") == []


async def test_a_job_without_a_folder(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench, folder=None)
        bench.host.stop(UID, 30, ALL_GO)
        assert await written(bench) == "snapshots not written out: the job has no checkpoint_dir"


async def test_the_newest_that_is_whole_is_taken(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await training(bench)
        unseal(bench.state().shim_pid, 1, 7)
        bench.host.stop(UID, 30, ALL_GO)
        status = await bench.until(lambda s: s.commit)
        assert status.commit is not None
        assert status.commit.step == 6
        os.kill(bench.state().shim_pid or 0, signal.SIGKILL)
        await bench.until(lambda s: s.phase == "gone")
        await wait_for(lambda: not bench.left())
