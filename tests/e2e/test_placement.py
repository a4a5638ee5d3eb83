"""Where real jobs run that ask something of their nodes, and what a person is told."""

from __future__ import annotations

import pytest

from tests.e2e.support import Cluster, check_steps, digits_job, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 4
CHOOSY = 'placement: {exclude: {node: n1}, prefer: {node: "n[3-4]"}}\n'


def members(cluster: Cluster, job: str) -> list[str]:
    return [pod["node"] for pod in cluster.job(job)["pods"] if pod["generation"] == cluster.job(job)["generation"]]


def test_a_job_runs_where_it_prefers_and_never_where_it_must_not(calm: Cluster, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "choosy", nodes="2", steps=600, delay=0.1, workers=1, more=CHOOSY))
    first = calm.until_running("choosy", 2)
    assert sorted(members(calm, "choosy")) == ["n3", "n4"]
    output = calm.ctl("describe", "choosy").stdout
    assert "Placement:   without node=n1; prefers node=n[3-4]\n" in output
    calm.until_steps("choosy", 10)
    calm.ctl("drain", "n4", "--reason", "a test")
    calm.until_running("choosy", 2, above=first["generation"])
    assert sorted(members(calm, "choosy")) == ["n2", "n3"], "n1 is free as well, and is ruled out"
    calm.until_steps("choosy", 10)
    assert "n1" not in calm.job("choosy")["outside"]
    calm.ctl("stop", "choosy")
    check_steps(read_steps(calm.work, "choosy"), reference)


def test_who_asks_for_what_there_is_not_learns_it_at_once(calm: Cluster) -> None:
    needs = "needs 2 nodes with gpu=h100: none of the 4 known nodes is such"
    done = calm.submit(
        digits_job(calm.work, "never", nodes="2", steps=5, more="placement: {require: {gpu: h100}}\n")
    )  # fmt: skip
    assert f"job/never waits until nodes come that will do: {needs}\n" in done.stderr
    assert calm.job("never")["why"][0] == needs
    calm.ctl("stop", "never")
