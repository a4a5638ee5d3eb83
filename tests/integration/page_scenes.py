"""Clusters for the status page to show: in trouble of each kind, with words that would like to be markup."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nodeagent.model.health import Verdict
from nodeagent.model.job import BudgetEntry
from nodeagent.model.node import Cordon, Gpu
from nodeagent.model.usage import UsageDay, UsageRow
from nodeagent.model.world import Cause
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec

MARKUP = '<img src=x onerror="document.title=`owned`"><script>document.title="owned"</script>'
"""Written as a reason, it stays text."""


def gpus(node: str, sick: int | None = None) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            uuid=f"GPU-{node}-{index}", index=index, name="NVIDIA H100 80GB HBM3", healthy=index != sick,
            why="" if index != sick else "fell off the bus (xid.79)",
        )
        for index in range(8)
    )  # fmt: skip


def used() -> dict[str, UsageDay]:
    """Of the last days, by three queues."""
    today, days = int(time.time() // 86400), dict[str, UsageDay]()
    for ago in range(14):
        hours = {"1000 prod": 300 + 40 * (ago % 4), "1001 research": 20 * ago, f"1001 {MARKUP}": 90 if ago == 3 else 0}
        rows = {
            key: UsageRow(gpu_ms=n * 3_600_000, lost_gpu_ms=n * 36_000, jobs=1) for key, n in hours.items() if n
        }  # fmt: skip
        days[str(today - ago)] = UsageDay(day=today - ago, rows=rows, rev=1)
    return days


async def busy(folder: Path) -> FakeView:
    """Four nodes with a sick GPU, a cordon and a silence; a job that was hit again and again, one that waits for
    nodes, one that is over."""
    view = FakeView(folder, names=("n1", "n2", "n3", "n4"))
    lost = Verdict(
        rule="xid.79", device="GPU-n2-5", severity="fatal", action="reboot", text="fell off the bus", since=time.time(),
        seen=time.time(),
    )  # fmt: skip
    for name in view.names:
        sick: dict[str, Any] = {"gpus": gpus(name, 5 if name == "n2" else None)}
        view.unlike[name] = sick | ({"health": (lost,)} if name == "n2" else {})
    view.usage = used()
    await view.join()
    await submit_one(view.store, "u1", spec("resnet50", low=2, high=3, target=3), 1000, time.time(), "alice", "r1")
    await submit_one(view.store, "u2", spec("llama-8b", low=4, high=8, target=8), 1000, time.time(), "bob", "r2")
    await submit_one(view.store, "u3", spec("smoke", low=1, high=1, target=1), 1000, time.time(), "alice", "r3")
    await view.refresh()
    await view.form(view.job("smoke"), 1)
    await view.refresh()
    await view.succeed(view.job("smoke"))
    await view.form(view.job("resnet50"), 3)
    await view.refresh()
    for kind, node, text in (
        ("worker_failed", "n2", "rank 3 on n2 failed first: exit code 1 (CUDA error: out of memory)"),
        ("hardware", "n2", "GPU 5 of n2 is unfit: fell off the bus (xid.79)"),
        ("node_lost", "n3", f"n3 has not renewed its lease {MARKUP}"),
        ("join", "", "n3 came back"),
    ):
        fault = BudgetEntry(
            at=view.cluster().served, wall=time.time(), kind=kind, counts=kind == "worker_failed", node=node, text=text
        )
        await view.form(
            view.job("resnet50"), 3, Cause.model_validate({"kind": kind, "text": text, "node": node}), fault
        )
        await view.refresh()
    await view.store.cordon("n4", Cordon(reason=f"fan replaced {MARKUP}", by="carol", at=time.time()), "r9")
    view.reasons = ("needs 4 nodes, 3 fit: n4 is cordoned (fan replaced on Monday)",)
    await view.refresh()
    return view
