"""Removes what pods that have ended left in root's own folders: run folders, and cgroups that no pod has any more.

How much is in a run folder, and what is mounted there, is its user's doing. So it is removed beside the loop, what is
mounted is detached first, and what fails is tried again some times; then it is left to the next agent. Must never touch
what a pod has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

from nodeagent.osutil import units
from nodeagent.osutil.untrusted import (
    AsideByOwner,
    PutAsideError,
    UntrustedError,
    detach,
    is_mounted,
    owner_of,
    remove_tree,
)
from nodeagent.pods.cgroup import PodCgroup
from nodeagent.pods.folder import put_away

log = logging.getLogger(__name__)

TRIES, TRY_AGAIN = 10, 5.0
"""Of a removal, and seconds between two."""
CLEAR_LIMIT = 60.0
"""Seconds for one of them."""
SOMEBODY = -1
"""Whose a mount is cannot be seen without asking who serves it."""
ENDS_MOST, END_EVERY = 100, 0.1
"""Looks at a cgroup that no pod has, and seconds between two."""
CLOSE_LIMIT = 1.0
"""Seconds that an agent's end waits for removals; the next agent goes on with them."""


class Clearing:
    """Of one node. ``unit``: the agent's own one, where systemd started it. ``in_use``: whether a pod has this run
    folder."""

    def __init__(self, unit: str, looks: AsideByOwner, in_use: Callable[[Path], bool]) -> None:
        self._unit, self._looks, self._in_use = unit, looks, in_use
        self._tasks: set[asyncio.Task[None]] = set()

    def remove(self, folder: Path) -> None:
        """Remove a run folder. Its name is free at once, unless something is mounted there."""
        try:
            away = put_away(folder)
        except OSError as error:
            log.warning("%s is not removed yet: %s", folder, error)
            self._begin(self._remove(folder, renamed=False))
        else:
            if away is not None:
                self._begin(self._remove(away, renamed=True))

    def end(self, cgroup: PodCgroup) -> None:
        """What is in it is killed, and it is removed."""
        self._begin(_end(cgroup))

    async def close(self) -> None:
        if self._tasks:
            _, later = await asyncio.wait(self._tasks, timeout=CLOSE_LIMIT)
            for one in later:
                one.cancel()

    def _begin(self, removal: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(removal)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove(self, folder: Path, *, renamed: bool) -> None:
        for number in range(TRIES):
            if number:
                await asyncio.sleep(TRY_AGAIN)
            try:
                await self.free(folder)
                if not renamed:
                    if self._in_use(folder) or (away := put_away(folder)) is None:  # a new pod has the name by now
                        return
                    folder, renamed = away, True
                await self._remove_tree(folder)
            except PutAsideError as error:
                log.error("%s", error)
                return
            except (UntrustedError, OSError) as error:
                log.warning("%s is not removed yet: %s", folder, error)
            else:
                return
        log.error("%s is not removed: see what is mounted there", folder)

    async def _remove_tree(self, folder: Path) -> None:
        """With what is mounted in it, which an agent that systemd started may not detach itself. Raises
        UntrustedError."""
        work = partial(remove_tree, folder.parent, folder.name)
        try:
            await self._looks.run(owner_of(folder.parent, folder.name), str(folder), work, CLEAR_LIMIT)
        except UntrustedError as error:
            if not self._unit or isinstance(error, PutAsideError):
                raise
            try:
                await units.start(units.remove_command(self._unit, folder))
            except units.UnitError as failed:
                raise UntrustedError(f"{error}, nor does systemd remove it: {failed}") from failed
            log.warning("%s: systemd has removed it, with what is mounted there", error)

    async def free(self, folder: Path) -> None:
        """Detach what is mounted on it, which may wait for the process that serves that. An agent that systemd started
        may not do it itself. Raises UntrustedError."""
        if not is_mounted(folder.parent, folder.name):
            return
        log.warning("something is mounted on %s, and is detached", folder)
        if self._unit:
            try:
                await units.start(units.detach_command(self._unit, folder))
            except units.UnitError as error:
                raise UntrustedError(f"what is mounted on {folder} is not detached: {error}") from error
            return
        work = partial(detach, folder.parent, folder.name)
        await self._looks.run(SOMEBODY, f"mount on {folder}", work, CLEAR_LIMIT)


async def _end(cgroup: PodCgroup) -> None:
    for _ in range(ENDS_MOST):
        try:
            if not cgroup.kill():
                break
        except OSError as error:
            log.warning("what is in %s cannot be looked at: %s", cgroup.path, error)
        await asyncio.sleep(END_EVERY)
    cgroup.remove()
