"""How much a shim may say. It runs as the job's user, so its status may hold anything: what the agent, the store and
every other agent do with it must take little time and room, whatever it says.

What people are to read is cut, and has no control characters (in JSON each takes six). Anything else that no shim of
ours would send raises ValueError: nobody could say what that pod does. Must never ask what a status means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from pydantic import ValidationError

from nodeagent.model.base import PORT_MAX, Record, first_error
from nodeagent.model.world import BRIEF, WorkerExit
from nodeagent.osutil.untrusted import UntrustedError, object_and_text
from nodeagent.pods.base import PodStatus
from nodeagent.pods.environment import is_address
from nodeagent.shim.record import MAX_CHARS, WHOLE_ERRORS

TEXT_MAX = 8192
"""Characters of a sentence for people."""
PORTLESS_MAX = 1024
"""The same of why there are too few free ports: this node's own words, which name who has them."""
FOLDER_MAX = 64
"""Characters of a folder's id; those of ours have 32."""
COUNT_MAX = 4096
"""Entries of any list: four times the workers that a role may have on a node."""
FEW = 64
"""Entries of any list beyond what was asked of the pod: roles, and workers that were started again alone."""
NAME_MAX = 1024
"""Characters of any other text."""
NAMES_MAX = 1 << 20
"""Characters of all of those together."""
NUMBER_MAX = 1e12
"""Of any number with a fraction. All of them are seconds."""
_FOLDER = re.compile(r"[A-Za-z0-9_.-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""What no sentence needs: lines and columns may stay."""
_SENTENCES = {
    "reason": TEXT_MAX, "refused": TEXT_MAX, "written": TEXT_MAX, "portless": PORTLESS_MAX, "taken": TEXT_MAX,
}  # fmt: skip


class ShimReport(Record):
    """A line from a shim: how its pod is, or what it could not make of ours."""

    v: int
    status: PodStatus | None = None
    error: str = ""
    echo: int | None = None
    """The ping that has come through its loop."""

    @classmethod
    def read(cls, line: bytes, most: int = COUNT_MAX) -> ShimReport:
        """As it may go on, in little time whatever it is. ``most``: entries of each of its lists. Raises ValueError;
        ``str()`` is a phrase."""
        try:
            value, text = object_and_text(line, lossy=True)  # of few values, each key once
            check_lists(value.get("status"), most)
            found = cls.from_json(text)
        except UntrustedError as error:
            raise ValueError(str(error)) from error
        except ValidationError as error:
            raise ValueError(first_error(error)) from None
        return found if found.status is None else found.model_copy(update={"status": bounded(found.status)})


def most_entries(asked: int) -> int:
    """Entries that a list of a pod may have of which so many workers, or ports, were asked."""
    return min(COUNT_MAX, FEW + asked)


def check_lists(status: object, most: int) -> None:
    """Of a status as it came: no list is longer. Before it is known to be one, since to look at each entry takes long.
    Raises ValueError."""
    for value in status.values() if isinstance(status, dict) else ():
        for entries in (value, *(value.values() if isinstance(value, dict) and len(value) <= most else ())):
            if isinstance(entries, list | dict) and len(entries) > most:
                raise ValueError(f"a list of more than {most} entries")


def bounded(status: PodStatus) -> PodStatus:
    """The status as it may go on. Raises ValueError; ``str()`` says what is wrong, and repeats nothing of it."""
    ranks = status.stall.ranks if status.stall is not None else ()
    lists = (
        status.preforked, status.workers, status.exits, status.restarted, status.ports, status.waiting, status.ready,
        status.rounds, status.down, ranks,
    )  # fmt: skip
    if max(map(len, lists)) > COUNT_MAX:
        raise ValueError(f"a list of more than {COUNT_MAX} entries")
    lengths = [len(name) for name in _names(status)]
    if max(lengths) > NAME_MAX or sum(lengths) > NAMES_MAX:
        raise ValueError(f"a name of more than {NAME_MAX} characters, or names of more than {NAMES_MAX}")
    if any(abs(number) > NUMBER_MAX for number in _numbers(status) if number is not None):
        raise ValueError(f"a time of more than {NUMBER_MAX:g} s")
    if status.rendezvous is not None and not is_address(status.rendezvous.address):
        raise ValueError("a rendezvous whose address is not a host and a port")
    if any(not 1 <= port <= PORT_MAX for port in status.ports):
        raise ValueError(f"a port that is not 1 to {PORT_MAX}")
    if len(status.folder) > FOLDER_MAX or not _FOLDER.fullmatch(status.folder):
        raise ValueError(f"an id of a folder that is not valid, or of more than {FOLDER_MAX} characters")
    cut: dict[str, object] = {
        name: sentence
        for name, most in _SENTENCES.items()
        if (sentence := _CONTROL.sub("\ufffd", (text := getattr(status, name))[:most])) != text
    }
    for name, exits in (("exits", status.exits), ("restarted", status.restarted)):
        if (brief := _brief(exits)) is not exits:
            cut[name] = brief
    return status.model_copy(update=cut) if cut else status


def _names(status: PodStatus) -> Iterator[str]:
    yield from (status.uid, status.folder)
    yield from chain(status.waiting, status.ready, status.rounds, status.down)
    yield from (token.id for token in (status.highest, status.generation, status.lost) if token is not None)
    yield from (worker.doing for worker in status.workers)
    yield from (ended.place for ended in chain(status.exits, status.restarted))
    if status.rendezvous is not None:
        yield from (status.rendezvous.token.id, status.rendezvous.address)
    if status.commit is not None:
        yield from (status.commit.token.id, status.commit.name)
    for facts in status.stall.ranks if status.stall is not None else ():
        yield from (facts.phase, facts.site, facts.stacks)


def _numbers(status: PodStatus) -> Iterator[float | None]:
    yield status.stepped
    for ended in chain(status.exits, status.restarted):
        yield from (ended.at, ended.saved_in, ended.overdue)
    if status.stall is not None:
        yield status.stall.limit
        yield from (facts.age for facts in status.stall.ranks)


def _brief(exits: tuple[WorkerExit, ...]) -> tuple[WorkerExit, ...]:
    """The same; the very same where nothing is too long."""
    most = [MAX_CHARS if number < WHOLE_ERRORS else BRIEF for number in range(len(exits))]
    if all(len(ended.error) <= length for ended, length in zip(exits, most, strict=True)):
        return exits
    return tuple(
        ended if len(ended.error) <= length else ended.model_copy(update={"error": ended.error[-length:]})
        for ended, length in zip(exits, most, strict=True)
    )
