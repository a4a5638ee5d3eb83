"""Real torch through the fork server: rendezvous in the store process, collectives, data loaders, seeds."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, token, wait_for

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
BOUND = 110.0
"""Seconds for a few processes that import torch."""
PYTHON = sys.executable

TRAIN = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
free = torch.rand(1).item()
torch.manual_seed(0)
dist.init_process_group("gloo")
x = torch.full((4,), dist.get_rank() + 1.0)
dist.all_reduce(x)
loader = DataLoader(list(range(8)), batch_size=2, num_workers=2)
print("sum", x.tolist(), "batches", [b.tolist() for b in loader], "threads", torch.get_num_threads())
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad(); (model(torch.ones(256, 64)) ** 2).mean().backward(); optimizer.step()
print("weight", model.weight.double().sum().item())
print("free", free)
dist.destroy_process_group()
"""


STATE = """
import json, locale, logging, os, signal, sys, threading, warnings
import torch, torch.distributed as dist, torch.optim, torch._dynamo, torch.utils.data
world = dist.distributed_c10d._world
print(json.dumps({
    "hook": sys.excepthook is sys.__excepthook__, "thread_hook": threading.excepthook is threading.__excepthook__,
    "filters": len(warnings.filters), "loggers": [logging.root.level,
    len(logging.root.handlers)], "environ": sorted(k for k in os.environ if "GLOO" in k),
    "threads": len(os.listdir("/proc/self/task")), "torch_threads": torch.get_num_threads(),
    "fds": sorted(int(f) for f in os.listdir("/proc/self/fd"))[:-1], "umask": os.umask(0o22),
    "signals": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals() if n != signal.SIGINT},
    "status": [l for l in open("/proc/self/status") if l.startswith(("Threads", "SigB", "SigI"))],
    "groups": [dist.is_initialized(), world.group_count, len(world.pg_map), world.default_pg is None],
    "torch": [torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
    torch.cuda.is_initialized()], "locale": locale.getlocale(), "cwd": os.getcwd(),
}, sort_keys=True))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sockets = {os.readlink("/proc/self/fd/" + f).strip("socket:[]") for f in os.listdir("/proc/self/fd")
           if int(f) > 2 and os.path.exists("/proc/self/fd/" + f)}
listening = [l.split()[1].split(":")[0] for l in open("/proc/self/net/tcp") if l.split()[9] in sockets]
print(dist.group.WORLD.group_name, sorted(set(listening)))
dist.destroy_process_group()
"""


async def gang(bench: Bench, number: int) -> tuple[dict[str, str], ...]:
    """Environments of two workers on a freshly promised address."""
    bench.host.promise(UID, token(number), True)
    status = await bench.until(lambda s: s.rendezvous and s.rendezvous.token == token(number), BOUND)
    assert status.rendezvous is not None
    host, _, port = status.rendezvous.address.rpartition(":")
    common = {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": str(status.rendezvous.store_hosted),
    }
    return tuple(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))


async def test_gang_of_two_forked_and_plain(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TRAIN)
    outputs = []
    for fork_server in (True, False):
        async with open_bench(tmp_path / str(fork_server)) as bench:
            spec = make_spec((PYTHON, "t.py"), tmp_path, preload=("torch",), fork_server=fork_server)
            bench.grant(600)
            bench.host.prepare(UID, spec)
            status = await bench.until(lambda s: s.phase == "ready", BOUND)
            assert (status.fork_server_pid is not None) == fork_server
            for number in (1, 2) if fork_server else (1,):
                if number == 2:
                    await bench.until(lambda s: len(s.preforked) == 2, BOUND)
                environments = await gang(bench, number)
                rendezvous = bench.state().rendezvous
                assert rendezvous is not None
                assert rendezvous.store_hosted == fork_server
                status = await bench.run(number, environments, BOUND)
                assert [(e.code, e.error) for e in status.exits] == [(0, ""), (0, "")]
                assert bench.state().reason == ""
                for rank in range(2):
                    await wait_for(lambda n=number, r=rank: len(bench.output(n, r)) == 3)  # type: ignore[misc]
                    outputs.append(bench.output(number, rank))
    assert {lines[0] for lines in outputs} == {
        "sum [3.0, 3.0, 3.0, 3.0] batches [[0, 1], [2, 3], [4, 5], [6, 7]] threads 2"
    }
    assert len({lines[1] for lines in outputs}) == 1  # the same seed gives the same weights, bit for bit
    assert len({lines[2] for lines in outputs}) == len(outputs)  # without one, every worker has its own


async def test_a_killed_member_and_the_next_generation(tmp_path: Path) -> None:
    """rank 0 is killed while the other waits in a collective; the next generation gets a new store."""
    (tmp_path / "t.py").write_text(
        "import sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nprint('up', flush=True)\n"
        "x = torch.ones(1)\nwhile True: dist.all_reduce(x)\n"
    )
    async with open_bench(tmp_path) as bench:
        bench.grant(600)
        bench.host.prepare(UID, make_spec((PYTHON, "t.py"), tmp_path, preload=("torch",)))
        await bench.until(lambda s: s.phase == "ready", BOUND)
        addresses = set()
        for number in (1, 2):
            status = await bench.running(number, await gang(bench, number), BOUND)
            assert status.rendezvous is not None
            addresses.add(status.rendezvous.address)
            for rank in range(2):
                await bench.output_line("up", number, rank, BOUND)
            os.kill(pid_of(status.workers[0]), signal.SIGKILL)
            await bench.until(lambda s: s.exits)
            bench.host.stop(UID, None)
            status = await bench.until(lambda s: s.phase == "exited")
            await bench.until(lambda s: s.rendezvous is None)  # the store process went with its generation
            assert (status.exits[0].rank, status.exits[0].signal, status.exits[0].stopped) == (0, 9, False)
        assert len(addresses) == 2


@pytest.mark.parametrize(
    "interface", [pytest.param("", marks=pytest.mark.slow, id="default"), pytest.param("lo", id="lo")]
)
async def test_warming_up_leaves_nothing_behind(tmp_path: Path, interface: str) -> None:
    """What a script finds in a warmed worker is what it finds in a fresh one; its own group too is made as if first,
    on the interface that its own environment says."""
    (tmp_path / "t.py").write_text(STATE)
    env = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    outputs = []
    for fork_server in (True, False):
        async with open_bench(tmp_path / str(fork_server)) as bench:
            spec = make_spec((PYTHON, "t.py"), tmp_path, preload=("torch",), fork_server=fork_server)
            bench.grant(600)
            bench.host.prepare(UID, spec)
            await bench.until(lambda s: s.phase == "ready", BOUND)
            for number in (1, 2) if fork_server else (1,):
                if number == 2:
                    (ahead,) = (await bench.until(lambda s: s.preforked, BOUND)).preforked
                status = await bench.run(number, (env,), BOUND)
                assert [(e.code, e.error) for e in status.exits] == [(0, "")]
            if fork_server:
                assert [e.pid for e in status.exits] == [ahead]
            await wait_for(lambda n=number: len(bench.output(n)) == 2)  # type: ignore[misc]
            state, group = bench.output(number)
            outputs.append(json.loads(state) | {"group": group})
    assert outputs[0] == outputs[1]
