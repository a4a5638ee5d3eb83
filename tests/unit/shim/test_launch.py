"""How a worker is started: where its files are, by what it is forked, and that none runs which nobody can watch."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.shim.launch import Launcher
from nodeagent.shim.loop import Loop
from nodeagent.shim.output import RotatingFile
from nodeagent.shim.worker import Parts, Worker

SAYS = "import os; print(os.getcwd(), os.environ['WORD'], os.environ['TORCHELASTIC_ERROR_FILE'])"


class Pod:
    """The parts that a launcher needs. ``took``: orders to the fork server, if that ``takes`` any."""

    def __init__(self, folder: Path, command: Sequence[str] = (sys.executable, "-c", SAYS), **pod: Any) -> None:
        self.folder, self.changes = folder, 0
        self.launched = list[tuple[Worker, str]]()
        self.took = list[Callable[[int, str], None]]()
        self.takes = False
        (folder / "errors").mkdir()
        (folder / "logs" / "g4").mkdir(parents=True)
        described = {"working_dir": str(folder), "command": list(command), "limits": {}, "roles": {}} | pod
        server = SimpleNamespace(takes=lambda *_: self.takes, fork=lambda *order: self.took.append(order[-1]))
        self.parts = SimpleNamespace(
            loop=Loop(), file=lambda path: RotatingFile(path, 1 << 20, 1), logs=folder / "logs", state=folder,
            pod=described, containers=None, fork_server=server, changed=self._changed,
        )  # fmt: skip
        environments = [{"PATH": os.environ["PATH"], "WORD": f"w{local}"} for local in range(2)]
        self.launcher = Launcher(cast(Parts, self.parts), 4, environments, self._launched)

    def _launched(self, w: Worker, why: str) -> None:
        self.launched.append((w, why))

    def _changed(self) -> None:
        self.changes += 1

    def worker(self, place: str = "") -> Worker:
        return self.launcher.create(5, 1, place)


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def ended(w: Worker) -> int:
    """Its exit code."""
    _, status = os.waitpid(w.pid, 0)
    os.close(w.pidfd)
    return os.waitstatus_to_exitcode(status)


def printed(w: Worker) -> str:
    w.captures[0].drain()
    w.captures[1].drain()
    output = w.captures[0].tail() or w.captures[1].tail()
    w.close()
    return output


def test_what_an_earlier_worker_of_the_rank_wrote_of_its_error_is_not_the_new_ones(pod: Pod) -> None:
    left = pod.folder / "errors" / "g4-r5.json"
    left.write_text("{}")
    w = pod.worker()
    assert (w.rank, w.local_rank, w.pid, w.error_file) == (5, 1, 0, left)
    assert not left.exists()
    left.write_text("{}")
    again = pod.launcher.successor(w)
    assert (again.rank, again.local_rank, again.error_file, again.log) == (5, 1, left, w.log)
    assert again is not w and again.captures[0] is not w.captures[0] and not left.exists()
    for one in (w, again):
        for capture in one.captures:
            capture.started()
        one.close()


def test_a_plain_program_runs_in_its_folder_with_the_environment_of_its_local_rank(pod: Pod) -> None:
    w = pod.worker()
    pod.launcher.launch([w])
    assert (pod.launched, pod.launcher.forking, w.by_fork_server, pod.changes) == ([(w, "")], False, False, 1)
    assert ended(w) == 0
    assert printed(w) == f"{pod.folder} w1 {pod.folder / 'errors' / 'g4-r5.json'}"


def test_a_worker_of_a_role_runs_the_roles_command(tmp_path: Path) -> None:
    server = {"command": [sys.executable, "-c", "raise SystemExit(7)"]}
    pod = Pod(tmp_path, roles={"server": server})
    w = pod.worker("server.0")
    pod.launcher.launch([w])
    assert ended(w) == 7
    w.close()


def test_its_limits_are_the_jobs_and_not_the_shims(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))")
    pod = Pod(tmp_path, command, limits={"core": 0})
    before, w = resource.getrlimit(resource.RLIMIT_CORE), pod.worker()
    pod.launcher.launch([w])
    assert ended(w) == 0
    assert printed(w) == "(0, 0)"
    assert resource.getrlimit(resource.RLIMIT_CORE) == before


def test_what_the_fork_server_takes_is_under_way_until_it_says_so(pod: Pod) -> None:
    pod.takes = True
    workers = [pod.launcher.create(rank, rank, "") for rank in range(2)]
    pod.launcher.launch(workers)
    assert (pod.launched, pod.launcher.forking, [w.by_fork_server for w in workers]) == ([], True, [True, True])
    pod.took[1](0, "fork: no room")
    assert (pod.launched, pod.launcher.forking) == ([(workers[1], "fork: no room")], True)
    child = os.posix_spawn("/bin/true", ["true"], {})
    pod.took[0](child, "")
    assert (pod.launched[1:], pod.launcher.forking, workers[0].pid) == ([(workers[0], "")], False, child)
    assert ended(workers[0]) == 0
    for w in workers:
        w.close()


def test_a_container_that_cannot_be_prepared_is_why_it_has_no_process(pod: Pod) -> None:
    def start(*_: object) -> tuple[list[str], dict[str, str]]:
        raise IsADirectoryError("it is a folder")

    pod.parts.containers = SimpleNamespace(start=start)
    w = pod.worker()
    pod.launcher.launch([w])
    assert (pod.launched, w.pid, pod.launcher.forking) == ([(w, "container: it is a folder")], 0, False)
    w.close()


def test_in_a_container_the_fork_server_is_not_asked(pod: Pod) -> None:
    def start(command: list[str], env: dict[str, str], local_rank: int) -> tuple[list[str], dict[str, str]]:
        return [*command[:-1], f"print({env['WORD']!r}, {local_rank})"], env

    pod.takes, pod.parts.containers = True, SimpleNamespace(start=start, limits=lambda limits: limits)
    w = pod.worker()
    pod.launcher.launch([w])
    assert (ended(w), pod.took, w.by_fork_server) == (0, [], False)
    assert printed(w) == "w1 1"


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_cannot_be_watched_does_not_run(pod: Pod) -> None:
    pod.takes = True
    w = pod.worker()
    pod.launcher.launch([w])
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    with no_descriptor_left():
        pod.took[0](child, "")
    assert (pod.launched, w.pid, w.pidfd) == ([(w, "it cannot be watched: Too many open files")], 0, -1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    w.close()
