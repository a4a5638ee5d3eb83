"""Restarts are counted once in the cluster: while agents live, over their restarts, and what they missed."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from nodeagent.agent.metrics import Metrics, RestartCounter
from nodeagent.model.job import JobRecord
from tests.unit.plan.build import make_generation, make_job, spend


class Node:
    """An agent's counter that can be started anew."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path = name, folder / f"{name}.json"
        self.start()

    def start(self) -> None:
        written()
        self.metrics = Metrics()
        self.counter = RestartCounter(self.name, self.metrics, self.path)

    def look(self, *jobs: JobRecord) -> None:
        self.counter.look({job.uid: job for job in jobs})

    @property
    def counted(self) -> Mapping[tuple[str, str, str], float]:
        samples = [s for metric in self.metrics.restarts.collect() for s in metric.samples if s.name.endswith("_total")]
        return {(s.labels["job"], s.labels["node"], s.labels["cause"]): s.value for s in samples}


def written() -> None:
    """Waits for what is being written."""
    for thread in threading.enumerate():
        if thread.name == "restarts":
            thread.join(30)


def generations(*first: str, forming: bool = False) -> JobRecord:
    """A job after so many active generations, each ended by a worker of n9; ``first``: their nodes of group rank 0."""
    count = len(first)
    entries = {
        str(number): spend("worker_failed").model_copy(update={"counted_by": first[number - 1], "node": "n9"})
        for number in range(1, count + forming)
    }
    nodes = (first[-1], *(node for node in ("n1", "n2") if node != first[-1]))
    number = count + forming
    generation = make_generation(nodes, state="forming" if forming else "active", number=number, cause="worker_failed")
    generation = generation.model_copy(update={"cause": generation.cause.model_copy(update={"node": "n9"})})
    return make_job("running", generation, active=count, restarts=count - 1, budget=entries)


def total(*nodes: Node) -> float:
    return sum(sum(node.counted.values()) for node in nodes)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Node, Node]:
    return Node("n1", tmp_path), Node("n2", tmp_path)


def test_each_is_counted_once_by_the_agent_of_group_rank_0(two: tuple[Node, Node]) -> None:
    story = ("n1", "n1", "n2", "n1")
    for count in range(1, len(story) + 1):
        for node in two:
            node.look(generations(*story[:count]))
            node.look(generations(*story[:count], forming=True))
    label = ("a", "n9", "worker_failed")
    assert [dict(node.counted) for node in two] == [{label: 2}, {label: 1}]


@pytest.mark.parametrize("down", list(itertools.product([False, True], repeat=4)))
def test_what_an_agent_missed_it_counts_when_it_is_back(two: tuple[Node, Node], down: tuple[bool, ...]) -> None:
    """Whichever of the generations n1's agent does not see, being down, and however often it is started anew."""
    story = ("n1", "n1", "n2", "n1", "n2")
    for count in range(1, len(story) + 1):
        away = count > 1 and down[count - 2]
        for node in two:
            if node.name == "n1" and away:
                continue
            if node.name == "n1":
                node.start()
            node.look(generations(*story[:count]))
    two[0].start()
    for _ in range(2):
        for node in two:
            node.look(generations(*story))
    assert [sum(node.counted.values()) for node in two] == [2, 2]


def test_both_agents_down_through_all_of_it(two: tuple[Node, Node]) -> None:
    story = ("n2", "n1", "n2", "n1", "n1")
    for node in two:
        node.look(generations(*story, forming=True))
    assert total(*two) == 4


def test_a_file_that_is_lost_is_made_from_the_record(two: tuple[Node, Node]) -> None:
    story = ("n1", "n1", "n1", "n2")
    two[0].look(generations(*story[:3]))
    for damage in (two[0].path.unlink, lambda: two[0].path.write_text('{"version": 1, "jobs"')):
        written()
        damage()
        two[0].start()
        assert two[0].counted == {}
        two[0].look(generations(*story))
        assert total(two[0]) == 2


def test_a_pipe_in_the_place_of_the_file_holds_up_no_start(tmp_path: Path) -> None:
    node = Node("n1", tmp_path)
    os.mkfifo(node.path)
    node.start()
    assert node.counted == {}


def test_entries_that_the_record_no_longer_has_stay_counted(two: tuple[Node, Node]) -> None:
    story = ("n1",) * 6
    two[0].look(generations(*story))
    assert total(two[0]) == 5
    two[0].start()
    late = generations(*story, "n1")
    late = late.model_copy(update={"budget": {"5": late.budget["5"], "6": late.budget["6"]}})
    two[0].look(late)
    assert total(two[0]) == 6


def test_a_disk_that_hangs_does_not_hold_up_the_agent(tmp_path: Path) -> None:
    """Its loop stood still with the disk, and its beats with it. The newest count is written once the disk goes on."""
    node = Node("n1", tmp_path)
    draft = node.path.with_name(f"{node.path.name}.new")
    os.mkfifo(draft)  # who opens it to write waits for a reader

    def look() -> None:
        for count in (2, 3, 4):
            node.look(generations(*("n1",) * count))

    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    looks.join(30)
    hung, counted = looks.is_alive(), total(node)
    os.close(os.open(draft, os.O_RDONLY))
    assert (hung, counted) == (False, 3)
    node.start()
    assert total(node) == 3


def test_series_go_with_the_job(two: tuple[Node, Node]) -> None:
    two[0].look(generations("n1", "n1"))
    two[0].look()
    assert two[0].counted == {}
    two[0].start()
    assert two[0].counted == {}
