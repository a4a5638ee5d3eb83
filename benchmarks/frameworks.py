"""What a killed worker costs each framework's example, beside the framework's own launcher.

``python -m benchmarks.frameworks [--only EXAMPLE] [--trials N]``: writes ``benchmarks/frameworks.json``, from which
``docs/frameworks.md`` takes its figures. All trainings of an example step on this machine at the same time, each with
one worker on two nodes, and workers are killed in turn: one load for all of them. A framework runs in the environment
that ``make frameworks`` makes; where there is none it is passed over. Nothing here may know how a framework works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import yaml

from benchmarks import machine
from benchmarks.launcher import MAX_RESTARTS, LaunchError, Shape, tail
from benchmarks.ours import Ours
from benchmarks.steplog import NotReachedError
from benchmarks.torchrun import ADDRESS, ENVIRONMENT, free_port, rendezvous_arguments
from nodeagent.local import power
from nodeagent.osutil.linux import is_running

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("frameworks.json")
ENVIRONMENTS = Path(os.environ.get("NODEAGENT_FRAMEWORKS", ROOT / ".frameworks"))
SHAPE = Shape(workers=1)
"""Of torchrun's arguments."""
TRIALS = 5
SETTLE = (3.0, 4.0)
"""Seconds of undisturbed steps before each kill."""
START, RECOVERY = 180.0, 120.0
"""Seconds for a first step, when all trainings import at once; for the first step after a kill."""
POLL = 0.01
"""Seconds between two looks at a training's file of steps."""
DELAY = 0.1
"""Seconds between two steps: the machine's cores are then not full before a kill."""
PLENTY = 1_000_000
"""Steps: none of them ends."""

SCHEDULER = "scheduler."
"""Begins the names of the places of a scheduler, which is no worker."""
VARIANTS: dict[str, dict[str, Any]] = {"preload": {}, "guess": {"preload": None}, "none": {"preload": []}}
"""What of the example's job file is changed; None: the key is left out."""
TORCHRUN, PADDLE, MINDSPORE, NOTHING = "torchrun", "paddle.distributed.launch", "msrun", ""
LAUNCHERS = {
    "paddle": PADDLE,
    "hf_trainer": TORCHRUN,
    "lightning": TORCHRUN,
    "fsdp2": TORCHRUN,
    "jax": NOTHING,
    "tensorflow": NOTHING,
    "mindspore": MINDSPORE,
}
"""Example to its framework's own launcher."""
VERSIONS = {"paddle": "paddlepaddle", "jax": "jax", "tensorflow": "tensorflow-cpu", "mindspore": "mindspore"}
"""Example to the package whose version is the launcher's, or the framework's; of the others torch's."""


class Training(Protocol):
    """Two workers that step."""

    @property
    def file(self) -> Path:
        """A line for each step, by rank 0."""
        ...

    def workers(self) -> dict[int, int]:
        """Rank to pid of those that run."""
        ...

    def evidence(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One of ours."""

    cluster: Ours
    name: str
    file: Path

    def workers(self) -> dict[int, int]:
        job = self.cluster.job(self.name)
        pods = [pod for pod in job["pods"] if pod["generation"] == job["generation"]]
        workers = [worker for pod in pods for worker in pod["workers"] if not worker["place"].startswith(SCHEDULER)]
        return {_number(w): w["pid"] for w in workers if w["state"] == "running"}

    def evidence(self) -> str:
        return self.cluster.ctl("describe", self.name)


class Launched:
    """One under the framework's own launcher: a process for each node. Use as a context manager: leaves no process."""

    def __init__(self, folder: Path, commands: Sequence[Sequence[str]], environ: dict[str, str]) -> None:
        self.file = folder / "out" / "metrics.jsonl"
        self._folder, self._commands, self._environ = folder, commands, environ
        self._mark = f"frameworks-{secrets.token_hex(4)}"
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        for number, command in enumerate(self._commands, start=1):
            mark = {power.MARK: power.mark(self._mark, f"n{number}")}
            with (self._folder / f"n{number}.log").open("wb") as log:
                self._started.append(
                    subprocess.Popen(
                        command, env=os.environ | self._environ | mark, cwd=self._folder, stdin=subprocess.DEVNULL,
                        stdout=log, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        power.cut(self._mark)
        for process in self._started:
            process.wait()

    def workers(self) -> dict[int, int]:
        found = {}
        for pid in power.processes(self._mark):
            if (rank := _rank(pid)) is not None:
                found[rank] = pid
        return found

    def evidence(self) -> str:
        return "\n".join(tail(log) for log in sorted(self._folder.rglob("*log*")) if log.is_file())


def _number(worker: dict[str, Any]) -> int:
    """Its rank among the workers, of which each place has one."""
    place: str = worker["place"]
    return int(place.rpartition(".")[2]) if place else int(worker["rank"])


def _rank(pid: int) -> int | None:
    """Of a process, if it is a worker."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        variables = dict(v.partition(b"=")[::2] for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # it is gone
        return None
    rank = variables.get(b"RANK") or variables.get(b"PADDLE_TRAINER_ID")
    if variables.get(b"MS_ROLE") == b"MS_WORKER":
        rank = variables.get(b"RANK_ID")
    script = next((word for word in words[1:] if not word.startswith(b"-")), b"")
    return int(rank) if rank and script.endswith(b"train.py") else None


def until_it_steps(training: Training, before: set[int], limit: float) -> dict[int, int]:
    """Until two new workers run and rank 0 has made a step; the two. Raises NotReachedError."""
    until = time.monotonic() + limit
    size, found = None, dict[int, int]()
    while True:
        if sorted(found) != [0, 1] or set(found.values()) & before or not all(map(is_running, found.values())):
            found = training.workers()
            size = _size(training.file)
        elif size is not None and _size(training.file) > size:
            return found
        if time.monotonic() > until:
            raise NotReachedError(f"no two workers step after {limit:g} s:\n{training.evidence()}")
        time.sleep(0.1)


def kill_one(training: Training, workers: dict[int, int]) -> float:
    """kill -9 of the worker that is not rank 0. Seconds until a rank 0 that began afterwards has made a step; raises
    NotReachedError."""
    time.sleep(random.uniform(*SETTLE))
    at = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    while is_running(workers[0]):  # until then the steps are the old one's
        _in_time(training, at)
    size = _size(training.file)
    while _size(training.file) <= size:
        _in_time(training, at)
    return time.monotonic() - at


def _in_time(training: Training, at: float) -> None:
    if time.monotonic() > at + RECOVERY:
        raise NotReachedError(f"no step within {RECOVERY:g} s:\n{training.evidence()}")
    time.sleep(POLL)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def script(example: str, output: Path | None) -> list[str]:
    """The example and its arguments, without the interpreter."""
    where = [] if output is None else ["--output", str(output)]
    return [
        str(ROOT / "examples" / example / "train.py"), "--steps", str(PLENTY), "--step-delay", str(DELAY), *where,
    ]  # fmt: skip


def job_file(example: str, variant: str, python: str, folder: Path) -> dict[str, Any]:
    """The example's own, made small, and endless."""
    job = yaml.safe_load((ROOT / "examples" / example / "job.yaml").read_text())
    job |= {
        "name": variant,
        "command": [python, *script(example, None)],
        "nodes": 2,
        "workers_per_node": 1,
        "checkpoint_dir": str(folder),
        "env": {"OMP_NUM_THREADS": "1"},
        "restarts": {"max": MAX_RESTARTS, "backoff": "0s..0s"},
    }
    return {key: value for key, value in (job | VARIANTS[variant]).items() if value is not None}


def own_launcher(example: str, python: str, folder: Path) -> Launched | None:
    """The training under the framework's own launcher; None: it has none that starts workers again."""
    command = script(example, folder / "out")
    if LAUNCHERS[example] == TORCHRUN:
        endpoint = f"{ADDRESS}:{free_port()}"
        lines = [
            [python, "-m", "torch.distributed.run", *rendezvous_arguments(SHAPE, endpoint, host=first), *command]
            for first in (True, False)
        ]
        return Launched(folder, lines, ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    if LAUNCHERS[example] == PADDLE:
        master, lines = f"{ADDRESS}:{free_port()}", []
        for node in ("n1", "n2"):
            line = [
                *(python, "-m", "paddle.distributed.launch", "--master", master, "--nnodes", "2"),
                *("--nproc_per_node", "1", "--log_dir", node, *command),
            ]
            lines.append(["sh", "-c", f"until {shlex.join(line)}; do :; done"])
        return Launched(folder, lines, {"OMP_NUM_THREADS": "1"})
    if LAUNCHERS[example] == MINDSPORE:  # one for both workers: of two on one machine each would start a scheduler
        packages = Path(python).parent
        path = {"PATH": f"{packages}:{os.environ['PATH']}"}  # its workers' command is `python`
        line = [
            *(str(packages / "msrun"), "--worker_num", "2", "--local_worker_num", "2", "--join", "True"),
            *("--master_addr", ADDRESS, "--master_port", str(free_port()), "--log_dir", "n1", *command),
        ]
        lines = [["sh", "-c", f"until {shlex.join(line)}; do :; done"]]
        return Launched(folder, lines, path | {"OMP_NUM_THREADS": "1"})
    return None


def measure(example: str, python: str, folder: Path, trials: int) -> dict[str, Any]:
    """Seconds of each trial, by variant and ``launcher``."""
    seconds: dict[str, list[float]] = {}
    instead = ""
    with ExitStack() as stack:
        slots = {"NODEAGENT__NODE__CPU_SLOTS": str(2 * len(VARIANTS))}  # a scheduler takes one too
        cluster = stack.enter_context(Ours(folder / "cluster", None, 2, slots))
        trainings: dict[str, Training] = {}
        running: dict[str, dict[int, int]] = {}
        for variant in VARIANTS:
            file, output = folder / f"{variant}.yaml", folder / variant
            file.write_text(yaml.safe_dump(job_file(example, variant, python, output), sort_keys=False))
            cluster.ctl("submit", str(file))
            trainings[variant] = Job(cluster, variant, output / "metrics.jsonl")
            running[variant] = until_it_steps(trainings[variant], set(), START)
        guessed = list(cluster.job("guess")["spec"]["guessed"])
        if (launched := own_launcher(example, python, folder / "launcher")) is not None:
            trainings["launcher"] = stack.enter_context(launched)
            running["launcher"] = until_it_steps(launched, set(), START)
        for _ in range(trials):
            for name, training in list(trainings.items()):
                try:
                    took = kill_one(training, running[name])
                    running[name] = until_it_steps(training, set(running[name].values()), RECOVERY)
                except NotReachedError as error:
                    if name != "launcher":
                        raise
                    instead = f"does not go on within {RECOVERY:g} s"
                    print(f"  {name}: {error}", flush=True)
                    del trainings[name]
                    continue
                seconds.setdefault(name, []).append(took)
                print(f"  {name}: {took:.2f} s", flush=True)
    return {"seconds": seconds, "guessed": guessed, "instead": instead}


def version(example: str) -> str:
    """Of the package that has the launcher, or of the framework."""
    name = VERSIONS.get(example, "torch")
    packages = ENVIRONMENTS / example / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = importlib.metadata.distributions(name=name, path=[str(packages / "site-packages")])
    return next((one.version.partition("+")[0] for one in found), "?")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks", description=str(__doc__).split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(LAUNCHERS), metavar="EXAMPLE")
    parser.add_argument("--trials", type=int, default=TRIALS)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that everything is cleared away
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    for example in arguments.only or LAUNCHERS:
        python = ENVIRONMENTS / example / "bin" / "python"
        if not python.exists():
            print(f"{example}: not installed (make frameworks ONLY={example}): passed over", file=sys.stderr)
            continue
        print(f"{example}:", flush=True)
        here = machine.describe()
        with tempfile.TemporaryDirectory(prefix="nodeagent-bench-") as scratch:
            try:
                found = measure(example, str(python), Path(scratch), arguments.trials)
            except (NotReachedError, LaunchError, subprocess.TimeoutExpired) as error:
                print(f"  NOT MEASURED: {error}", file=sys.stderr)
                failed = True
                continue
        launcher = {"launcher": LAUNCHERS[example], "version": version(example), "load": f"{os.getloadavg()[0]:.1f}"}
        results[example] = {"date": here["date"], "machine": here["machine"]} | launcher | found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
