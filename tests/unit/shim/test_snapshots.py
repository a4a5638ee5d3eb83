"""What the shim keeps of snapshots, and when it is too much."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

from nodeagent.shim.link import Call, WorkerLink
from nodeagent.shim.snapshots import KeptSnapshots, WriteOut

MIB = 1 << 20


class Machine:
    """Memory that the shim and its workers share; each memory that is made takes some of it."""

    def __init__(self, size: int) -> None:
        self.free, self.workers = size, dict[int, SimpleNamespace]()
        self._link = WorkerLink(lambda: None)
        self.kept = KeptSnapshots(self._link, lambda: None, lambda: self.free)

    def put(self, size: int, fds: list[int], slot: int = 0) -> str:
        """The refusal, or ""."""
        answers: list[dict[str, Any]] = []
        worker = self.workers.setdefault(slot, SimpleNamespace(role="", ended=False))
        call = SimpleNamespace(
            worker=worker, local_rank=slot, message={"index": 0, "bytes": size}, fds=fds,
            answer=lambda **_: answers.append({}), refuse=lambda text: answers.append({"error": text}),
        )  # fmt: skip
        self._link._handlers["worker.snapshot.put"](cast("Call", call))
        (answer,) = answers
        return str(answer.get("error", ""))


def test_what_may_be_made_may_be_kept() -> None:
    machine = Machine(30 * MIB)
    assert machine.put(14 * MIB, []) == ""
    fd = os.memfd_create("nodeagent-snapshot")
    os.posix_fallocate(fd, 0, 14 * MIB)
    machine.free -= 14 * MIB
    assert machine.put(14 * MIB, [fd]) == ""
    assert machine.kept.bytes == 14 * MIB
    assert machine.put(16 * MIB, []) == "a snapshot of 16 MiB is more than this node has memory for (15 MiB)"
    os.close(fd)


def test_what_the_helper_printed_is_in_no_report() -> None:
    """Everybody reads a report; the log of the pod has it."""
    over: list[bool] = []
    nothing = cast("Any", None)
    one = WriteOut(nothing, nothing, nothing, nothing, lambda: over.append(True))
    one._ended("the helper failed with exit code 1: KeyError: 's3cret'")
    assert (one.text, over) == ("snapshots not written out: the helper failed with exit code 1", [True])


def made(machine: Machine, size: int) -> int:
    machine.free -= size
    fd = os.memfd_create("nodeagent-snapshot")
    os.posix_fallocate(fd, 0, size)
    return fd


def test_what_others_may_make_is_not_given_a_second_time() -> None:
    """The workers of a pod ask for their first memories at once."""
    machine = Machine(40 * MIB)
    assert [machine.put(10 * MIB, [], slot)[:15] for slot in range(5)] == [
        "",
        "",
        "",
        "a snapshot of 1",
        "a snapshot of 1",
    ]
    fds = [made(machine, 10 * MIB) for _ in range(3)]
    for slot, fd in enumerate(fds):
        assert machine.put(10 * MIB, [fd], slot) == ""
    assert machine.put(5 * MIB, [], 3) == "", "what has been made is counted once"
    for fd in fds:
        os.close(fd)


def test_what_one_that_ended_might_have_made_is_free() -> None:
    machine = Machine(40 * MIB)
    assert machine.put(20 * MIB, [], 0) == ""
    assert machine.put(20 * MIB, [], 0) == "", "asked again, it is not counted twice"
    assert machine.put(20 * MIB, [], 1) == "a snapshot of 20 MiB is more than this node has memory for (10 MiB)"
    machine.workers[0].ended = True
    assert machine.put(20 * MIB, [], 1) == ""
