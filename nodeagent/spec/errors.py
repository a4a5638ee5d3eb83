"""What is wrong with something a person wrote, how it is shown, and the known word that the person most likely
meant.
"""

from __future__ import annotations

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


MOST_LETTERS = 64
"""Letters of a word that is looked for, and of a known one: what is longer is no slip of the hand."""
MOST_LOOKED_AT = 2000
"""Known words of about the same length that are looked at."""
MOST_COMPARED = 1 << 13
"""Letters of those that are compared with it: of those of the same length, beginning and end first."""
_ALIKE = 0.5999
"""The least share of the letters of both words that they have in common, in the same order."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to ``word``, whatever its case, with ``-`` and ``_`` alike; None if none is near.

    Callers of the agent choose the word, and with their jobs' names the known ones, so it takes ``MOST_COMPARED`` short
    steps at most, whatever they are: difflib takes a hundred times as long for long words of few different letters.
    """
    if not 0 < len(word) <= MOST_LETTERS:
        return None
    plain, shortest, longest = _plain(word), len(word) * _ALIKE / (2 - _ALIKE), len(word) * (2 - _ALIKE) / _ALIKE
    about = (one for one in known if shortest <= len(one) <= min(longest, MOST_LETTERS))
    by_plain = {_plain(one): one for one in islice(about, MOST_LOOKED_AT)}

    def unlike(one: str) -> tuple[int, bool, bool]:
        return abs(len(one) - len(plain)), one[:2] != plain[:2], one[-2:] != plain[-2:]

    places, left, best, most = _places(plain), MOST_COMPARED, None, 0.0
    for one in sorted(sorted(by_plain, reverse=True), key=unlike):
        left -= len(one)
        if left < 0:
            break
        share = _alike(places, len(plain), one)
        if share > most:
            best, most = by_plain[one], share
    return best if most >= _ALIKE else None


def _plain(text: str) -> str:
    return text.lower().replace("-", "_")


def _places(word: str) -> dict[str, int]:
    """Letter to a number with a bit for each place where the word has it."""
    found = dict[str, int]()
    for place, letter in enumerate(word):
        found[letter] = found.get(letter, 0) | 1 << place
    return found


def _alike(places: dict[str, int], length: int, other: str) -> float:
    """The share, 0 to 1, of the letters of a word and another one that are in their longest common subsequence (Hyyrö's
    way: each letter of the other one costs an addition)."""
    left = (1 << length) - 1
    for letter in other:
        common = left & places.get(letter, 0)
        left = (left + common | left - common) & (1 << length) - 1
    return 2 * (length - left.bit_count()) / (length + len(other))


def did_you_mean(word: str, known: Iterable[str], *, intro: str = "known are") -> str:
    """``did you mean 'x'?``, or the list of what is known."""
    words = list(known)
    best = closest(word, words)
    return f"did you mean '{best}'?" if best else f"{intro} {', '.join(words)}"
