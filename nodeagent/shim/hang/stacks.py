"""The stacks of a pod's workers, taken by a process of its own: it may block for as long as a worker does.

``python -m nodeagent.shim.hang.stacks FOLDER OLDEST JSON``: the folder of the files, the oldest generation of which
they are kept, and a list of ``{rank, pid, file, title, native}``. Each file gets what the kernel says of each thread,
the Python stacks, and the native ones, as far as they are wanted and can be had (py-spy reads them from outside: the
worker need not help). One JSON line a rank and reading goes to standard output: what its main thread does. Standard
library only. Must never stop a worker for longer than one native reading takes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import write_atomic

PYTHON_BOUND, NATIVE_BOUND = 4.0, 8.0
"""Seconds for one worker's Python stacks (the worker goes on meanwhile), and for its native ones (it stands still)."""
AT_ONCE = 4
MOST_THREADS, MOST_FRAMES, MOST_BYTES = 128, 100, 256 << 10
NAME = 160

IN_COLLECTIVE = re.compile(
    r"\bc10d::|\bgloo::|\bnccl[A-Z_]|\bhccl|\bHccl[A-Z]|\bP?MPI_|\bucc_|\bhorovod::|"
    r"\bcu(da)?(Stream|Event|Device|Ctx)Synchronize|\bat::cuda::.*[sS]ynchronize"
)
"""Native functions in which a worker waits for others, or for its GPU, which does."""
COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "torch/distributed/utils.py",
    "torch/distributed/_functional_collectives.py", "torch/distributed/rendezvous.py", "torch/distributed/rpc/",
    "horovod/", "paddle/distributed/communication/", "mindspore/communication/",
)  # fmt: skip
LIBRARIES = ("torch/", "horovod/", "paddle/", "mindspore/", "threading.py", "contextlib.py")
"""Python frames that lie between a script and its waiting; the first one of anything else is the script's own."""

Frame = dict[str, Any]
"""As py-spy tells it: name, short_filename, line, module (None for Python)."""


def waits(frames: list[Frame], native: bool) -> bool | None:
    """Whether a main thread (innermost frame first) waits for other workers; None: not to be known without its native
    frames."""
    for frame in frames:
        if frame["module"] is not None:
            if IN_COLLECTIVE.search(frame["name"]):
                return True
            continue
        file = frame["short_filename"] or frame["filename"]
        if file.startswith(COLLECTIVE_FILES):
            return True
        if not file.startswith(LIBRARIES):
            return False if native else None
    return False if native else None


def site(frames: list[Frame]) -> str:
    """The script's own innermost frame, as ``function (file:line)``; a library's if there is no other."""
    python = [f for f in frames if f["module"] is None]
    own = [f for f in python if not (f["short_filename"] or f["filename"]).startswith(LIBRARIES)]
    for frame in own or python:
        return f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"[:NAME]
    return ""


def main_thread(threads: list[dict[str, Any]], pid: int) -> list[Frame]:
    return next((t["frames"] for t in threads if t["os_thread_id"] == pid), [])


def text(threads: list[dict[str, Any]]) -> str:
    """Stacks for people, innermost frame first."""
    lines = []
    for thread in threads[:MOST_THREADS]:
        state = "active" if thread["active"] else "idle"
        held = ", holds the GIL" if thread["owns_gil"] else ""
        lines.append(f'Thread {thread["os_thread_id"]} "{thread["thread_name"] or ""}" ({state}{held})')
        for frame in thread["frames"][:MOST_FRAMES]:
            place = f"{frame['short_filename'] or frame['filename']}" + (f":{frame['line']}" if frame["line"] else "")
            lines.append(f"    {frame['name'][:NAME]} ({place})")
    return "\n".join(lines)


def kernel_text(pid: int) -> str:
    """What the kernel says of each thread: name, state, where it sleeps, its system call. The main thread comes first,
    though numbers that were used up begin anew below its own."""
    lines = []
    try:
        found = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        tasks = sorted(found, key=lambda task: (int(task) != pid, int(task)))[:MOST_THREADS]
    except OSError as error:
        return f"no such process: {error.strerror}"
    for task in tasks:
        folder = f"/proc/{pid}/task/{task}"
        state = _read(f"{folder}/stat").rpartition(")")[2].split()[:1]
        call = _read(f"{folder}/syscall").split(" ")[0].strip()
        words = [_read(f"{folder}/comm").strip(), *state, _read(f"{folder}/wchan").strip(), f"syscall {call or '?'}"]
        lines.append(f"Thread {task} {' '.join(words)}")
        lines += [f"    {line}" for line in _read(f"{folder}/stack").splitlines()[:MOST_FRAMES]]
    return "\n".join(lines)


def _read(path: str) -> str:
    """Empty where it may not be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def spy() -> str | None:
    """py-spy, as installed beside this Python."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def dump(program: str | None, pid: int, how: str, bound: float) -> tuple[list[dict[str, Any]], str]:
    """All threads' stacks, or none and why."""
    if program is None:
        return [], "py-spy is not installed beside nodeagent"
    command = [program, "dump", how, "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=bound, check=False)
    except subprocess.TimeoutExpired:
        return [], f"not within {bound:g} s"
    except OSError as error:
        return [], f"{program}: {error.strerror}"
    if done.returncode:
        stated = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return [], "; ".join(
            line.strip() for line in stated[:5] if line.strip()
        ) or f"py-spy ended with {done.returncode}"
    try:
        return list(json.loads(done.stdout)), ""
    except ValueError as error:
        return [], f"py-spy wrote no JSON: {error}"


class StackReport:
    """One worker's file, written anew with each part, and its lines to the shim."""

    _lock = threading.Lock()

    def __init__(self, target: dict[str, Any]) -> None:
        self.target = target
        self._parts = [target["title"]]

    def add(self, heading: str, body: str) -> None:
        self._parts.append(f"--- {heading}\n{body}")
        data = ("\n\n".join(self._parts) + "\n").encode("utf-8", "backslashreplace")[:MOST_BYTES]
        try:
            write_atomic(Path(self.target["file"]), data, durable=False, mode=0o640)
        except OSError as error:
            print(f"stacks are lost: {self.target['file']}: {error.strerror}", file=sys.stderr, flush=True)

    def describe(self, frames: list[Frame], native: bool) -> None:
        reported = {"rank": self.target["rank"], "waits": waits(frames, native), "site": site(frames)}
        with self._lock:
            print(json.dumps(reported), flush=True)


def read_one(target: dict[str, Any], program: str | None) -> None:
    """The parts that need least of the worker first."""
    pid, report = target["pid"], StackReport(target)
    report.add("kernel, each thread", kernel_text(pid))
    threads, problem = dump(program, pid, "--nonblocking", PYTHON_BOUND)
    report.add("Python", text(threads) or f"none: {problem}")
    if threads:
        report.describe(main_thread(threads, pid), native=False)
    letter = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    halted = "TtDZ" if target["native"] else "TtD"  # that it has just ended is news only to who would halt it
    if letter and letter[0] in halted:  # it cannot be halted, or is already
        report.add("native", f"none: the process is in state {letter[0]}")
        return
    if not target["native"]:
        return
    threads, problem = dump(program, pid, "--native", NATIVE_BOUND)
    report.add("native and Python", text(threads) or f"none: {problem}")
    if threads:
        report.describe(main_thread(threads, pid), native=True)


def prune(folder: Path, oldest: int) -> None:
    """Remove the files of generations before ``oldest``; make the folder where it is not there."""
    folder.mkdir(exist_ok=True)
    for file in folder.glob("g*-rank*.txt"):
        generation = file.name[1:].partition("-")[0]
        if generation.isdecimal() and int(generation) < oldest:
            file.unlink(missing_ok=True)


def main() -> None:
    targets, program = json.loads(sys.argv[3]), spy()
    try:
        prune(Path(sys.argv[1]), int(sys.argv[2]))
    except OSError as error:
        print(f"the folder for stacks: {error}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(read_one, target, program) for target in targets]:
            done.result()


if __name__ == "__main__":
    main()
