"""Several nodes write their snapshots out together: who chooses what, what is written, and what comes of what fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nodeagent.train.folder import MARKER, CheckpointEntry, entries, mark_committed, read_manifest, talk_folder
from nodeagent.train.memory import Header, SharedBuffer, size_of
from nodeagent.train.writeout import WriteOrder, WriteOutError, write_out
from tests.unit.train.helpers import memories

BOUND = 20.0


def kept(rank: int, step: int, *, world: int = 4, shared: bool = False, generation: int = 3) -> SharedBuffer:
    memory = SharedBuffer.of_size(size_of(64, 0))
    memories.append(memory)
    memory.map[4096:] = bytes([rank]) * 64
    memory.seal(Header(generation, step, rank, world, shared, 64, 0, 0, 0))
    return memory


class Gang:
    """Nodes of two ranks each; what is asked to be committed, and what is said to it."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder, self.nodes = folder, nodes
        self.asked: list[CheckpointEntry] = []
        self.answer: Callable[[CheckpointEntry], str] = lambda _: ""

    def order(self, node: int, kept: list[SharedBuffer], seconds: float = BOUND, stays: bool = False) -> WriteOrder:
        found = [(i // 2, i % 2, memory.fd) for i, memory in enumerate(kept)]
        ranks = (node * 2, node * 2 + 1)
        until = time.monotonic() + seconds
        return WriteOrder(
            str(self.folder), 3, "ab", node, self.nodes, ranks, self.nodes * 2, found, (0, 0), stays, until
        )  # fmt: skip

    def commit(self, entry: CheckpointEntry) -> str:
        self.asked.append(entry)
        return self.answer(entry)

    def run(self, *orders: WriteOrder) -> list[str]:
        """Each node's word, or the error's text."""

        def one(order: WriteOrder) -> str:
            try:
                return write_out(order, self.commit)
            except WriteOutError as error:
                return f"failed: {error}"

        with ThreadPoolExecutor(len(orders)) as threads:
            return list(threads.map(one, orders))

    def files(self) -> list[str]:
        (entry,) = entries(self.folder)
        return sorted(read_manifest(self.folder / entry.name))


def parts(*ranks: int) -> list[str]:
    return [f"rank-{rank:05d}.snapshot" for rank in ranks]


def test_all_parts_of_the_newest_step_that_every_rank_has(tmp_path: Path) -> None:
    gang = Gang(tmp_path)
    mine = [kept(0, 7), kept(0, 8), kept(1, 7), kept(1, 8)]
    others = [kept(2, 7), kept(2, 8), kept(3, 7), kept(3, 6)]
    output = gang.run(gang.order(0, mine), gang.order(1, others))
    assert output[0].startswith("snapshot of step 7 written out in")
    assert output[1].startswith("part of the snapshot of step 7 written out in")
    assert gang.asked == entries(tmp_path) == [CheckpointEntry(1, 7, 3, True)]
    assert gang.files() == parts(0, 1, 2, 3)
    for rank in range(4):
        assert (tmp_path / gang.asked[0].name / f"rank-{rank:05d}.snapshot").read_bytes()[4096:] == bytes([rank]) * 64
    assert [path.name for path in tmp_path.iterdir()] == [gang.asked[0].name], "nothing else is left"


def test_of_what_all_ranks_share_one_copy_of_the_newest(tmp_path: Path) -> None:
    gang = Gang(tmp_path)
    output = gang.run(gang.order(0, [kept(0, 7, shared=True)]), gang.order(1, [kept(3, 8, shared=True)]))
    assert [text.partition(" written")[0] for text in output] == [
        "snapshot of step 8",
        "part of the snapshot of step 8",
    ]
    assert gang.files() == parts(3)


def test_parts_of_which_one_is_missing_are_not_written(tmp_path: Path) -> None:
    gang = Gang(tmp_path)
    assert gang.run(gang.order(0, [kept(0, 7), kept(1, 7)]), gang.order(1, [kept(2, 7)])) == ["", ""]
    assert (gang.asked, list(tmp_path.iterdir())) == ([], [])


def test_a_node_that_has_nothing_to_say_is_waited_for_only_so_long(tmp_path: Path) -> None:
    """The first of the gang came without a snapshot, so its shim starts no helper."""
    gang = Gang(tmp_path)
    order = gang.order(1, [kept(2, 7, shared=True)])
    began = time.monotonic()
    assert gang.run(order)[0].startswith("snapshot of step 7 written out")
    assert 3 <= time.monotonic() - began < BOUND
    # parts: half of the time
    assert gang.run(gang.order(1, [kept(2, 9), kept(3, 9)], seconds=0.4)) == [""]
    assert [e.step for e in entries(tmp_path)] == [7]


def test_what_is_not_newer_than_what_the_job_committed_is_left(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 1)
    orders = [gang.order(0, [kept(0, 20, world=2, shared=True)])._replace(since=(3, step)) for step in (20, 19)]
    assert [gang.run(order)[0].partition(" written")[0] for order in orders] == ["", "snapshot of step 20"]


def test_what_another_job_committed_in_this_folder_does_not_count(tmp_path: Path) -> None:
    """Its generations had the same numbers."""
    gang = Gang(tmp_path, 1)
    done = CheckpointEntry(5, 800, 3)
    (tmp_path / done.name).mkdir()
    mark_committed(tmp_path / done.name)
    order = gang.order(0, [kept(0, 7, world=2, shared=True)])
    assert gang.run(order)[0].startswith("snapshot of step 7 written out")
    assert entries(tmp_path) == [CheckpointEntry(6, 7, 3, True), done]


def test_where_others_stay_only_parts_are_written(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 1)
    assert gang.run(gang.order(0, [kept(0, 7, world=2, shared=True)], stays=True)) == [""]
    assert gang.run(gang.order(0, [kept(0, 7, world=2), kept(1, 7, world=2)], stays=True))[0]
    assert gang.files() == parts(0, 1)


def test_a_generation_that_is_not_the_newest_any_more_leaves_nothing(tmp_path: Path) -> None:
    """It froze between writing and committing, and thaws when a newer one has gone on."""
    gang = Gang(tmp_path, 1)
    newer = CheckpointEntry(2, 9, 4)

    def refuse(entry: CheckpointEntry) -> str:
        (tmp_path / newer.name).mkdir()
        mark_committed(tmp_path / newer.name)
        return "generation 3 may commit nothing any more"

    gang.answer = refuse
    output = gang.run(gang.order(0, [kept(0, 7, world=2, shared=True)]))
    assert output == ["failed: generation 3 may commit nothing any more"]
    assert entries(tmp_path) == [newer]


def test_what_the_store_may_have_taken_is_left(tmp_path: Path) -> None:
    gang = Gang(tmp_path, nodes=1)

    def silent(entry: CheckpointEntry) -> str:
        raise WriteOutError("the store did not take it within the grace")

    gang.answer = silent
    order = gang.order(0, [kept(0, 7, world=2), kept(0, 8, world=2), kept(1, 7, world=2), kept(1, 8, world=2)])
    assert gang.run(order) == ["failed: the store did not take it within the grace"]
    assert gang.files() == parts(0, 1)
    (entry,) = gang.asked
    assert [path.name for path in tmp_path.iterdir()] == [entry.name], "whole, and not marked as committed"
    assert not (tmp_path / entry.name / MARKER).exists()


def test_a_node_that_cannot_write_is_named_by_the_one_that_would_commit(tmp_path: Path) -> None:
    gang = Gang(tmp_path)
    torn = kept(2, 7)

    order = gang.order(1, [torn, kept(3, 7)])
    first = gang.order(0, [kept(0, 7), kept(1, 7)])
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(gang.run, order)
        offered = talk_folder(tmp_path, 3, "ab") / "offers-1"
        end = time.monotonic() + BOUND
        while not offered.exists():
            assert time.monotonic() < end
            time.sleep(0.005)
        torn.unseal()
        output = [*gang.run(first), *second.result()]
    assert output == [f"failed: {who}rank 2 took another snapshot meanwhile" for who in ("node 1 of the gang: ", "")]
    assert (gang.asked, entries(tmp_path)) == ([], [])


def test_the_end_of_its_time_ends_it(tmp_path: Path) -> None:
    gang = Gang(tmp_path)
    (output,) = gang.run(gang.order(1, [kept(2, 7, shared=True)], seconds=0.1))
    assert output == "failed: what the other nodes have in memory did not come within the grace"
    (output,) = gang.run(gang.order(0, [kept(0, 7)])._replace(folder=str(tmp_path / "none")))
    assert output.endswith("No such file or directory")
