"""A local cluster for end-to-end tests: real agents, real Redis, real workers, through the tool as a person would
use it.

Owns bringing it up and proving that nothing is left; what a test does with it is the test's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nodeagent.ctl.client import Client, job_path, node_path
from nodeagent.lease.statefiles import find_holder, pulse_file, read_pulse
from nodeagent.osutil.linux import user
from tests.bounds import Bound
from tests.e2e import lockstep
from tests.folders import short

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits" / "train.py"
LOCKSTEP = Path(lockstep.__file__)
TOOL = "from nodeagent.ctl.main import main; main()"
CALL_LIMIT = 90.0
"""Seconds for one call of the tool."""
REFERENCE_LIMIT = 300.0
"""Seconds for the undisturbed run, which imports torch beside the first clusters. A test that uses it may be the one
that makes it, so its own timeout is 480 at least."""
UP = "import sys; from nodeagent.local.session import up; up(int(sys.argv[1]), 'default', timeout=180)"
"""As `nodeagentctl local up`, with more patience: the first tests start a dozen agents at once."""
UP_LIMIT = 240.0
ENDED = ("succeeded", "failed", "stopped")


@dataclass
class Cluster:
    """One private world: its own home folder for local clusters, found by nobody else."""

    home: Path
    work: Path
    """A folder of the test's own: checkpoints, step logs."""
    environ: dict[str, str] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    """Nodes that are not asked: their agents are stopped and never answer, or are cut off and know nothing new."""

    def ctl(
        self, *arguments: str, check: int | None = 0, limit: float = CALL_LIMIT
    ) -> subprocess.CompletedProcess[str]:
        """Run the tool; ``check`` is the exit code it must have (None: any)."""
        command = [sys.executable, "-c", TOOL, *arguments]
        done = subprocess.run(
            command, env=self.environ, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=limit,
        )  # fmt: skip
        if check is not None and done.returncode != check:
            raise AssertionError(
                f"{' '.join(arguments)}: exit code {done.returncode}, not {check}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def start(self, *arguments: str, to: tuple[IO[str], IO[str]] | None = None) -> subprocess.Popen[str]:
        """Start the tool and do not wait for it; ``to``: where stdout and stderr go, instead of pipes."""
        command = [sys.executable, "-c", TOOL, *arguments]
        out, err = to or (subprocess.PIPE, subprocess.PIPE)
        return subprocess.Popen(
            command, env=self.environ, cwd=self.work, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True
        )

    def up(self, nodes: int, python: str = sys.executable) -> None:
        """Bring the cluster up; this Python runs its agents."""
        done = subprocess.run(
            [python, "-c", UP, str(nodes)], env=self.environ, cwd=self.work, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=UP_LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ctl(*arguments, "-o", "json").stdout)

    def ask(self, path: str) -> Any:
        """What the API says, asked without the tool: polls must not cost a process each."""
        sockets = sorted(self.home.glob("local/run/*/*/api.sock"))
        return Client([str(s) for s in sockets if s.parent.name not in self.frozen], patience=20.0).get(path)

    def job(self, name: str) -> dict[str, Any]:
        """The job as ``describe -o json`` shows it."""
        job: dict[str, Any] = self.ask(job_path(name))
        return job

    def node(self, name: str) -> dict[str, Any]:
        node: dict[str, Any] = self.ask(node_path(name))
        return node

    def lease_pid(self, node: str) -> int:
        """Of the node's lease process."""
        (folder,) = self.home.glob(f"local/run/*/{node}/lease")
        holder = find_holder(folder)
        assert holder is not None, f"no lease process runs on {node}"
        return holder[0]

    def renewed(self, node: str) -> float:
        """When (CLOCK_BOOTTIME) the node's lease process sent its last good renewal; 0: none of this process yet."""
        (folder,) = self.home.glob(f"local/run/*/{node}/lease")
        pulse = read_pulse(pulse_file(folder))
        return pulse.renewed if pulse is not None else 0.0

    def nodes(self) -> dict[str, str]:
        """Node to state."""
        return {n["name"]: n["state"] for n in self.ask("/v1/nodes")["items"]}

    def pod(self, job: str, node: str) -> dict[str, Any]:
        return next(p for p in self.job(job)["pods"] if p["node"] == node)

    def workers(self, job: str, node: str | None = None) -> dict[int, int]:
        """Rank to pid of the living workers of the job's generation (of one node). A pod's own record may be of the
        one before for as long as a beat takes."""
        found = self.job(job)
        pods = [p for p in found["pods"] if node in (None, p["node"]) and p["generation"] == found["generation"]]
        return {w["rank"]: w["pid"] for p in pods for w in p["workers"] if w["state"] == "running"}

    def until_workers(self, job: str, count: int) -> dict[int, int]:
        """``workers``, once all pods have published theirs."""
        found: dict[int, int] = {}

        def complete() -> bool:
            found.clear()
            found.update(self.workers(job))
            return len(found) == count

        self.until(complete, 30, f"{job} has {count} workers")
        return found

    def happened(self, kind: str, about: str) -> list[float]:
        """When (Unix seconds, the store's clock) events of this kind happened to this job or node."""
        events = self.json("events", "--limit", "500")["items"]
        mine = [e for e in events if e["kind"] == kind and about in (e["job"], e["node"])]
        return [int(e["id"].partition("-")[0]) / 1000 for e in mine]

    def logged(self, event: str) -> int:
        """How often agents logged this event."""
        needle = json.dumps({"event": event})[1:-1]
        return sum(log.read_text().count(needle) for log in self.home.glob("local/data/*/*/agent.log"))

    def restarts_counted(self, job: str, nodes: Collection[str] = ()) -> int:
        """``nodeagent_restarts_total`` of the job, over the metrics pages of all living agents (of these nodes)."""
        total = 0.0
        for node in self.ask("/v1/nodes")["items"]:
            if node["state"] == "ready" and (not nodes or node["name"] in nodes):
                with urllib.request.urlopen(node["http"] + "/metrics", timeout=10) as page:
                    lines = page.read().decode().splitlines()
                mine = [x for x in lines if x.startswith("nodeagent_restarts_total{") and f'job="{job}"' in x]
                total += sum(float(x.rpartition(" ")[2]) for x in mine)
        return int(total)

    def until(self, condition: Callable[[], bool], limit: float, what: str) -> float:
        """Poll until it holds, and return the seconds that it took. AssertionError with the cluster's state once
        ``limit`` seconds have passed that count (``tests/bounds.py``)."""
        bound = Bound(limit)
        while not condition():
            if bound.over:
                raise AssertionError(f"not within {limit:g} s ({bound.passed:.1f} s): {what}\n{self.state()}")
            time.sleep(0.1)
        return bound.passed

    def until_phase(self, job: str, phase: str, limit: float = 60.0) -> dict[str, Any]:
        def so() -> bool:
            now = self.job(job)
            if now["phase"] in ENDED and now["phase"] != phase:
                raise AssertionError(f"{job} ended: {now['phase']}: {now['reason']}\n{self.state()}")
            return bool(now["phase"] == phase)

        self.until(so, limit, f"{job} is {phase}")
        return self.job(job)

    def until_steps(self, job: str, count: int = 10, limit: float = 60.0) -> int:
        """Until the job has made so many more steps than now; the last one's number."""
        before = len(read_steps(self.work, job))
        world = self.job(job)["world_size"]
        self.until(
            lambda: len(read_steps(self.work, job)) >= before + count * world, limit, f"{job} makes {count} steps"
        )
        return int(read_steps(self.work, job)[-1]["step"])

    def at_rest(self) -> None:
        """Until every node is on and ready for work, and no job lives: what one test leaves to the next."""
        for node in self.json("local", "status")["nodes"]:
            if node["power"] != "on":
                self.ctl("local", "start", node["name"])
        for name, state in self.nodes().items():
            if state in ("cordoned", "draining", "drained"):
                self.ctl("uncordon", name)
        self.stop_jobs()
        self.until(lambda: set(self.nodes().values()) == {"ready"}, 30, "every node is ready")

    def stop_jobs(self) -> None:
        for job in self.ask("/v1/jobs")["items"]:
            if job["phase"] not in ENDED:
                self.ctl("stop", job["name"])

    def until_running(self, job: str, nodes: int, limit: float = 60.0, above: int = 0) -> dict[str, Any]:
        """Until the job runs whole on so many nodes, in a generation above ``above``."""

        def whole() -> bool:
            now = self.job(job)
            if now["phase"] in ENDED:
                raise AssertionError(f"{job} ended: {now['phase']}: {now['reason']}\n{self.state()}")
            pods = [p for p in now["pods"] if p["generation"] == now["generation"]]
            running = {p["node"] for p in pods if any(w["state"] == "running" for w in p["workers"])}
            return now["phase"] == "running" and now["generation"] > above and len(running) == nodes

        self.until(whole, limit, f"{job} runs on {nodes} nodes in a generation above {above}")
        return self.job(job)

    def state(self) -> str:
        """What a person would look at when something hangs."""
        out = []
        for call in (["get"], ["nodes"], ["events", "--limit", "30"]):
            done = self.ctl(*call, check=None)
            out.append(f"$ nodeagentctl {' '.join(call)}\n{done.stdout}{done.stderr}")
        nodes = json.loads(self.ctl("nodes", "-o", "json", check=None).stdout or '{"items": []}')["items"]
        verdicts = [(node["name"], verdict) for node in nodes for verdict in node["verdicts"]]
        out += [f"{node}: {v['rule']} {v['severity']} {v['stage']} {v['raw']}" for node, v in verdicts]
        jobs = json.loads(self.ctl("get", "-o", "json", check=None).stdout or '{"items": []}')["items"]
        out += [self.ctl("describe", job["name"], check=None).stdout for job in jobs[-2:]]
        for log in sorted(self.home.rglob("*.log")):
            if "rank" not in log.name:
                lines = log.read_text(errors="replace").splitlines()
                tail = [line for line in lines if '"level": "debug"' not in line][-20:]
                out.append("\n".join([f"--- {log.name}", *tail]))
        return "\n".join(out)

    def submit(self, text: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Submit a job file given as text."""
        file = self.work / "job.yaml"
        file.write_text(text)
        return self.ctl("submit", str(file), check=check)


def rules_of(node: dict[str, Any]) -> dict[str, str]:
    """Rule to stage, of every verdict on the node or its GPUs that has a consequence. ``info`` has none, and may come
    from the machine that runs the tests: its kernel log cannot be read, or its disks are slow."""
    return {v["rule"]: v["stage"] for v in node["verdicts"] if v["severity"] != "info"}


@contextmanager
def bounded(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block, whatever happens in it."""
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """A cluster of so many nodes; afterwards nothing of it is left, or the test fails."""
    with home() as (folder, environ):
        one = Cluster(folder, folder / "work", environ)
        try:
            if nodes:
                one.up(nodes)
            yield one
        finally:
            one.ctl("local", "down", check=None)


@contextmanager
def home() -> Iterator[tuple[Path, dict[str, str]]]:
    """A home folder, and the environment for what lives there; afterwards no process of it is left, or the test
    fails."""
    folder = Path(tempfile.mkdtemp(prefix="na-e2e-", dir=short()))
    (folder / "work").mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("NODEAGENT", "XDG_"))}
    environ["NODEAGENT_LOCAL"] = str(folder / "local")
    environ["PYTHONPATH"] = str(ROOT)
    try:
        yield folder, environ
    finally:
        left = leftovers(folder)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes are left: {left}"


def leftovers(home: Path) -> dict[int, str]:
    """Processes whose environment or command line names the cluster's folder: pid to command line. One of another
    user's that holds its memory, and those of others after it, are not seen."""
    needle, found = os.fsencode(str(home)), dict[int, str]()
    _names(needle, found, own=True)
    others = threading.Thread(target=_names, args=(needle, found), kwargs={"own": False}, daemon=True)
    others.start()
    others.join(CALL_LIMIT)
    return {pid: line for pid, line in found.copy().items() if line}


def _names(needle: bytes, found: dict[int, str], *, own: bool) -> None:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (user(int(entry.name)) == os.geteuid()) is not own:
                continue
            line = (entry / "cmdline").read_bytes()
            if needle in line or needle in (entry / "environ").read_bytes():
                found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended while we looked


def is_alive(pid: int) -> bool:
    """The process runs code: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def listening_ports(pids: Iterable[int]) -> set[int]:
    """TCP ports (of IPv4) that these processes listen on."""
    inodes = set()
    for pid in pids:
        handles: list[Path] = []
        with suppress(FileNotFoundError):  # it ended while we looked
            handles += Path(f"/proc/{pid}/fd").iterdir()
        for handle in handles:
            with suppress(FileNotFoundError):  # this one was closed
                if found := re.fullmatch(r"socket:\[(\d+)\]", str(handle.readlink())):
                    inodes.add(found[1])
    return {port for port, inode in _listening() if inode in inodes}


def open_ports() -> set[int]:
    """TCP ports (of IPv4) that anybody listens on."""
    return {port for port, _ in _listening()}


def _listening() -> list[tuple[int, str]]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [(int(row[1].partition(":")[2], 16), row[9]) for row in rows if row[3] == "0A"]


# --- training and its step log ----------------------------------------------------------------------


def digits_job(work: Path, name: str = "digits", *, nodes: str, steps: int, delay: float = 0.05, more: str = "",
               script: Path = DIGITS, workers: int = 2, options: Sequence[str] = ()) -> str:  # fmt: skip
    """A job file for the digits example, with a step log at ``work/NAME.steps`` and a checkpoint each 5 steps."""
    words = ["--target-accuracy", "0", *options]
    more = f"preload: [torch, torch.distributed, torch.optim, torch._dynamo]\n{more}"
    return _training(work, name, script, words, nodes=nodes, steps=steps, delay=delay, more=more, workers=workers)


def lockstep_job(
    work: Path, name: str, *, nodes: str, steps: int = lockstep.STEPS, delay: float = 0.05, workers: int = 2
) -> str:
    """The same for ``lockstep.py``, whose losses ``lockstep.losses`` gives."""
    more = "preload: []\n"
    return _training(work, name, LOCKSTEP, (), nodes=nodes, steps=steps, delay=delay, more=more, workers=workers)


def _training(work: Path, name: str, script: Path, options: Sequence[str], *, nodes: str, steps: int, delay: float,
              more: str, workers: int) -> str:  # fmt: skip
    words = [
        sys.executable, str(script), "--steps", str(steps), "--step-delay", str(delay), "--ckpt-every", "5",
        "--step-log", str(work / f"{name}.steps"), *options,
    ]  # fmt: skip
    return (
        f"name: {name}\ncommand: {json.dumps(words)}\nnodes: {nodes}\nworkers_per_node: {workers}\n"
        f"checkpoint_dir: {work / (name + '.ckpt')}\ngrace: 5s\n{more}"
    )


def read_steps(work: Path, name: str = "digits") -> list[dict[str, Any]]:
    """All lines of a step log, in order of time."""
    file = work / f"{name}.steps"
    if not file.exists():
        return []
    whole = file.read_text().rpartition("\n")[0]  # the last line may be half written
    rows = [json.loads(line) for line in whole.splitlines()]
    return sorted(rows, key=lambda row: float(row["mono"]))


def check_steps(rows: Sequence[Mapping[str, Any]], reference: Mapping[int, float]) -> None:
    """Every loss equals the undisturbed run's to 1e-5, and never do two generations step at the same time."""
    assert rows, "no step was logged"
    for row in rows:
        expected = reference[int(row["step"])]
        assert abs(float(row["loss"]) - expected) <= 1e-5, f"loss {row['loss']} is not {expected}: {row}"
    newest = 0
    for row in rows:
        generation = int(row["generation"] or 0)
        assert generation >= newest, f"a worker of generation {generation} stepped after one of {newest}: {row}"
        newest = generation


def check_undisturbed(rows: Sequence[Mapping[str, Any]]) -> None:
    """Every rank made every step exactly once, in one generation and one process: not one step was lost or redone.
    A generation that was not the job's first goes on at some step, the same for all."""
    assert rows, "no step was logged"
    steps: dict[tuple[int, int, int], list[int]] = {}
    for row in rows:
        steps.setdefault((row["rank"], row["generation"], row["pid"]), []).append(int(row["step"]))
    assert len(steps) == rows[0]["world"], f"some rank had more than one life: {sorted(steps)}"
    first = min(int(row["step"]) for row in rows)
    for who, made in steps.items():
        assert made == list(range(first, first + len(made))), f"rank, generation, pid {who} made the steps {made}"


def check_complete(rows: Sequence[Mapping[str, Any]], last: int) -> None:
    """Every step from 1 to the last was made."""
    missing = set(range(1, last + 1)) - {int(r["step"]) for r in rows}
    assert not missing, f"steps never made: {sorted(missing)}"
    assert max(int(r["step"]) for r in rows) == last


def reference_losses(steps: int, folder: Path) -> dict[int, float]:
    """Losses of an undisturbed run by one plain process, no nodeagent anywhere near."""
    log = folder / "reference.steps"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("NODEAGENT")}
    environ |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable, str(DIGITS), "--steps", str(steps), "--target-accuracy", "0",
        "--ckpt-dir", str(folder / "reference.ckpt"), "--ckpt-every", str(steps), "--step-log", str(log),
    ]  # fmt: skip
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=REFERENCE_LIMIT)
    return {int(r["step"]): float(r["loss"]) for r in map(json.loads, log.read_text().splitlines())}
