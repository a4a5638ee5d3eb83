"""What ``describe`` says of a job that has ended, and of its restarts."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.api.serializers import budget_entry_json
from nodeagent.ctl.jobtext import _budget, blame_lines, job_lines
from nodeagent.model.job import Phase
from tests.unit.ctl import samples

SPENT = budget_entry_json(1, samples.SPEND)
NEVER_RAN: dict[str, Any] = {
    "generation": None, "active": None, "budget": {}, "failsafe_members": {}, "started": None, "first_active": None,
    "outcome": None, "reason": "no node can run it: n1 cannot run it: no command 'pyton'",
}  # fmt: skip


def test_the_output_of_a_job_that_never_ran_is_nobodys_next_step() -> None:
    last = job_lines(samples.detail(samples.job("failed", **NEVER_RAN)))[-1]
    assert (
        last == "Next:        correct what Why says, then submit it again; no worker of it ran, so there is no output"
    )
    assert "nodeagentctl logs digits --tail 50" in job_lines(samples.detail(samples.FAILED))[-1]


def test_what_a_login_shell_printed_of_modules_is_no_workers() -> None:
    outcome = {"code": 1, "text": "no node can run it", "error": "Unable to locate foo/1"}
    lines = job_lines(samples.detail(samples.job("failed", **NEVER_RAN | {"outcome": outcome})))
    assert lines[lines.index("What was printed about it:") + 1].strip() == "Unable to locate foo/1"


@pytest.mark.parametrize(
    ("most", "used", "says"),
    [
        (10, 0, "0 of 10 restarts spent within 1h; 10 left"),
        (10, 10, "10 of 10 restarts spent within 1h; 0 left"),
        (10, 11, "10 of 10 restarts spent within 1h; 11 faults needed one"),
        (0, 0, "no restart is allowed"),
        (0, 1, "no restart is allowed; 1 fault needed one"),
    ],
)
def test_restarts_that_are_left(most: int, used: int, says: str) -> None:
    assert _budget({"max": most, "used": used, "left": max(0, most - used), "window": 3600.0}) == says


def test_where_no_restart_is_allowed_none_is_spent() -> None:
    job = samples.detail(samples.FAILED)
    assert "(the job was not started again)" in blame_lines(job)[0]
    goes_on = job | {"phase": "running"}
    assert "(spent one restart of the budget)" in blame_lines(goes_on)[0]
    assert "(spent no restart)" in blame_lines(goes_on | {"budget": job["budget"] | {"max": 0, "used": 0}})[0]
    over = job | {"budget": job["budget"] | {"max": 1, "used": 2}}
    assert "(needed a restart, and none was left)" in blame_lines(over)[0]


def test_nodes_that_are_left_out_are_named_once_and_only_while_the_job_may_use_them() -> None:
    outside = {"n3": "n3 is cordoned (bad disk)", "n4": "checkpoint_dir /c there is not the folder that n1 sees"}
    generation = samples.generation(outside=outside)
    lines = job_lines(samples.detail(samples.job(generation=generation)))
    at = lines.index("Left out when generation 2 was formed:")
    assert lines[at + 1 : at + 3] == ["  n3: is cordoned (bad disk)", f"  n4: {outside['n4']}"]
    assert "Left out" not in "".join(
        job_lines(samples.detail(samples.FAILED.model_copy(update={"generation": generation})))
    )


def test_who_has_not_run_ran_for_no_time() -> None:
    (age,) = [line for line in job_lines(samples.detail(samples.job("failed", **NEVER_RAN))) if line.startswith("Age")]
    assert age == "Age:         1h1m; has not run; restarted once"


def test_where_a_shim_was_killed_the_jobs_own_code_is_looked_at() -> None:
    """Next was to correct what the output says, of which there was none; or nothing was wrong."""
    text = "the pod died on n2: its shim was killed by SIGTERM (15), not by nodeagent"
    died = {"kind": "pod_failed", "text": text, "node": "n2", "rank": None, "exit": None, "error": ""}
    look = (
        "see what ended the shim, a Python process of the job's user, on n2: often the job's own code (pkill python, "
        "killall, kill -1), or the kernel for lack of memory (journalctl -k)"
    )

    def step(job: dict[str, Any], **end: Any) -> str:
        rows = [*job["generations"][:-1], job["generations"][-1] | {"ended_by": SPENT | died | end}]
        return job_lines(job | {"generations": rows})[-1].removeprefix("Next:").strip()

    failed, runs = samples.detail(samples.FAILED), samples.detail(samples.job())
    assert step(failed) == f"{look}; then submit it again"
    assert step(runs) == f"if its pod dies again, {look}. Follow it: nodeagentctl logs digits -f"
    held_up = (
        "see what kept the shim on n2 from running (it was stopped by a signal or a debugger, throttled by a cgroup, "
        "or the node is overloaded): the agent killed it since it did not answer"
    )
    for silence in ("the shim stopped answering for 2 s and was killed", "its shim does not read what it is sent"):
        silent = f"the pod died on n2: {silence}"
        assert step(failed, text=silent) == f"{held_up}; then submit it again"
        assert step(runs, text=silent) == f"if its pod dies again, {held_up}. Follow it: nodeagentctl logs digits -f"
    refused = "the pod could not start on n2: hook pre_start failed"
    assert "nodeagentctl logs digits --tail 50" in step(failed, text=refused)
    assert "nodeagentctl logs digits --tail 50" in step(failed, kind="worker_failed")


@pytest.mark.parametrize("phase", ["running", "queued", "holding", "forming", "paused"])
def test_of_a_job_whose_record_is_refused_nobody_says_that_nothing_is_wrong(phase: Phase) -> None:
    """Somebody wrote the record of a stopped job back as running: Next was to follow its output."""
    last = job_lines(samples.detail(samples.job(phase)) | {"refused": True})[-1]
    assert last == "Next:        do what Why says: the agent that was asked does not act on the job's record as it is"


def test_where_job_after_job_fails_the_node_is_looked_at_too() -> None:
    """Next was to correct the job alone, which had been given a broken node, the only free one."""
    last = job_lines(samples.detail(samples.FAILED) | {"failing_node": "n2"})[-1]
    assert last == (
        "Next:        see whether it is the job's fault (nodeagentctl logs digits --tail 50) or that of n2, where job "
        "after job fails at its start (nodeagentctl diag n2; nodeagentctl cordon n2 --reason TEXT); then submit it "
        "again"
    )
