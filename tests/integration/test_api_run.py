"""``run`` as a process of its own: output, exit codes, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeagent.model.job import BudgetEntry, JobRecord, Outcome, Phase
from nodeagent.pods.folder import log_folder
from tests.unit.api.fakes import LiveAgent, live_agent

TOOL = [sys.executable, "-c", "from nodeagent.ctl.main import main; main()"]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, allow_root=True) as started:
        yield started


class Run:
    """``nodeagentctl run`` of a job named j, which is running."""

    def __init__(self, agent: LiveAgent, folder: Path, to: int | None = None) -> None:
        self.agent = agent
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*TOOL, "run", "--name", "j", "--", "python", "train.py"],
                env=os.environ | {"NODEAGENTCTL_AGENT": agent.socket},
                stdin=subprocess.DEVNULL, stdout=out if to is None else to, stderr=err, start_new_session=True,
            )  # fmt: skip
        agent.until(lambda: self.job is not None and self.job.phase == "running", 20)
        self.until_reported("generation 1 active")

    @property
    def job(self) -> JobRecord | None:
        return next(iter(self.agent.view.cluster().jobs.values()), None)

    def until_reported(self, text: str) -> None:
        self.agent.until(lambda: text in self.err.read_text(), 20)

    def write(self, text: str, stream: str = "stdout") -> None:
        assert self.job is not None
        folder = log_folder(self.agent.view.config.dirs.logs, "j", self.job.uid) / "g1"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "rank0.log").open("a") as file:
            file.write(f"2026-01-01T00:00:00.{time.time_ns() // 1000 % 1000000:06d}Z {stream} F {text}\n")

    def end(self, phase: Phase, outcome: Outcome, spend: BudgetEntry | None = None) -> None:
        job = self.job
        assert job is not None
        if phase == "succeeded":
            self.agent.do(lambda: self.agent.view.succeed(job))
        else:
            self.agent.do(lambda: self.agent.view.end(job, phase, outcome.text, outcome=outcome, spend=spend))

    def code(self) -> int:
        return self.process.wait(20)


@contextmanager
def begun(agent: LiveAgent, folder: Path, to: int | None = None) -> Iterator[Run]:
    """``to``: what its standard output is."""
    started = Run(agent, folder, to)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait(10)


@pytest.fixture
def run(agent: LiveAgent, tmp_path: Path) -> Iterator[Run]:
    with begun(agent, tmp_path) as started:
        yield started


def test_success_is_0_and_the_output_goes_where_it_was_written(run: Run) -> None:
    run.write("hello")
    run.write("a warning", "stderr")
    run.end("succeeded", Outcome(code=0, text="all workers exited 0"))
    assert run.code() == 0
    assert run.out.read_text() == "[0]<stdout>: hello\n"
    assert "[0]<stderr>: a warning\n" in run.err.read_text()


def test_a_failed_job_exits_with_its_code_and_names_the_culprit(run: Run) -> None:
    spend = BudgetEntry(
        at=1, wall=1.0, kind="worker_failed", counts=True, node="n1", rank=1, exit=7,
        text="rank 1 on n1 failed first: exit code 7", error="ValueError: no",
    )  # fmt: skip
    run.end("failed", Outcome(code=7, text="a worker failed at the job's start", error="ValueError: no"), spend)
    assert run.code() == 7
    reported = run.err.read_text()
    assert (
        "Blamed for the end of generation 1 (the job was not started again):\n  rank 1 on n1 failed first" in reported
    )
    assert "ValueError: no" in reported
    assert "nodeagentctl logs j --generation 1 --rank 1" in reported


def test_ctrl_c_stops_the_job_and_waits_for_it(run: Run) -> None:
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130
    assert run.job is not None
    assert (run.job.phase, run.job.control.desired) == ("stopped", "stop")
    assert "stopping the job gracefully" in run.err.read_text()


def test_a_second_ctrl_c_does_not_wait(run: Run) -> None:
    run.agent.obeys = False
    run.process.send_signal(signal.SIGINT)
    run.agent.until(lambda: run.job is not None and run.job.control.desired == "stop")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130
    assert "not waiting any longer" in run.err.read_text()


def test_a_lost_terminal_leaves_the_job_running(run: Run) -> None:
    run.process.send_signal(signal.SIGHUP)
    assert run.code() == 128 + signal.SIGHUP
    run.agent.do(run.agent.view.refresh)
    assert run.job is not None
    assert (run.job.phase, run.job.control.desired) == ("running", "run")


LEFT_TO_DO = "  next: this does not end job/j; follow it: nodeagentctl logs j -f; or stop it: nodeagentctl stop j\n"


@pytest.mark.parametrize("gone", ["No space left on device", "Broken pipe"])
def test_where_its_output_cannot_be_written_it_names_the_job_that_goes_on(
    agent: LiveAgent, tmp_path: Path, gone: str
) -> None:
    with Path("/dev/full").open("w") as full:
        reader, pipe = os.pipe()
        with os.fdopen(pipe, "w") as broken:
            out = full if gone.startswith("No space") else broken
            with begun(agent, tmp_path, out.fileno()) as run:
                os.close(reader)
                run.write("hello")
                assert run.code() == 121
                assert run.err.read_text().endswith(f"nodeagentctl: its output cannot be written: {gone}\n{LEFT_TO_DO}")
                run.agent.do(run.agent.view.refresh)
                assert run.job is not None
                assert (run.job.phase, run.job.control.desired) == ("running", "run")


def test_what_is_detached_is_named_though_its_name_cannot_be_printed(agent: LiveAgent) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*TOOL, "run", "--name", "j", "--detach", "--", "python", "train.py"],
            env=os.environ | {"NODEAGENTCTL_AGENT": agent.socket},
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=30,
        )  # fmt: skip
    assert done.returncode == 121
    assert done.stderr == f"nodeagentctl: its output cannot be written: No space left on device\n{LEFT_TO_DO}"


def test_where_nobody_reads_either_of_its_streams_it_still_has_its_own_code(agent: LiveAgent) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*TOOL, "run", "--name", "j", "--detach", "--", "python", "train.py"],
            env=os.environ | {"NODEAGENTCTL_AGENT": agent.socket}, stdout=full, stderr=full, timeout=30,
        )  # fmt: skip
    assert done.returncode == 121
