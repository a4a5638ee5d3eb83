"""What makes forks fast. In the fork server: a step of a small network, so that a worker forked on demand finds the
code of its first one ready too; and large pages, so that a fork copies and an end frees few of them. In a pre-forked
worker: a little of what a training does first, so that its first forward, backward, checkpoint and collective find
their code, kernels and memory touched.

Loaded by ``server.py`` in the job's Python (3.8 or later): standard library, and frameworks only if they have been
preloaded. Must leave nothing that a fresh worker would not have: no thread, group, socket, variable, hook or device.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

BOUND = timedelta(seconds=10)
"""For the process group of one."""
THREADS_END = 1.0
"""Seconds until the group's threads must be gone."""


HUGE = 1 << 21
AT_ONCE = 8 * HUGE
"""Each call has all processors answer once, which takes a while where they are busy."""
MADV_COLLAPSE = 25
HUGE_BOUND = 1.0
"""Seconds of collapsing at most: what is not done by then stays as it is."""


def huge_pages() -> None:
    """Put what has been imported on pages of 2 MiB, where the kernel can (Linux 6.1 or later). A worker with torch has
    50,000 small pages: forking it takes 7 ms of CPU, freeing them at its end 10, and that is what a recovery waits for;
    so it is 2 and 5. Before the first fork only: a page that is shared already would be copied."""
    madvise = ctypes.CDLL(None).madvise
    until = time.monotonic() + HUGE_BOUND
    with open("/proc/self/maps") as file:  # noqa: PTH123
        areas = [line.split() for line in file]
    for area in areas:
        if not area[1].startswith("rw") or (len(area) > 5 and area[5] != "[heap]"):
            continue
        start, end = (int(bound, 16) for bound in area[0].split("-"))
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        for at in range(start, end, AT_ONCE):
            if time.monotonic() > until:
                return
            # a page that cannot be collapsed stays as it is
            madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(AT_ONCE, end - at)), MADV_COLLAPSE)


def rehearse() -> None:
    """In the fork server itself. Raises whatever the framework does."""
    torch = sys.modules.get("torch")
    if torch is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compute(torch)


def warm_up() -> None:
    """In a pre-forked worker. Raises whatever the framework does."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    hook = sys.excepthook  # torch.distributed puts a rank in front of tracebacks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compute(torch)
            dist = sys.modules.get("torch.distributed")
            if dist is not None and dist.is_available() and dist.is_gloo_available():
                communicate(torch, dist)
    finally:
        sys.excepthook = hook


def compute(torch: Any) -> None:
    """A step of a small network, saved and loaded."""
    import traceback  # torch has it

    traceback.format_stack()  # as a seed is noted for each kind of device, by where it was set
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
    if not has_devices(torch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss.backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict()}, file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True)["model"])


def has_devices(torch: Any) -> bool:
    """Whether a backward pass would look for devices, and with it fix which ones this process sees: too early."""
    version = torch.version
    return any(getattr(version, name, None) for name in ("cuda", "hip", "xpu")) or "torch_npu" in sys.modules


def communicate(torch: Any, dist: Any) -> None:
    """An all-reduce among nobody, on the loopback interface: names are not looked up."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=BOUND)
        try:
            dist.all_reduce(torch.ones(4))
            dist.broadcast(torch.ones(4), 0)
        finally:
            dist.destroy_process_group()
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
    until = time.monotonic() + THREADS_END
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until:  # noqa: PTH208
        time.sleep(0.001)
