"""Three teams on six nodes, each with its queue: trainings that grow, shrink and make room, and lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.local.privateredis import PrivateRedis
from tests.e2e.bare import Bare, bare
from tests.e2e.conftest import FAILED
from tests.e2e.support import check_complete, check_steps, digits_job, read_steps
from tests.e2e.test_graceful import check_no_step_lost

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

STEPS = {"wide": 600, "fixed": 400, "bee": 250, "sea": 60, "tall": 250}


@pytest.fixture
def six(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bare]:
    """Nodes that run one worker each."""
    with PrivateRedis(tmp_path / "redis") as server, bare({"url": server.url}) as one:
        for i in range(1, 7):
            one.start_agent(f"n{i}", slots=1, lease=10.0)  # nine trainings at once starve a small machine
        one.until_ready()
        yield one
        if request.node.stash.get(FAILED, False):
            print(one.state())


def submit(six: Bare, name: str, queue: str, nodes: str) -> None:
    """A training that saves when it is asked to leave, and else never."""
    text = digits_job(six.work, name, nodes=nodes, steps=STEPS[name], delay=0.2, workers=1)
    six.submit(text.replace('"--ckpt-every", "5"', '"--ckpt-every", "10000"') + f"queue: {queue}\n")


def test_three_teams_share_six_nodes(six: Bare, reference: dict[int, float], record_property: Any) -> None:
    for queue in "abc":
        six.ctl("queue", "create", queue)
    submit(six, "wide", "a", "{min: 1, max: 6, target: auto}")
    six.until_running("wide", 6, limit=90)
    submit(six, "fixed", "a", "3")
    six.until_running("fixed", 3)
    six.until_running("wide", 3)
    submit(six, "bee", "b", "2")
    six.until_running("bee", 2)
    six.until_running("wide", 1)
    submit(six, "sea", "c", "2")
    six.until_running("sea", 2, limit=120)
    held = six.job("fixed")
    assert held["phase"] == "holding"
    assert held["generations"][-1]["ended_by"]["text"] == "job sea of queue c is entitled to its nodes"
    for name in ("sea", "bee", "fixed", "wide"):
        six.until_phase(name, "succeeded", 240)
    for name in ("wide", "fixed", "bee", "sea"):
        rows, job = read_steps(six.work, name), six.job(name)
        check_steps(rows, reference)
        check_complete(rows, STEPS[name])
        check_no_step_lost(rows, record_property, job)
        assert job["budget"]["used"] == 0, name


def test_a_gang_of_roles_gets_what_its_queue_is_guaranteed(
    six: Bare, reference: dict[int, float], record_property: Any
) -> None:
    """Two servers and two trainers, each on a node of its own: the training that has all six gives back four."""
    six.ctl("queue", "create", "a")
    six.ctl("queue", "create", "b", "guarantee.nodes=4")
    submit(six, "tall", "a", "{min: 1, max: 6}")
    first = six.until_running("tall", 6, limit=90)  # where a node was ready late it has grown: a restart, too
    role = "workers_per_node: 1, gpus_per_worker: 0"
    six.submit(f"""\
name: gang
queue: b
working_dir: {six.work}
completes: trainer
roles:
  server: {{command: [sleep, "600"], nodes: 2, {role}}}
  trainer: {{command: [sleep, "5"], nodes: 2, after: server, {role}}}
""")
    six.until_running("gang", 4)
    six.until_running("tall", 2)
    six.until_phase("gang", "succeeded", 60)
    six.until_running("tall", 6)
    six.until_phase("tall", "succeeded", 240)
    rows, job = read_steps(six.work, "tall"), six.job("tall")
    check_steps(rows, reference)
    check_complete(rows, STEPS["tall"])
    check_no_step_lost(rows, record_property, job)
    assert (job["budget"]["used"], job["restarts"]) == (0, first["restarts"] + 2)
    assert six.job("gang")["generation"] == 1
