"""The last step is one and the same for all ranks, however the moments fall, and no rank waits for ever."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.train.leaving import AgreementError, LastStep, come, highest_of_all, wait_for

BOUND = 20.0


class MemoryStore:
    """A store for threads, as torch's: compare_set sets a missing key if "" was expected, and answers what is there."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def add(self, key: str, amount: int, /) -> int:
        with self._changed:
            self._values[key] = str(int(self._values.get(key, "0")) + amount)
            return int(self._values[key])

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        with self._changed:
            return self._values[key].encode()

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._changed:
            if self._values.get(key, "") == expected:
                self._values[key] = desired
            return self._values[key].encode()

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(k in self._values for k in keys), timeout.total_seconds()):
                raise RuntimeError(f"wait timeout after {timeout}")


class Steps:
    """Synchronous training: step k ends on a rank only when all have begun it, or (``lead``) when the slowest is not
    further behind than the host of a device may be."""

    def __init__(self, world: int, lead: int) -> None:
        self.begun = [0] * world
        self.lead = lead
        self.changed = threading.Condition()

    def make(self, rank: int, step: int) -> bool:
        with self.changed:
            self.begun[rank] = step
            self.changed.notify_all()
            return self.changed.wait_for(lambda: min(self.begun) >= step - self.lead, BOUND)


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_all_ranks_leave_after_the_same_step(
    world: int, lead: int, reported: list[tuple[int, int]], slow: list[int]
) -> None:
    """Each rank is told to leave at another step (or before the first), at another moment in it, while its main thread
    may sit in a collective; ranks are slow and, with a device, hosts run ahead."""
    store, training = MemoryStore(), Steps(world, lead)
    lasts = [LastStep(lambda mine: highest_of_all(store, world, mine, BOUND), BOUND) for _ in range(world)]
    left: dict[int, int] = {}
    stuck: list[int] = []

    def stopper(rank: int) -> None:
        step, late = reported[rank]
        with training.changed:  # told when it has begun that step, or when nobody can come so far any more
            training.changed.wait_for(lambda: training.begun[rank] >= step or any(x.is_set() for x in going), BOUND)
        going[rank].set()
        with training.changed:
            training.changed.notify_all()
        time.sleep(late * 0.0005)
        lasts[rank].stop()

    def trainer(rank: int) -> None:
        done = 0
        while not lasts[rank].at(done):
            time.sleep(slow[rank] * 0.0003)
            if not training.make(rank, done + 1):
                stuck.append(rank)
                return
            done += 1
        left[rank] = done

    going = [threading.Event() for _ in range(world)]
    threads = [threading.Thread(target=f, args=(r,), daemon=True) for r in range(world) for f in (stopper, trainer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert not any(t.is_alive() for t in threads)
    assert not stuck, "a collective waited for a rank that never came"
    assert len(left) == world
    assert len(set(left.values())) == 1, f"ranks left after different steps: {left}"
    assert set(left.values()) == {max(training.begun)}, "every step that was begun was finished, and none is lost"


def test_nothing_is_asked_of_the_store_before_it_is_time() -> None:
    def never(_mine: int) -> int:
        raise AssertionError("asked")

    last = LastStep(never, BOUND)
    assert [last.at(done) for done in range(1000)] == [False] * 1000


def test_a_script_that_looks_only_each_tenth_step_leaves_there() -> None:
    last = LastStep(lambda mine: mine, BOUND)
    assert not last.at(10)
    last.stop()
    assert last.at(20)


def asked(last: LastStep) -> threading.Thread:
    """The thread that asks a rank to leave, as far as it can come before the rank's next step."""
    stopper, end = threading.Thread(target=last.stop), time.monotonic() + BOUND
    stopper.start()
    while not last._stopping:
        assert time.monotonic() < end
        time.sleep(0.001)
    return stopper


def test_a_rank_that_was_reported_before_its_first_step_has_begun_none() -> None:
    answer: list[int] = []

    def highest(mine: int) -> int:
        answer.append(mine)
        return mine

    last = LastStep(highest, BOUND)
    stopper = asked(last)
    assert last.at(7)
    stopper.join(BOUND)
    assert answer == [7]


def test_ranks_that_cannot_agree_say_why() -> None:
    def lost(_mine: int) -> int:
        raise RuntimeError("the store is gone")

    last = LastStep(lost, BOUND)
    assert not last.at(3)
    last.stop()
    with pytest.raises(AgreementError, match="RuntimeError: the store is gone"):
        last.at(4)


def test_a_rank_waits_for_the_others_only_so_long() -> None:
    store = MemoryStore()
    last = LastStep(lambda mine: highest_of_all(store, 2, mine, BOUND), 0.1)
    assert not last.at(3)
    stopper = asked(last)
    with pytest.raises(AgreementError, match=r"did not report their step within 0\.1 s"):
        last.at(4)
    come(store, "published", 2)  # the other rank, too late
    stopper.join(BOUND)


@pytest.mark.torch
def test_torchs_own_store_does_as_this_one() -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.PrefixStore("p", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    found: list[int] = []

    def rank(store: object, mine: int) -> None:
        found.append(highest_of_all(store, 3, mine, BOUND))  # type: ignore[arg-type]

    threads = [threading.Thread(target=rank, args=(store.clone(), mine)) for mine in (41, 43, 42)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert found == [43, 43, 43]
    come(store, "saved", 1)
    wait_for(store, "saved", BOUND)
