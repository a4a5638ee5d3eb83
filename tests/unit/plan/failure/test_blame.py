"""Blame: the first reporter that is no victim; those that died of a broken collective are not the cause."""

from __future__ import annotations

import time

import pytest

from nodeagent.model.world import PodReport, WorkerExit
from nodeagent.plan.failure.blame import blame, collective_words, describe, farewell, is_failure, is_victim, shell_code
from tests.unit.plan.build import SUCCEEDED, VICTIM, failed, make_exit


def found(reports: dict[str, PodReport]) -> tuple[str, int, bool]:
    who = blame(reports)
    assert who is not None
    return who.node, who.worker.rank, who.victim


def test_what_became_of_the_last_steps() -> None:
    left = [
        WorkerExit(rank=r, local_rank=r, pid=9, code=101, stopped=True, left_at=7, saved_in=0.5 + r) for r in range(2)
    ]
    late = [WorkerExit(rank=r, local_rank=r, pid=9, signal=9, stopped=True, overdue=2.5) for r in (3, 2)]
    plain = WorkerExit(rank=4, local_rank=4, pid=9, signal=15, stopped=True)
    assert farewell([plain]) == ""
    assert farewell(left) == "checkpoint at step 7 in 1.50 s"
    assert farewell(late[:1]) == "grace of 2.5 s ran out: rank 3 killed"
    assert farewell([*left, plain, *late]) == (
        "checkpoint at step 7 in 1.50 s; grace of 2.5 s ran out: ranks 2, 3 killed"
    )
    assert farewell([left[0], left[1].model_copy(update={"saved_in": None})]) == (
        "left at step 7, where nothing was kept"
    )
    missed = [WorkerExit(rank=r, local_rank=r, pid=9, signal=9, stopped=True, missed=True) for r in (3, 2)]
    assert farewell([left[0], *missed]) == (
        "checkpoint at step 7 in 0.50 s; ranks 2, 3 made no last checkpoint, since not all ranks lived to make it"
    )
    saved_too_late_to_end = [left[0].model_copy(update={"overdue": 2.5})]
    assert farewell(saved_too_late_to_end) == "checkpoint at step 7 in 0.50 s"


def test_nobody_to_blame() -> None:
    assert blame({}) is None
    assert blame({"n1": SUCCEEDED, "n2": PodReport(state="lost")}) is None


def test_the_first_reporter_wins() -> None:
    reports = {"n1": failed(make_exit(0, code=1), seq=2), "n2": failed(make_exit(1, code=7), seq=1)}
    assert found(reports) == ("n2", 1, False)
    who = blame(reports)
    assert who is not None
    assert who.code == 7
    assert who.text == "rank 1 on n2 failed first: exit code 7 (ranks 0 ended after it)"


def test_a_report_that_the_store_has_not_ordered_comes_last() -> None:
    assert found({"n1": failed(make_exit(0), seq=0), "n2": failed(make_exit(1), seq=9)})[0] == "n2"


def test_on_one_node_the_order_of_ending_decides() -> None:
    assert found({"n1": failed(make_exit(0, order=1), make_exit(1, order=0))})[1] == 1


def test_a_killed_worker_is_blamed_although_its_victims_report_first() -> None:
    reports = {
        "n1": failed(make_exit(0, error=VICTIM), make_exit(1, signal=6, error=VICTIM, order=1), seq=1),
        "n2": failed(make_exit(2, signal=9), seq=2),
    }
    assert found(reports) == ("n2", 2, False)
    assert "SIGKILL (9)" in str(blame(reports))


def test_victims_only() -> None:
    reports = {"n1": failed(make_exit(0, error=VICTIM), seq=1), "n2": failed(make_exit(1, error=VICTIM), seq=2)}
    who = blame(reports)
    assert who is not None
    assert who.victim
    assert who.text == "rank 0 on n1 lost its peers (exit code 1); who failed first is not known"


def test_what_we_stopped_is_never_a_cause() -> None:
    stopped = make_exit(0, signal=15, stopped=True)
    assert not is_failure(stopped)
    assert blame({"n1": PodReport(state="fenced", exits=(stopped,), seq=1)}) is None
    assert found({"n1": failed(stopped, make_exit(1, code=2, order=1))})[1] == 1


@pytest.mark.parametrize(
    "error",
    [
        VICTIM,
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "[gloo/transport/tcp/pair.cc:144] Application timeout caused pair closure",
        "RuntimeError: Gloo connectFullMesh failed with ...",
        "torch.distributed.DistBackendError: NCCL error, ncclRemoteError: A call failed due to a network error",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
        "RuntimeError: NCCL communicator was aborted on rank 1.",
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: Connection reset by peer",
        "[c10d] recvValue failed on SocketImpl(fd=3)",
    ],
)
def test_what_gloo_nccl_and_the_store_write_when_a_peer_is_gone(error: str) -> None:
    assert is_victim(make_exit(code=1, error=error))
    assert is_victim(make_exit(signal=6, error=error))
    assert not is_victim(make_exit(signal=9, error=error)), "who is killed from outside is the cause"
    assert not is_victim(make_exit(signal=11, error=error))


@pytest.mark.parametrize("error", ["", "ValueError: boom", "CUDA error: out of memory", "IndexError: list index"])
def test_other_errors_are_a_worker_s_own(error: str) -> None:
    assert not is_victim(make_exit(code=1, error=error))


@pytest.mark.parametrize(
    ("exited", "code", "words"),
    [
        (make_exit(code=0), 0, "exit code 0"),
        (make_exit(code=7), 7, "exit code 7"),
        (make_exit(signal=9), 137, "SIGKILL (9)"),
        (make_exit(signal=63), 191, "signal 63"),
    ],
)
def test_in_words(exited: WorkerExit, code: int, words: str) -> None:
    assert (shell_code(exited), describe(exited)) == (code, words)
    assert is_failure(exited) is (code != 0)


@pytest.mark.parametrize("beginning", ["gloo", "RuntimeError: ", "gloo\n", "RuntimeError: Connection "])
def test_a_worker_cannot_hold_up_an_agent_with_what_it_writes(beginning: str) -> None:
    """``gloo`` a thousand times took 2 s, in each agent, each time that it looked: it is tried with all behind it."""
    began = time.process_time()
    assert not is_victim(make_exit(code=1, error=beginning * (80_000 // len(beginning))))
    assert time.process_time() - began < 5


def test_the_words_that_count_are_found_from_their_line_s_first_beginning_on() -> None:
    text = "gloo\nx gloo gloo closed gloo error and more\nRuntimeError: Connection reset by peer"
    assert (span := collective_words(text)) is not None
    assert text[slice(*span)] == "gloo gloo closed gloo error"
    assert collective_words("error gloo\nerror") is None
