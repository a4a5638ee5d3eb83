"""A round: one training from its first step to its last under random faults, and what must be true afterwards."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from nodeagent.ctl.terminal import CtlError
from tests.e2e.support import ENDED, check_complete, check_steps, digits_job, read_steps, reference_losses
from tests.e2e.test_exact import STEPS_OF_PASS, bit_exact, check_images, learned, recording
from tests.soak.churn import Churn
from tests.soak.faults import FAULTS, Place, choose
from tests.soak.resources import Usage, grown, measure

PAUSE = (3.0, 15.0)
"""Seconds between two faults."""
TWO = 0.2
"""How often a second fault begins with the first."""
MOST_STEPS = 40 * STEPS_OF_PASS
REST = 90.0
"""Seconds in which a cluster that is left alone must come to rest."""
BUDGET = "restarts: {max: 60, window: 10m, backoff: 0s..2s}\n"


@dataclass
class Row:
    """What one round showed."""

    number: int
    size: str
    seconds: float = 0.0
    generations: int = 0
    steps: int = 0
    redone: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Those that hit something."""
    missed: Counter[str] = field(default_factory=Counter)
    """Those that found nothing to hit: no worker ran just then, or nobody answered."""
    small_jobs: Counter[str] = field(default_factory=Counter)
    figures: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Soak:
    """All rounds on one cluster. ``seconds``: about how long a round's training takes if nothing hits it."""

    def __init__(self, place: Place, seconds: float) -> None:
        self._place, self._one, self._seconds = place, place.one, seconds
        self._steps = STEPS_OF_PASS * max(6, min(40, int(seconds / 6)))
        self._churn = Churn(place.one, place.seed)
        self._base: Usage | None = None
        self._jobs = 0
        self._reference: dict[int, float] = {}
        self._weights = b""

    def prepare(self) -> None:
        """What an undisturbed run learns: losses of one plain process, and weights at the size of the fixed rounds."""
        self._reference = reference_losses(self._steps, self._one.work)
        self._one.submit(
            bit_exact(digits_job(self._one.work, "alone", nodes="2", workers=1, steps=self._steps, delay=0))
        )
        self._one.until_phase("alone", "succeeded", 300)
        _, self._weights = learned(self._one.work / "alone.ckpt", self._steps)
        self._one.ctl("delete", "alone")

    def round(self, number: int) -> Row:
        """By turns elastic from 1 to 4 nodes, and at a fixed size. ``wrong`` of the row is what was not as it must
        be."""
        elastic = number % 2 == 1
        row = Row(number, "1-4" if elastic else "2")
        name, begin = f"train-{number}", time.monotonic()
        self._place.training, self._place.elastic = name, elastic
        nodes = f"{{min: 1, max: {len(self._place.nodes)}, target: {len(self._place.nodes)}}}" if elastic else "2"
        text = digits_job(
            self._one.work, name, nodes=nodes, workers=1, steps=self._steps, delay=self._seconds / self._steps,
            more=BUDGET, script=recording(self._one.work, name),
        )  # fmt: skip
        self._one.submit(text if elastic else bit_exact(text))
        self._one.until_running(name, len(self._place.nodes) if elastic else 2, 120)
        self._churn.ended.clear()
        self._churn.begin()
        try:
            self._under_faults(name, row)
        except Exception as error:  # noqa: BLE001 - the finding
            row.wrong.append(f"{error!r}\n{self._one.state()}")
        finally:
            self._churn.finish()
        row.small_jobs = Counter(self._churn.ended)
        row.wrong += self._churn.wrong
        self._churn.wrong = []
        row.seconds = time.monotonic() - begin
        if not row.wrong:
            self._check(name, elastic, row)
            self._at_rest(name, row)
        return row

    def _under_faults(self, name: str, row: Row) -> None:
        chance, bound = self._place.chance, time.monotonic() + 6 * self._seconds + 300
        while True:
            pause = time.monotonic() + chance.uniform(*PAUSE)
            while time.monotonic() < pause:
                if self._over(name):
                    return
                time.sleep(0.5)
            if time.monotonic() > bound:
                raise AssertionError(f"{name} has not ended in time")
            chosen = [choose(self._place) for _ in range(2 if chance.random() < TWO else 1)]
            words = ", ".join(f"{fault} ({draw['node']}, {draw['away']:.1f} s)" for fault, draw in chosen)
            self._place.report(f"{time.strftime('%H:%M:%S')} {words}")
            wrong: list[Exception] = []

            def do(fault: str, draw: dict[str, object], wrong: list[Exception] = wrong) -> None:
                try:
                    hit = FAULTS[fault](self._place, draw)
                    (row.faults if hit else row.missed)[fault] += 1
                except Exception as error:  # noqa: BLE001 - raised below, with what was done
                    wrong.append(error)

            threads = [threading.Thread(target=do, args=one) for one in chosen]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if wrong:
                raise AssertionError(f"after {words}: {wrong!r}") from wrong[0]

    def _over(self, name: str) -> bool:
        try:
            job = self._one.job(name)
        except CtlError:  # nobody answers just now
            return False
        if job["phase"] in ENDED and job["phase"] != "succeeded":
            raise AssertionError(f"{name} ended as {job['phase']}: {job['reason']}")
        return bool(job["phase"] == "succeeded")

    def _check(self, name: str, elastic: bool, row: Row) -> None:
        work = self._one.work
        rows = read_steps(work, name)
        row.steps, row.generations = self._steps, len({r["generation"] for r in rows})
        row.redone = len({(r["step"], r["generation"]) for r in rows}) - self._steps
        try:
            check_steps(rows, self._reference)
            check_complete(rows, self._steps)
            check_images(work, name, redone=True)
            if not elastic:
                assert learned(work / f"{name}.ckpt", self._steps)[1] == self._weights, "weights of another run"
        except AssertionError as error:
            row.wrong.append(f"{name}: {error}")

    def _at_rest(self, name: str, row: Row) -> None:
        """Nothing lives but the cluster; then what it uses."""
        try:
            self._one.at_rest()
            self._one.ctl("delete", name)
            self._jobs += 1 + row.small_jobs.total()
            now = measure(self._place, self._jobs)
            end = time.monotonic() + REST
            while self._base is not None and grown(self._base, now) and time.monotonic() < end:
                time.sleep(2)
                now = measure(self._place, self._jobs)
        except Exception as error:  # noqa: BLE001 - the finding
            row.wrong.append(f"not at rest: {type(error).__name__}: {error}")
            return
        row.figures = now.figures
        if self._base is None:
            self._base = now
        row.wrong += grown(self._base, now)
        for left in (f"{name}.images", f"{name}.steps"):
            Path(self._one.work, left).unlink()
        shutil.rmtree(self._one.work / f"{name}.ckpt")


def in_words(row: Row) -> str:
    """A line of the table."""
    figures = row.figures
    most = {k: max((v for n, v in figures.items() if n.startswith(k)), default=0) for k in ("agent PSS", "agent desc")}
    return (
        f"{row.number:5}  {row.size:>5}  {row.seconds:6.0f} s  {row.faults.total():6}  {row.missed.total():6}"
        f"  {row.generations:5}  {row.redone:6}  {row.small_jobs.total():5}"
        f"  {most['agent PSS'] / 2**20:7.1f}  {most['agent desc']:4}"
        f"  {figures.get('processes', 0):5}  {figures.get('redis keys', 0):5}"
        f"  {figures.get('redis memory', 0) / 2**20:6.1f}  {'wrong' if row.wrong else 'fine'}"
    )


GENERATION = "round   size    took     faults  missed  gens.  redone  small  PSS MiB  fds.  proc.  keys  Redis MiB"
