"""Redis loses its data under training: the agents give it back, and no worker notices."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.e2e import lockstep
from tests.e2e.support import Cluster, check_steps, check_undisturbed, digits_job, is_alive, lockstep_job, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 3


def data(folder: Path) -> list[Path]:
    """What Redis has written: a folder, or, before version 7, a file."""
    found = list(folder.glob("appendonly*"))
    assert found, f"no data of Redis in {folder}"
    return found


def copy_data(source: Path, to: Path) -> None:
    for path in data(source):
        if path.is_dir():
            shutil.copytree(path, to / path.name)
        else:
            shutil.copy(path, to)


def redis_of(calm: Cluster) -> tuple[int, Path]:
    """Its process, and the folder that it writes to."""
    reported = calm.json("local", "status")["redis"]
    return reported["pid"], Path(reported["url"].removeprefix("unix://")).parent


def killed_without_its_data(calm: Cluster, instead: Path | None = None, known: tuple[int, Path] | None = None) -> None:
    """Frozen first, so that it cannot write the files again that are taken away. ``instead``: the data it finds;
    ``known``: which Redis, where there is no time to ask."""
    pid, folder = known or redis_of(calm)
    os.kill(pid, signal.SIGSTOP)
    for path in data(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if instead is not None:
        copy_data(instead, folder)
    os.kill(pid, signal.SIGKILL)
    calm.until(lambda: not is_alive(pid), 10, "Redis is dead")


def flushed(calm: Cluster) -> None:
    with redis.Redis.from_url(calm.json("local", "status")["redis"]["url"]) as client:
        client.flushall()


def until_restored(calm: Cluster) -> None:
    """The agents have given everything back (the question itself is refused while Redis starts)."""
    calm.until(lambda: "StoreRestored" in calm.ctl("events", check=None).stdout, 20, "the store is restored")


@pytest.mark.parametrize("empty", [killed_without_its_data, flushed])
def test_an_emptied_redis_disturbs_nothing(calm: Cluster, empty: Callable[[Cluster], None]) -> None:
    name = empty.__name__.partition("_")[0]
    calm.submit(lockstep_job(calm.work, name, nodes="{min: 1, max: 3, target: 2}", delay=0.1, workers=1))
    calm.until_running(name, 2)
    calm.until_steps(name, 10)
    before, workers = calm.job(name), calm.until_workers(name, 2)
    shims = {p["node"]: p["shim_pid"] for p in before["pods"]}
    lives = {node: calm.node(node)["incarnation"] for node in calm.nodes()}
    empty(calm)
    until_restored(calm)
    calm.until_steps(name, 30)
    calm.until(lambda: calm.workers(name) == workers, 20, "every pod is published again")
    job = calm.job(name)
    assert (job["uid"], job["generation"], job["restarts"]) == (before["uid"], before["generation"], before["restarts"])
    assert {p["node"]: p["shim_pid"] for p in job["pods"] if p["node"] in shims} == shims
    assert {node: calm.node(node)["incarnation"] for node in calm.nodes()} == lives
    assert name in calm.ctl("get").stdout
    calm.until(lambda: calm.ctl("scale", "3", "--job", name, check=None).returncode == 0, 20, "it takes a scale-out")
    calm.until_running(name, 3, above=before["generation"])
    calm.until_steps(name, 10)
    calm.ctl("stop", name, "--timeout", "60s")
    rows = read_steps(calm.work, name)
    check_undisturbed([row for row in rows if row["generation"] == before["generation"]])
    check_steps(rows, lockstep.losses())


def test_a_redis_that_went_back_in_time_undoes_nothing(
    calm: Cluster, reference: dict[int, float], tmp_path: Path
) -> None:
    """It comes back with the data of some seconds ago, and in them the job re-formed."""
    calm.submit(digits_job(calm.work, "back", nodes="2", steps=600, delay=0.1, workers=1))
    first = calm.until_running("back", 2)
    calm.until_steps("back", 10)
    copy_data(redis_of(calm)[1], tmp_path)
    os.kill(calm.until_workers("back", 2)[0], signal.SIGKILL)
    second = calm.until_running("back", 2, above=first["generation"])
    calm.until_steps("back", 10)
    workers = calm.until_workers("back", 2)
    killed_without_its_data(calm, instead=tmp_path)
    until_restored(calm)
    calm.until_steps("back", 30)
    calm.until(lambda: calm.workers("back") == workers, 20, "every pod is published again")
    job = calm.job("back")
    assert (job["generation"], job["restarts"]) == (second["generation"], 1)
    assert job["budget"]["used"] == 1
    calm.until(
        lambda: calm.ctl("stop", "back", check=None).returncode == 0, 20, "the recovery is over: it takes a stop"
    )
    check_steps(read_steps(calm.work, "back"), reference)
