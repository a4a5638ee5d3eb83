"""The notice that this machine is about to be taken away: where it is looked for, and until when the machine is there.

Owns how a notice is read: from a file, which is there or not, or from a command, which succeeds or not. Must never
decide what follows: that is ``plan/``'s, which finds the notice among the node's facts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import structlog

from nodeagent.model.node import Notice
from nodeagent.osutil.commands import Checks, SiteCheck
from nodeagent.osutil.untrusted import OneAside, UntrustedError, UntrustedFolder
from nodeagent.spec.agentconfig import NoticeConfig

UNDATED = 120.0
"""Seconds from the first sight of a notice that names no time: the shortest that most clouds give."""
MOST = 4096
"""Bytes of the file."""
SHOWN = 100
"""Characters of its words that people see."""
BOUND = 5.0
"""Seconds that the command may take, and a look at the file."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d(?::?\d\d)?)?")


class NoticeWatch:
    """Looks for the notice. ``publish`` is called whenever what is known of it changes; None: there is none."""

    def __init__(
        self,
        config: NoticeConfig,
        environ: Mapping[str, str],
        wall: Callable[[], float],
        publish: Callable[[Notice | None], None],
    ) -> None:
        self._config, self._wall, self._publish = config, wall, publish
        self._checks = Checks([self._check], environ, self._looked)
        self._sources: dict[str, str | None] = {}
        """What a file or a command says now; None: nothing."""
        self._words: str | None = None
        self._troubles: dict[str, str] = {}
        """Why a file or a command says nothing."""
        self._notice: Notice | None = None
        self._log = structlog.get_logger("notice")

    @property
    def _check(self) -> SiteCheck:
        return SiteCheck("notice", self._config.command or (), self._config.every, BOUND)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._config.command is not None:
                tasks.create_task(self._checks.run(self._check))
            if self._config.file is not None:
                tasks.create_task(self._watch_file(self._config.file))

    async def _watch_file(self, path: Path) -> None:
        aside = OneAside()
        while True:
            try:
                self._found("file", await aside.run(lambda: _words_in(path), BOUND))
            except (OSError, UntrustedError) as error:
                self._unknown("file", str(error))
            await asyncio.sleep(self._config.every)

    def _looked(self) -> None:
        (reading,) = self._checks.readings
        if reading.code is None:  # it hangs, or could not be started
            self._unknown("command", reading.text)
        else:
            self._found("command", reading.text if reading.code == 0 else None)

    def _unknown(self, source: str, why: str) -> None:
        """What was known stays."""
        if why != self._troubles.get(source):
            self._log.warning("nobody knows whether a notice is there", why=why)
        self._troubles[source] = why

    def _found(self, source: str, news: str | None) -> None:
        self._troubles.pop(source, None)
        self._sources[source] = news
        words = next((words for words in self._sources.values() if words is not None), None)
        if words == self._words:
            return
        self._words = words
        self._notice = None if words is None else read_notice(words, self._wall())
        if self._notice is None:
            self._log.info("the notice was taken back")
        else:
            self._log.warning("the node is to be taken away", notice=self._notice.text)
        self._publish(self._notice)


def read_notice(words: str, now: float) -> Notice:
    """What a notice in these words means. The first time in them is when the machine goes; of the machine's own zone
    unless it says otherwise."""
    until = now + UNDATED
    if (found := _TIME.search(words)) is not None:
        try:
            until = datetime.fromisoformat(found[0]).timestamp()
        except (ValueError, OverflowError):
            found = None
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(until))
    text = " ".join(words.split())[:SHOWN]
    named = "" if found is not None else " or so"
    return Notice(until=until, text=f"to be taken away at {when} UTC{named}" + (f" (notice: {text})" if text else ""))


def _words_in(path: Path) -> str | None:
    """None: there is no such file. Raises OSError or UntrustedError where nobody can say."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    with UntrustedFolder(path.parent) as folder:
        return folder.read(path.name, MOST).decode(errors="replace")
