"""What a pod has to say of its generation."""

from __future__ import annotations

from nodeagent.model.pod import WorkerState
from nodeagent.model.world import Token, WorkerExit
from nodeagent.plan.podreport import read_report
from nodeagent.workers.base import PodStatus
from tests.unit.plan.build import UID, make_exit

ENDED = (WorkerState(rank=0, local_rank=0, pid=7, state="exited", exit=0),)


def test_read_report() -> None:
    two = (*ENDED, WorkerState(rank=1, local_rank=1, pid=8, state="running"))
    done, crash, killed = make_exit(code=0), make_exit(1, code=7), make_exit(0, signal=15, stopped=True)

    def said(exits: tuple[WorkerExit, ...], workers: tuple[WorkerState, ...] = two, **more: object) -> str | None:
        fields = {"uid": UID, "phase": "running", "generation": Token(number=2, id="g2"), "workers": workers}
        report = read_report(PodStatus.model_validate({**fields, "exits": exits, **more}))
        return report.state if report is not None else None

    assert said(()) is None
    assert said((done,)) is None
    assert said((done,), ENDED) == "succeeded"
    assert said((done, make_exit(1, code=0))) == "succeeded"
    assert said((done, crash)) == "failed"
    assert said((killed,), ENDED) is None, "we stopped it: neither success nor failure"
    assert said((killed, crash)) == "failed"
    assert said((killed,), ENDED, fenced=True) == "fenced"
    assert said((), refused="hook failed") == "refused"
