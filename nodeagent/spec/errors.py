"""What is wrong with something a person wrote, how it is shown, and the known word that the person most likely
meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a file to a value."""

MOST_SHOWN = 100
"""Problems that ``str(SpecError)`` lists; a file with more is not what it seems to be."""


class CheckError(ValueError):
    """Raised by a check of one value: what is wrong with it, and what would be right. The caller knows where it is."""

    def __init__(self, what: str, right: str = "", at: Path = ()) -> None:
        super().__init__(f"{what}, {right}" if right else what)
        self.what = what
        self.right = right
        self.at = at
        """Where inside the checked value the mistake is, if not the whole of it."""
        self.also: tuple[CheckError, ...] = ()
        """Further mistakes in the same value."""


class NotTextError(CheckError):
    """A number, a truth value, a list or nothing where text is needed."""

    def __init__(self, value: object, at: Path = ()) -> None:
        scalar = isinstance(value, int | float)
        super().__init__(
            f"{value} is not text" if scalar else "this is not text",
            "put it in quotes" if scalar else "write text, in quotes if in doubt",
            at,
        )


def raise_all(errors: Iterable[CheckError]) -> None:
    """Raise them as one, if there are any: the first of them, since an endless list of a stranger may have as many."""
    if found := list(islice(errors, MOST_SHOWN)):
        found[0].also = tuple(found[1:])
        raise found[0]


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake and its place. ``line`` and ``col`` count from 1; they are 0 for what is not in a file (an
    environment variable, a command-line option: then ``file`` is its name)."""

    file: str
    line: int
    col: int
    what: str
    right: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.col}" if self.line else self.file
        return f"{place}: {self.what}" + (f", {self.right}" if self.right else "")


class SpecError(Exception):
    """Everything wrong with one file (or command line), sorted by place. ``str()`` is one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems), key=lambda p: (p.file, p.line, p.col, p.what)))
        lines = [str(p) for p in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"... and {len(self.problems) - MOST_SHOWN} more")
        super().__init__("\n".join(lines))


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to ``word``, whatever its case, with ``-`` and ``_`` alike; None if none is near."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    by_plain = {plain(k): k for k in known}
    near = difflib.get_close_matches(plain(word), by_plain, n=1, cutoff=0.6)
    return by_plain[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str], *, intro: str = "known are") -> str:
    """``did you mean 'x'?``, or the list of what is known."""
    words = list(known)
    best = closest(word, words)
    return f"did you mean '{best}'?" if best else f"{intro} {', '.join(words)}"
