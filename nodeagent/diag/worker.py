"""The process for one device: a process of the configured Python that runs one requested check after the other.

It is run by path, by a Python that need not have nodeagent: standard library, and torch if it is installed. The process
that started it enforces deadlines and kills it. Must never judge a speed; it does report a wrong result.

    argument        {"index", "count", "gpu", "group"}: which device of how many; no gpu: the CPU; a file for the group
    standard input  the name of a check, a line each
    first line      {"kind", "torch"}, {"problem"}: nothing can be checked, or {"wrong"}: the device refuses all work
    a line each     {"value", "unit", "wrong"}; ``wrong`` is empty when the result was right
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPAN = 0.5
"""Seconds for which a figure is measured, in rounds; the best round counts, because other programs only slow it
down."""
ROUNDS = 3
GIB = float(1 << 30)
RawResult = dict[str, Any]


def result(value: float, unit: str, right: bool, wrong: str) -> RawResult:
    """A check's outcome."""
    return {"value": round(value, 4), "unit": unit, "wrong": "" if right else wrong}


def rate(work: Callable[[], object], settle: Callable[[], object]) -> float:
    """How many times a second ``work`` can be done: the best of the rounds. ``settle`` waits for asynchronous work."""
    work()
    settle()
    best, each = 0.0, 1
    for _ in range(ROUNDS):
        done, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < SPAN / ROUNDS:
            for _ in range(each):
                work()
            settle()
            done += each
        best = max(best, done / spent)
        each = max(1, int(best * SPAN / ROUNDS / 8))
    return best


class Plain:
    """The CPU without torch: tests the checks themselves, and the memory."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.kind = cpu_kind()

    def matmul(self) -> RawResult:
        """Whole numbers, so the exact product is known."""
        size = 64
        left = [[(i * 7 + j * 3) % 11 - 5 for j in range(size)] for i in range(size)]
        right = [[(i * 5 + j * 2) % 13 - 6 for j in range(size)] for i in range(size)]
        columns = list(zip(*right, strict=True))

        def product() -> list[list[int]]:
            return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]

        speed = rate(product, lambda: None)
        sums = [sum(row) for row in right]
        known = sum(sum(a * s for a, s in zip(row, sums, strict=True)) for row in left)
        right_sum = sum(sum(row) for row in product())
        return result(speed * 2 * size**3 / 1e9, "GFLOP/s", right_sum == known, f"checksum {right_sum}, not {known}")

    def memory_bandwidth(self) -> RawResult:
        """One large copy, read and written."""
        size = 64 << 20
        source, target = bytearray(os.urandom(1 << 20) * (size >> 20)), bytearray(size)

        def copy() -> None:
            target[:] = source

        return result(2 * size * rate(copy, lambda: None) / GIB, "GiB/s", source == target, "the copy differs")


class Torch:
    """A GPU, or the CPU, through torch."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch

        self._torch, self._given = torch, given
        self._gpu = bool(given["gpu"])
        if self._gpu:
            torch.cuda.set_device(given["index"])
            self._device = torch.device("cuda", given["index"])
            self.kind = torch.cuda.get_device_name(self._device)
        else:
            self._device = torch.device("cpu")
            self.kind = cpu_kind()

    def _settle(self) -> None:
        if self._gpu:
            self._torch.cuda.synchronize()

    def matmul(self) -> RawResult:
        """Matrices of -1, 0 and 1: every sum is a whole number that half precision holds exactly, so one wrong bit
        shows. The first product is compared with sums made on the host, the others with the first."""
        torch = self._torch
        size, scale, unit = (4096, 1e12, "TFLOP/s") if self._gpu else (512, 1e9, "GFLOP/s")
        kind = torch.float16 if self._gpu else torch.float32
        dice = torch.Generator().manual_seed(20_220_311)
        a, b = (torch.randint(-1, 2, (size, size), generator=dice) for _ in range(2))
        w, v = (torch.randint(-50, 51, (size,), generator=dice) for _ in range(2))
        known = int((w @ a) @ (b @ v))
        left, right = a.to(kind).to(self._device), b.to(kind).to(self._device)
        del a, b
        first = left @ right
        found = int(w.double() @ (first.cpu().double() @ v.double()))
        if found != known:
            return result(0.0, unit, False, f"checksum {found}, not {known}")
        out = torch.empty_like(first)
        speed = rate(lambda: torch.mm(left, right, out=out), self._settle)
        for _ in range(8):
            torch.mm(left, right, out=out)
            if not torch.equal(first, out):
                return result(0.0, unit, False, "the same product gave another result")
        return result(speed * 2 * size**3 / scale, unit, True, "")

    def memory_bandwidth(self) -> RawResult:
        """One large copy inside the device, read and written."""
        torch = self._torch
        size = (1 << 30) if self._gpu else (64 << 20)
        source = torch.arange(size // 8, device=self._device)
        target = torch.empty_like(source)
        speed = rate(lambda: target.copy_(source), self._settle)
        return result(2 * size * speed / GIB, "GiB/s", bool(torch.equal(source, target)), "the copy differs")

    def host_to_device(self) -> RawResult:
        """Copies from the host's pinned memory to the GPU."""
        return self._copy(to_gpu=True)

    def device_to_host(self) -> RawResult:
        """Copies from the GPU to the host's pinned memory."""
        return self._copy(to_gpu=False)

    def _copy(self, to_gpu: bool) -> RawResult:
        torch = self._torch
        size = 256 << 20
        here = torch.arange(size // 8).pin_memory()
        there = torch.empty_like(here, device=self._device)
        if not to_gpu:
            there.copy_(here)
            back = torch.empty_like(here).pin_memory()
            speed = rate(lambda: back.copy_(there, non_blocking=True), self._settle)
            return result(size * speed / GIB, "GiB/s", bool(torch.equal(back, here)), "the copy differs")
        speed = rate(lambda: there.copy_(here, non_blocking=True), self._settle)
        return result(size * speed / GIB, "GiB/s", bool(torch.equal(there.cpu(), here)), "the copy differs")

    def collective(self) -> RawResult:
        """All processes add up one large tensor; each knows the correct sum."""
        torch, given = self._torch, self._given
        from torch import distributed as dist

        count, rank = given["count"], given["index"]
        dist.init_process_group(
            "nccl" if self._gpu else "gloo", init_method=f"file://{given['group']}", rank=rank, world_size=count
        )
        size = (256 << 20) if self._gpu else (4 << 20)
        data = torch.empty(size // 4, device=self._device)

        def add() -> None:
            data.fill_(rank + 1)
            dist.all_reduce(data)

        times = 5
        add()
        self._settle()
        best = 0.0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(times):
                add()
            self._settle()
            best = max(best, times / (time.perf_counter() - began))
        known = count * (count + 1) / 2
        right = bool((data == known).all())
        dist.destroy_process_group()
        share = 2 * (count - 1) / count if count > 1 else 1.0
        return result(share * size * best / GIB, "GiB/s", right, f"not every element of the sum is {known:g}")


def cpu_kind() -> str:
    """The processor's name, and how many of them this process may use."""
    name = "CPU"
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} x {name}"


def refusal(error: RuntimeError) -> str:
    """On one line: torch raises it for everything that the device cannot do."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def make(given: dict[str, Any]) -> tuple[Plain | Torch | None, RawResult]:
    """The devices' implementation, or None; and the first line of output."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it needs is not there
        if given["gpu"]:
            return None, {"problem": f"{sys.executable} has no torch ({error})"}
        plain = Plain(given)
        return plain, {"kind": plain.kind, "torch": ""}
    if given["gpu"] and not torch.cuda.is_available():
        return None, {"problem": f"torch {torch.__version__} of {sys.executable} finds no GPU that it could use"}
    try:
        device = Torch(given)
    except RuntimeError as error:
        return None, {"wrong": refusal(error)}
    return device, {"kind": device.kind, "torch": torch.__version__}


def main() -> None:
    """Runs the requested checks until standard input ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent process
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not break the lines
    device, line = make(json.loads(sys.argv[1]))
    print(json.dumps(line), file=out, flush=True)
    if device is None:
        return
    for asked in sys.stdin:
        try:
            line = getattr(device, asked.strip())()
        except RuntimeError as error:
            line = {"value": 0.0, "unit": "", "wrong": refusal(error)}
        print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main()
