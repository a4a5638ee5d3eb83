"""Snapshots with a real shim: workers are killed, their state is not."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from nodeagent.model.jobspec import JobSpec, Nodes, Role
from nodeagent.pods.base import StartOrder
from nodeagent.shim.snapshots import available_memory
from nodeagent.train.memory import HEADER, parse
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, token, wait_for
from tests.ports import free_port

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
BOUND = 110.0
"""Seconds for a few processes that import torch."""
WORKER = """
import json, os, sys, time
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from nodeagent.train import restore, snapshot
dist.init_process_group("gloo")
rank, replicated = dist.get_rank(), {replicated}
state = {{"weights": torch.zeros(1000), "step": 0}}
found = restore(state)
value = float(state["weights"][0])
assert torch.all(state["weights"] == value)
print("found", found, state["step"], value, flush=True)
last = int(os.environ["LAST"]) + (rank if os.environ.get("UNEVEN") else 0)
for step in range((found or 0) + 1, last + 1):
    state["weights"].fill_(step * 10 + (0 if replicated else rank))
    state["step"] = step
    assert snapshot(state, step, replicated=replicated)
print("kept", last, flush=True)
time.sleep(600)
"""


def environments(last: int, world: int = 2, **more: str) -> tuple[dict[str, str], ...]:
    common = {"LAST": str(last), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"LOCAL_WORLD_SIZE": str(world), "NODEAGENT_JOB": "train", "OMP_NUM_THREADS": "1"} | more
    return tuple(common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world))


async def generation(bench: Bench, number: int, orders: tuple[dict[str, str], ...]) -> list[str]:
    """Run one to its last step, kill it, and return what each rank said it found."""
    orders = tuple(env | {"NODEAGENT_GENERATION": str(number)} for env in orders)
    status = await bench.running(number, orders, BOUND)
    world = range(len(orders))
    await wait_for(lambda: all(any(w.startswith("kept") for w in bench.output(number, r)) for r in world), BOUND)
    for worker in status.workers:
        os.kill(pid_of(worker), signal.SIGKILL)
    await bench.until(lambda s: s.phase == "exited")
    return [bench.output(number, r)[0] for r in world]


async def ready(bench: Bench, job: JobSpec) -> None:
    bench.grant(600)
    await bench.ready(job, BOUND)


def write_worker(folder: Path, replicated: bool) -> tuple[str, str]:
    (folder / "w.py").write_text(WORKER.format(root=str(ROOT), replicated=replicated))
    return sys.executable, str(folder / "w.py")


def damage(shim: int | None, rank: int, step: int) -> None:
    """Change a byte of what the shim keeps of this rank's step."""
    for fd in Path(f"/proc/{shim}/fd").iterdir():
        with suppress(FileNotFoundError):  # the shim has closed this one
            if "nodeagent-snapshot" not in str(fd.readlink()):
                continue
            with fd.open("r+b") as memory:
                header = parse(memory.read(HEADER))
                if header is not None and (header.rank, header.step) == (rank, step):
                    memory.seek(HEADER + 1000)
                    memory.write(b"x")


async def test_every_rank_goes_on_from_its_own_newest_state(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await ready(bench, make_spec(write_worker(tmp_path, False), tmp_path, preload=("torch", "torch.distributed")))
        assert await generation(bench, 1, environments(3)) == ["found None 0 0.0"] * 2
        assert await generation(bench, 2, environments(5)) == ["found 3 3 30.0", "found 3 3 31.0"]
        assert await generation(bench, 3, environments(5, UNEVEN="yes")) == ["found 5 5 50.0", "found 5 5 51.0"]
        # rank 1 has kept a step that rank 0 has not
        assert await generation(bench, 4, environments(5)) == ["found 5 5 50.0", "found 5 5 51.0"]
        # three ranks: their states were another gang's
        assert await generation(bench, 5, environments(0, 3)) == ["found None 0 0.0"] * 3


async def test_ranks_whose_local_rank_is_0_on_all_have_each_their_own(tmp_path: Path) -> None:
    """As torchrun's ``--virtual-local-rank`` has it."""

    def virtual(last: int) -> tuple[dict[str, str], ...]:
        return tuple(env | {"LOCAL_RANK": "0"} for env in environments(last))

    async with open_bench(tmp_path) as bench:
        await ready(bench, make_spec(write_worker(tmp_path, False), tmp_path, preload=("torch", "torch.distributed")))
        assert await generation(bench, 1, virtual(3)) == ["found None 0 0.0"] * 2
        assert await generation(bench, 2, virtual(5)) == ["found 3 3 30.0", "found 3 3 31.0"]
        assert await generation(bench, 3, virtual(6)) == ["found 5 5 50.0", "found 5 5 51.0"]


ALONE = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch
from nodeagent.train import restore, snapshot
state = {{"weights": torch.zeros(1000), "step": 0}}
print("found", restore(state), float(state["weights"][0]), flush=True)
state["weights"].fill_(float(os.environ["ME"]))
for step in range(int(os.environ["FIRST"]), int(os.environ["FIRST"]) + 3):
    state["step"] = step
    assert snapshot(state, step)
print("kept", flush=True)
time.sleep(600)
"""


async def test_a_role_finds_what_it_has_kept_itself(tmp_path: Path) -> None:
    """Both have rank 0 and local rank 0, each in a world of its own; later they change places."""
    (tmp_path / "w.py").write_text(ALONE.format(root=str(ROOT)))
    one = Nodes(min=1, max=1, target=1)
    command = (sys.executable, str(tmp_path / "w.py"))
    roles = tuple(Role(name=name, command=command, nodes=one) for name in ("actor", "critic"))
    job = make_spec(command, tmp_path, fork_server=False).model_copy(update={"roles": roles, "completes": "actor"})
    common = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NODEAGENT_JOB": "train", "OMP_NUM_THREADS": "1"}

    async def play(bench: Bench, number: int, *names: str) -> list[str]:
        about = common | {"NODEAGENT_GENERATION": str(number), "FIRST": str(4 * number)}
        orders = tuple(about | {"ME": str(1 + (name == "critic"))} for name in names)
        order = bench.order(number, orders).model_dump()
        places = tuple(f"{name}.0" for name in names)
        bench.host.start(UID, StartOrder.model_validate(order | {"places": places, "roles_file": "{}"}))
        await wait_for(lambda: all("kept" in bench.output(number, r) for r in range(2)), BOUND)
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.generation == token(number) and s.phase == "exited")
        return [bench.output(number, r)[0] for r in range(2)]

    async with open_bench(tmp_path) as bench:
        await ready(bench, job)
        assert await play(bench, 1, "actor", "critic") == ["found None 0.0"] * 2
        assert await play(bench, 2, "actor", "critic") == ["found 6 1.0", "found 6 2.0"]
        changed = await play(bench, 3, "critic", "actor")
        assert set(changed) <= {"found 10 1.0", "found 10 2.0", "found None 0.0"}
        assert (changed[0].endswith("1.0"), changed[1].endswith("2.0")) == (False, False), "never the other's"
        assert await play(bench, 4, "critic", "actor") == ["found 14 2.0", "found 14 1.0"]
        size = bench.state().snapshot_bytes
        assert 4 * 4000 < size < 4 * 100_000


async def test_a_snapshot_that_memory_has_damaged_is_passed_over_by_all(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await ready(bench, make_spec(write_worker(tmp_path, False), tmp_path, preload=("torch", "torch.distributed")))
        await generation(bench, 1, environments(5))
        damage(bench.state().shim_pid, 0, 5)
        assert await generation(bench, 2, environments(5)) == ["found 4 4 40.0", "found 4 4 41.0"]
        await wait_for(lambda: "step 5 is damaged" in "".join(bench.output(2, 0, "stderr")[:1]))


async def test_a_state_that_all_share_serves_ranks_that_have_none(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await ready(bench, make_spec(write_worker(tmp_path, True), tmp_path, preload=("torch", "torch.distributed")))
        await generation(bench, 1, environments(4, 1))
        assert await generation(bench, 2, environments(4, 3)) == ["found 4 4 40.0"] * 3


async def test_too_much_is_refused_with_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from nodeagent.train import Link, LinkError\n"
        "try: Link.of_environment().ask('snapshot.put', index=0, bytes=1 << 60)\n"
        "except LinkError as error: print(error)\n"
    )
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((sys.executable, str(tmp_path / "w.py")), tmp_path))
        await bench.run(1)
        await wait_for(lambda: "is more than this node has memory for" in "".join(bench.output()))
    assert available_memory() > 0
