"""What stacks say: recorded ones, as py-spy tells them, innermost frame first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.shim.hang.stacks import Frame, dump, kernel_text, main_thread, site, text, waits


def python(name: str, file: str, line: int = 3) -> Frame:
    return {"name": name, "filename": f"/venv/{file}", "short_filename": file, "line": line, "module": None}


def native(name: str, module: str = "/venv/torch/lib/libtorch_cpu.so") -> Frame:
    return {"name": name, "filename": module, "short_filename": module, "line": 0, "module": module}


LIBC = native("0x7f63a0aa3f16", "/usr/lib/libc.so.6")
COND = native("pthread_cond_wait", "/usr/lib/libc.so.6")
WORK = native("c10d::Work::wait")
SCRIPT = python("train", "train.py", 49)
ALL_REDUCE = python("all_reduce", "torch/distributed/distributed_c10d.py", 3252)
BACKWARD = [
    python("_engine_run_backward", "torch/autograd/graph.py", 900),
    python("backward", "torch/_tensor.py", 700),
    SCRIPT,
]
LOCK = native("PyThread_acquire_lock_timed", "/usr/lib/libpython3.11.so.1.0")


@pytest.mark.parametrize(
    ("frames", "with_native", "expected"),
    [
        ([LIBC, COND, WORK, ALL_REDUCE, SCRIPT], True, True),
        ([ALL_REDUCE, SCRIPT], False, True),
        ([LIBC, COND, WORK, native("c10d::Reducer::finalize_backward()"), *BACKWARD], True, True),
        ([LIBC, COND, WORK, SCRIPT], True, True),
        ([native("cudaStreamSynchronize", "/usr/lib/libcudart.so"), SCRIPT], True, True),
        ([native("ncclGroupEnd", "/usr/lib/libnccl.so.2"), ALL_REDUCE], True, True),
        ([native("gloo::transport::tcp::Buffer::waitRecv"), SCRIPT], True, True),
        (BACKWARD, False, None),
        (BACKWARD, True, False),
        ([LIBC, LOCK, python("deadlock", "train.py"), SCRIPT], True, False),
        ([python("wait", "threading.py"), python("deadlock", "train.py"), SCRIPT], True, False),
        ([python("spin", "train.py"), ALL_REDUCE, SCRIPT], True, False),
        ([python("spin", "train.py"), SCRIPT], False, None),
        ([python("spin", "model.py"), python("forward", "torch/distributed/fsdp/f.py"), SCRIPT], True, False),
        ([native("at::native::addmm"), python("forward", "torch/nn/modules/linear.py"), SCRIPT], True, False),
        ([], False, None),
    ],
    ids=[
        "gloo", "gloo, Python alone", "DDP's backward", "work.wait()", "on its GPU", "nccl", "gloo's own",
        "backward, Python alone", "backward that computes", "a lock", "threading", "a hook inside of a collective",
        "spins, Python alone", "spins inside of FSDP", "computes", "no stack",
    ],
)  # fmt: skip
def test_who_waits_for_others(frames: list[Frame], with_native: bool, expected: bool | None) -> None:
    assert waits(frames, with_native) is expected


def test_the_site_is_the_scripts_own_innermost_line() -> None:
    assert site([LIBC, WORK, ALL_REDUCE, SCRIPT, python("<module>", "train.py")]) == "train (train.py:49)"
    assert site([LIBC, WORK, ALL_REDUCE]) == "all_reduce (torch/distributed/distributed_c10d.py:3252)"
    assert site([LIBC]) == ""
    assert len(site([python("f" * 500, "train.py")])) <= 160


def test_the_main_thread_is_the_one_with_the_processes_number() -> None:
    threads = [{"os_thread_id": 8, "frames": [LIBC]}, {"os_thread_id": 7, "frames": [SCRIPT]}]
    assert main_thread(threads, 7) == [SCRIPT]
    assert main_thread(threads, 9) == []


def test_stacks_for_people() -> None:
    thread = {"os_thread_id": 7, "thread_name": "MainThread", "active": True, "owns_gil": True}
    shown = text([thread | {"frames": [COND, SCRIPT]}, thread | {"os_thread_id": 8, "thread_name": None, "frames": []}])
    assert shown.splitlines()[:3] == [
        'Thread 7 "MainThread" (active, holds the GIL)',
        "    pthread_cond_wait (/usr/lib/libc.so.6)",
        "    train (train.py:49)",
    ]
    assert len(text([thread | {"frames": [SCRIPT] * 500}] * 500).splitlines()) == 128 * 101


def test_the_kernel_tells_of_each_thread() -> None:
    assert kernel_text(os.getpid()).startswith(f"Thread {os.getpid()} ")
    assert kernel_text(2**22 + 1) == "no such process: No such file or directory"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("echo nonsense", "py-spy wrote no JSON: "),
        ("echo 'Error: Permission Denied' >&2; echo ' Try sudo' >&2; exit 1", "Error: Permission Denied; Try sudo"),
        ("exit 3", "py-spy ended with 3"),
        ("exec sleep 60", "not within 0.5 s"),
    ],
    ids=["garbage", "refused", "says nothing", "hangs"],
)
def test_why_there_are_no_stacks(tmp_path: Path, program: str, why: str) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!/bin/sh\n{program}\n")
    spy.chmod(0o755)
    threads, problem = dump(str(spy), os.getpid(), "--nonblocking", 0.5)
    assert threads == []
    assert problem.startswith(why)


def test_without_py_spy_there_are_no_stacks() -> None:
    assert dump(None, os.getpid(), "--nonblocking", 0.5) == ([], "py-spy is not installed beside nodeagent")
    threads, problem = dump("/nowhere/py-spy", os.getpid(), "--nonblocking", 0.5)
    assert (threads, problem) == ([], "/nowhere/py-spy: No such file or directory")
