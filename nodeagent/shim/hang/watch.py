"""The watch over one generation's workers on this node: do they get on, and if not, what does each of them do?

Standard library only. It looks now and then, at nothing that can block, and has stacks taken by a process of its own,
within a bound. It tells facts when they change in kind, not when ages do; who hangs and what follows is the plan's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import boottime
from nodeagent.shim.gang import LocalGang
from nodeagent.shim.hang.track import FIRST_LIMIT, Page, Track, look
from nodeagent.shim.loop import Delay, Loop
from nodeagent.shim.output import stamp
from nodeagent.shim.processes import ShimChildren, reap, start_program

STACKS_BOUND = 20.0
"""Seconds for the stacks of all workers of the pod; what came by then is used."""
STACKS_KEPT = 20
"""Generations whose stacks are kept."""
MOST_STACKS = 64
"""Workers of one pod whose stacks are taken: those of the lowest ranks."""
LOOKS = 12
"""Looks within one limit."""
LEAST_WAIT, MOST_WAIT = 0.25, 10.0
"""Seconds between two looks."""
LEAST_FRESH = 5.0
"""Seconds (or a tenth of the limit) for which stacks are not taken again."""
NATIVE_FROM = 40.0
"""From such a limit on, native stacks are read before it is reached: halted meanwhile, a worker that is only slow has
still time to get on. With a shorter one the reading itself might make it late, so it reads what does not halt it."""
MOST_AHEAD = 3
"""Readings before the limit, in one generation: steps may often take nearly as long."""
HELD = ("stopped", "blocked", "zombie")
"""States of workers whose native stacks cannot be had, and are not asked for."""
SHOWN_EVERY = 5.0
"""Seconds between two steps of a worker that are shown: as often as agents tell their pods' states anyway."""
MOST_LINE = 1 << 20

WorkerFacts = dict[str, Any]
FactKinds = tuple[object, ...]


def suspicious(ranks: Sequence[WorkerFacts]) -> bool:
    """This pod sees no progress. Where a worker tells its progress that alone counts; else they must all be silent, and
    either all next to idle, or one held by the kernel: a worker that computes may be about to get on."""
    reported = [f for f in ranks if f["overdue"] is not None]
    if reported:
        return all(f["overdue"] != "no" for f in reported)
    return bool(ranks) and all(f["silent"] for f in ranks) and (
        all(f["quiet"] for f in ranks) or any(f["frozen"] for f in ranks)
    )  # fmt: skip


def kinds(ranks: Sequence[WorkerFacts]) -> FactKinds:
    """What is reported anew when it changes: each of these takes a limit's time to become true again."""
    return tuple((f["rank"], f["overdue"], f["silent"], f["quiet"], f["frozen"]) for f in ranks)


class HangWatch:
    """One generation's; ``hang`` is the job's (model.jobspec.Hang). ``changed`` is called when ``stall`` did."""

    def __init__(
        self,
        loop: Loop,
        children: ShimChildren,
        hang: Mapping[str, Any],
        run: Path,
        logs: Path,
        changed: Callable[[], None],
    ) -> None:
        self._loop, self._children, self._changed = loop, children, changed
        self._limit: float | None = hang["progress"]
        self._phases: float = hang["phases"]
        self._run, self._folder = run, logs / "stacks"
        self._pages: dict[int, Page] = {}
        self._tracks: dict[int, Track] = {}
        self._gang: LocalGang | None = None
        self._delay: Delay | None = None
        self._show_at = 0.0
        self._asked = False
        self._reported: FactKinds | None = None
        """The kinds that were reported, or for which stacks are being taken."""
        self._helper = 0
        self._pipe = -1
        self._lines = b""
        self._stacks: dict[int, WorkerFacts] = {}
        self._stacks_at = 0.0
        self._ahead = 0
        """Readings that were begun before the limit."""
        self._native = False
        """The last reading was one of native stacks too."""
        self._early = False
        """What this reading has brought so far was enough, and has been passed on."""
        self.stall: WorkerFacts | None = None
        """As model.pod.Stall; None: nothing to tell."""

    def environment(self, rank: int) -> dict[str, str]:
        """Where this worker may tell its progress; nothing if no page can be had."""
        try:
            self._pages[rank] = Page(self._run / f"progress-{rank}")
        except OSError as error:
            print(f"rank {rank} cannot tell its progress: {error}", file=sys.stderr, flush=True)
            return {}
        return {"NODEAGENT_PROGRESS": str(self._pages[rank].path)}

    def forget(self, rank: int) -> None:
        """Another process is to have this rank: what the one before reported is not its own. Raises OSError."""
        self._tracks.pop(rank, None)
        if rank in self._pages:
            self._pages[rank].clear()

    def watch(self, gang: LocalGang) -> None:
        """Look at this generation until it has settled."""
        self._gang = gang
        self._next()

    def ask(self) -> None:
        """Others of the gang see no progress: tell what is seen here."""
        if not self._asked:
            self._asked = True
            self._judge()

    def stop_reading(self) -> None:
        """The workers are being stopped: what has been read by now is all there will be."""
        if self._helper:
            try:  # until reaped it is ours
                os.killpg(self._helper, signal.SIGKILL)
            except ProcessLookupError:  # it has only just been forked, and leads no group yet
                os.kill(self._helper, signal.SIGKILL)

    def close(self) -> None:
        self._gang = None
        if self._delay is not None:
            self._delay.cancel()
        for page in self._pages.values():
            page.close()
        if self.stall is not None:
            self.stall = None
            self._changed()

    def _next(self) -> None:
        shortest = self._limit or min((t.limit for t in self._tracks.values()), default=FIRST_LIMIT)
        wait = min(max(shortest / LOOKS, LEAST_WAIT), MOST_WAIT)
        wait = min([wait, *(t.left + 0.01 for t in self._tracks.values() if t.left > 0)])
        self._delay = self._loop.after(wait, self._tick)

    def _tick(self) -> None:
        gang = self._gang
        if gang is None or gang.settled:
            self.close()
            return
        self._look(gang)
        self._show(gang)
        self._judge()
        self._next()

    def _look(self, gang: LocalGang) -> None:
        now = boottime()
        for w in gang.workers:
            page = self._pages.get(w.rank)
            seen = None
            if w.lives:
                progress = page.read(now) if page is not None else None
                try:
                    seen = look(gang.parts.process(w), now, progress, sum(c.taken for c in w.captures))
                except OSError:  # no descriptor to look with: as it was seen last
                    continue
            if seen is None:
                self._tracks.pop(w.rank, None)
                continue
            if w.rank not in self._tracks:
                self._tracks[w.rank] = Track(w.rank, self._limit, self._phases, now)
            self._tracks[w.rank].see(seen)

    def _show(self, gang: LocalGang) -> None:
        now = boottime()
        if now < self._show_at:
            return
        self._show_at = now + SHOWN_EVERY
        news = False
        for w in gang.workers:
            reported = self._tracks[w.rank].progress if w.rank in self._tracks else None
            if reported is not None and (w.step, w.doing) != (reported.step, reported.phase):
                w.step, w.doing, news = reported.step, reported.phase, True
        if news:
            self._changed()

    def _facts(self) -> list[WorkerFacts]:
        return [track.facts() for _, track in sorted(self._tracks.items())]

    def _judge(self) -> None:
        """Report, when what is to be reported has changed in kind: with stacks, taken anew where the last are old. Not
        while it is about to be known how a worker ended: who is not reported counts as one that ended well."""
        if self._gang is not None and any(w.ended and not w.reaped for w in self._gang.workers):
            return
        gang, ranks = self._gang, self._facts()
        suspects = suspicious(ranks)
        if gang is None or gang.phase != "running" or not ranks or not (suspects or self._asked):
            self._reported = None
            if self.stall is not None:
                self.stall = None
                self._changed()
            self._take_ahead(gang, ranks)
            return
        now = (suspects, *kinds(ranks))
        if self._helper:
            self._report_early()
            return
        if now == self._reported:
            return
        self._reported = now
        if self._stacks_hold(ranks) and (self._native or self._known(ranks)):
            self._report(ranks, suspects)
            return
        try:
            self._take_stacks(gang, ranks, native=True)
        except OSError as error:
            print(f"no stacks: {error}", file=sys.stderr, flush=True)
            self._report(ranks, suspects)

    def _take_ahead(self, gang: LocalGang | None, ranks: list[WorkerFacts]) -> None:
        """Begin with the stacks while the limit is not reached yet, if all looks as if it will be."""
        if gang is None or gang.phase != "running" or not ranks or self._helper or self._ahead >= MOST_AHEAD:
            return
        lead = self._lead
        soon = [track.facts(lead) for _, track in sorted(self._tracks.items())]
        if suspicious(soon) and not self._stacks_hold(ranks):
            self._ahead += 1
            try:
                self._take_stacks(gang, ranks, native=self._longest >= NATIVE_FROM)
            except OSError as error:
                print(f"no stacks ahead of time: {error}", file=sys.stderr, flush=True)

    @property
    def _longest(self) -> float:
        return max(t.limit for t in self._tracks.values())

    @property
    def _lead(self) -> float:
        """Seconds before the limit is reached: more than a native reading may take, where there is one."""
        return min(20.0, self._longest / 4) if self._longest >= NATIVE_FROM else min(5.0, self._longest / 2)

    def _stacks_hold(self, ranks: list[WorkerFacts]) -> bool:
        """The last stacks are young, and of the standstill that is seen now."""
        fresh = max(LEAST_FRESH, self._longest / 10) + self._lead
        return boottime() - self._stacks_at < fresh and not self._moved(ranks)

    def _moved(self, ranks: list[WorkerFacts]) -> bool:
        """Somebody whose word counts has shown progress since the stacks were begun."""
        reported = [f for f in ranks if f["overdue"] is not None]
        return any(boottime() - f["age"] >= self._stacks_at for f in reported or ranks)

    def _report(self, ranks: list[WorkerFacts], suspects: bool) -> None:
        reported = [f | self._stacks.get(f["rank"], {}) for f in ranks]
        self.stall = {"limit": self._longest, "suspects": suspects, "ranks": reported}
        self._changed()

    # -- stacks

    def _file(self, gang: LocalGang, rank: int) -> Path:
        return self._folder / f"g{gang.token['number']}-rank{rank}.txt"

    def _take_stacks(self, gang: LocalGang, ranks: list[WorkerFacts], native: bool) -> None:
        pids = {w.rank: gang.parts.process(w) for w in gang.workers if w.lives}
        targets = []
        for facts in [f for f in ranks if f["rank"] in pids][:MOST_STACKS]:
            rank = facts["rank"]
            pid = pids[rank]
            title = f"rank {rank} of generation {gang.token['number']}, pid {pid}, {stamp(time.time())}: {facts}"
            targets.append(
                {"rank": rank, "pid": pid, "file": str(self._file(gang, rank)), "title": title, "native": native}
            )
        oldest = gang.token["number"] - STACKS_KEPT + 1
        argv = [sys.executable, "-sP", "-m", "nodeagent.shim.hang.stacks"]
        argv += [str(self._folder), str(oldest), json.dumps(targets)]
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._helper = pid = start_program(argv, dict(os.environ), "/", write, 2)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._pipe, self._lines, self._stacks_at, self._early = read, b"", boottime(), False
        self._native = native
        self._stacks = {t["rank"]: {"stacks": t["file"]} for t in targets}
        bound = self._loop.after(STACKS_BOUND, lambda: os.killpg(pid, signal.SIGKILL))  # until reaped it is ours
        self._loop.watch(read, self._read_stacks)
        self._children.expect(pid, lambda: self._taken(bound))

    def _read_stacks(self) -> None:
        self._read()
        self._report_early()

    def _known(self, ranks: list[WorkerFacts]) -> bool:
        """Of each worker it has been read whether it waits for others, or it is held where it is."""
        read = [(f["state"], self._stacks.get(f["rank"], {})) for f in ranks]
        return all("site" in reported and (state in HELD or reported["waits"] is not None) for state, reported in read)

    def _report_early(self) -> None:
        """While the stacks are still being taken: tell as soon as they tell whose turn each worker's is."""
        gang, ranks = self._gang, self._facts()
        suspects = suspicious(ranks)
        if self._early or not ranks or not (self._known(ranks) and (suspects or self._asked)) or self._moved(ranks):
            return
        if gang is not None and gang.phase == "running":
            self._early, self._reported = True, (suspects, *kinds(ranks))
            self._report(ranks, suspects)

    def _read(self) -> bool:
        """What the helper has printed since; False when there is no more now."""
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._lines = (self._lines + data)[:MOST_LINE].split(b"\n")
        for line in lines:
            try:
                reported = json.loads(line)
                self._stacks[reported["rank"]] |= {"waits": reported["waits"], "site": reported["site"]}
            except (ValueError, KeyError, TypeError):  # not the helper's own words
                continue
        if not data:
            self._loop.forget(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
        return bool(data)

    def _taken(self, bound: Delay) -> None:
        """The helper has ended."""
        bound.cancel()
        helper, self._helper = self._helper, 0
        self._children.forget(helper)
        reap(helper)
        while self._pipe >= 0 and self._read():
            pass
        if self._pipe >= 0:  # something it started still holds the other end
            self._loop.forget(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
        gang, ranks = self._gang, self._facts()
        suspects = suspicious(ranks)
        if gang is None or gang.phase != "running" or not ranks or not (suspects or self._asked):
            return
        now = (suspects, *kinds(ranks))
        if self._early and now == self._reported:
            return
        self._reported = now
        enough = self._native or self._known(ranks)  # else it was begun before the limit
        if not enough or (suspects and self._moved(ranks)):  # they got on meanwhile, and stand still again elsewhere
            self._reported = None
            self._judge()
        else:
            self._report(ranks, suspects)
