"""``get`` and ``describe``, letter by letter. After a wanted change: REWRITE_GOLDEN=1 pytest, then read the diff."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeagent.ctl import get, nodes, queue, usage
from nodeagent.ctl.describe import node_lines
from nodeagent.ctl.jobtext import job_lines
from nodeagent.ctl.output import table_lines
from nodeagent.model.constraints import Match
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.failsafe import silence
from tests.unit.api.fakes import spec
from tests.unit.ctl import samples

GOLDEN = Path(__file__).parent / "golden"
FAILED = samples.FAILED.model_copy(
    update={"generation": samples.generation(1, state="ended", cause=samples.START, reports=samples.ENDED_PODS)},
)
QUEUED = samples.job(
    "queued", generation=None, active=None, budget={}, failsafe_members={}, restarts=0, started=None, first_active=None,
    ran=0, reason="needs 2 nodes, 1 fits"
)  # fmt: skip
H100 = Match(label="gpu", values=("h100",))
PLACED = samples.asking(samples.job(), require=(H100,), avoid=(Match(label="spot"),))
UNMET = samples.asking(QUEUED, require=(Match(label="gpu", values=("b200",)),))
JOBS = [samples.listed(job) for job in (samples.job(), FAILED, QUEUED)]


def jobs(rows: list[dict[str, Any]], width: int | None = None) -> list[str]:
    """``get`` of these jobs."""
    return table_lines([c for c in get.columns(rows) if not c.wide], rows, width)


CASES: dict[str, Callable[[], list[str]]] = {
    "get": lambda: jobs(JOBS[:2]),
    "get-waiting-80-columns": lambda: jobs(samples.shown_line(), 80),
    "get-waiting-60-columns": lambda: jobs(samples.shown_line(), 60),
    "nodes-60-columns": lambda: table_lines(
        [c for c in nodes.COLUMNS if not c.wide], [samples.shown_node(n) for n in ("n1", "n2", "n3", "n4")], 60
    ),
    "describe-running-60-columns": lambda: job_lines(samples.detail(samples.job()), width=60),
    "describe-limits-80-columns": lambda: job_lines(
        samples.detail(samples.job()) | {"limits": samples.LIMITS}, width=80
    ),
    "get-wide": lambda: table_lines(get.columns(JOBS), JOBS),
    "nodes": lambda: table_lines(
        [c for c in nodes.COLUMNS if not c.wide], [samples.shown_node(n) for n in ("n1", "n2", "n3", "n4")]
    ),
    "describe-running": lambda: job_lines(samples.detail(samples.job())),
    "describe-roles": lambda: job_lines(samples.detail(samples.ROLES)),
    "describe-guessed": lambda: job_lines(
        samples.detail(samples.job(spec=spec(preload=("my.data",), guessed=("torch", "transformers"))))
    )[:8],
    "describe-failed": lambda: job_lines(samples.detail(FAILED)),
    "describe-holding": lambda: job_lines(
        samples.detail(samples.HOLDING, ("needs 2 nodes, 1 fits: n3 is cordoned (bad disk)",))
    ),
    "describe-silent-failsafe-members": lambda: job_lines(
        samples.detail(samples.SILENT, (silence(samples.cluster(samples.SILENT), samples.SILENT),))
    ),
    "describe-left": lambda: job_lines(samples.detail(samples.LEFT)),
    "describe-limited-member": lambda: job_lines(samples.detail(samples.MEMBER)),
    "describe-queued": lambda: job_lines(samples.detail(QUEUED, ("needs 2 nodes, 1 fits",))),
    "describe-placed": lambda: job_lines(samples.detail(PLACED, shown=samples.racked(PLACED))),
    "describe-unmet": lambda: job_lines(
        samples.detail(UNMET, explain(samples.racked(UNMET), UNMET, samples.NOW), samples.racked(UNMET))
    ),
    "describe-node": lambda: node_lines(samples.shown_node("n2")),
    "describe-restarting-node": lambda: node_lines(samples.restarting_node("n2")),
    "describe-mute-node": lambda: node_lines(samples.mute_node("n2"), width=80),
    "nodes-mute-80-columns": lambda: table_lines(
        [c for c in nodes.COLUMNS if not c.wide], [samples.mute_node("n2"), samples.shown_node("n3")], 80
    ),
    "describe-holding-node": lambda: node_lines(samples.holding_node()),
    "nodes-holding": lambda: table_lines([c for c in nodes.COLUMNS if not c.wide], [samples.holding_node()]),
    "describe-cordoned-node": lambda: node_lines(samples.shown_node("n3")),
    "describe-sick-node": lambda: node_lines(samples.sick_node()),
    "describe-repairing-node": lambda: node_lines(samples.repairing_node()),
    "nodes-repairing": lambda: table_lines(nodes.COLUMNS, [samples.repairing_node()]),
    "nodes-sick": lambda: table_lines([c for c in nodes.COLUMNS if not c.wide], [samples.sick_node()]),
    "describe-used": lambda: job_lines(samples.detail(samples.USED)),
    "usage-80-columns": lambda: table_lines([c for c in usage.columns("user") if not c.wide], samples.USAGE, 80),
    "usage-wide": lambda: table_lines(usage.columns("job"), samples.USAGE),
    "describe-lost-node": lambda: node_lines(samples.shown_node("n4")),
    "queues-80-columns": lambda: table_lines([c for c in queue.COLUMNS if not c.wide], samples.shown_queues(), 80),
    "queues-wide": lambda: table_lines(queue.COLUMNS, samples.shown_queues()),
    "describe-queue-80-columns": lambda: queue.queue_lines(samples.queue_detail(), 80),
    "describe-queue-60-columns": lambda: queue.queue_lines(samples.queue_detail(), 60),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    text = "\n".join(CASES[name]()) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
