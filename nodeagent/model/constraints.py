"""What a job asks of its nodes: labels that they must have, must not have, or should have, and how close together they
must be.

Defines what one term means. ``spec/placementfile.py`` parses what people write; ``plan/`` chooses the nodes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from nodeagent.model.base import Record

NODE = "node"
"""The label that every node has: its own id. Its values may hold ranges: ``n[1-8,12]``."""
MOST_TERMS, MOST_VALUES = 16, 256
"""The most terms of a job or of a role (a role's terms include the job's), and the most values of a term."""
MOST_RANGES = 16
"""The most values with ranges in one term; all terms of a role together may have twice as many."""
MOST_TEXT = 128
"""The most characters of a label, or of one of its values."""

_MOST_DIGITS = 9
"""Of a number in a range. A node's name may have more, and Python makes no number of thousands."""
_RANGED = re.compile(r"([^\[\],]*)\[(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\]([^\[\],]*)")


class Match(Record):
    """A label with one of these values; without values: with any value."""

    label: str = Field(min_length=1, max_length=MOST_TEXT)
    values: tuple[Annotated[str, Field(max_length=MOST_TEXT)], ...] = Field(default=(), max_length=MOST_VALUES)

    def __str__(self) -> str:
        return f"{self.label}={'|'.join(self.values)}" if self.values else self.label

    def holds(self, node: str, labels: Mapping[str, str]) -> bool:
        """Returns whether this node has such a label."""
        if self.label == NODE:
            return not self.values or named(self.values, node)
        value = labels.get(self.label)
        return value is not None and (not self.values or value in self.values)


class Constraints(Record):
    """What a role asks of the nodes of its places. All of ``require`` must hold and none of ``exclude``. Of the nodes
    that are allowed, those with more of ``prefer`` and less of ``avoid`` come first."""

    require: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    exclude: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    prefer: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    avoid: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    spread: str = Field(default="", max_length=MOST_TEXT)
    """Places are spread over as many values of this label as possible; empty: not considered."""
    pack: str = Field(default="", max_length=MOST_TEXT)
    """Places are packed into as few values of this label as possible; empty: not considered."""

    @property
    def hard(self) -> bool:
        """Returns whether some nodes may not be used at all."""
        return bool(self.require or self.exclude)

    @property
    def words(self) -> str:
        """The allowed nodes in words that follow "a node": ``with gpu=h100, without spot``."""
        has, lacks = " and ".join(map(str, self.require)), " or ".join(map(str, self.exclude))
        return ", ".join([f"with {has}"] * bool(has) + [f"without {lacks}"] * bool(lacks))

    def unmet(self, node: str, labels: Mapping[str, str]) -> str:
        """Why this node may not be used, in words that follow its name in a sentence; empty if it may be used."""
        for term in self.require:
            if not term.holds(node, labels):
                if term.label == NODE:
                    return f"is not one of the nodes that are required ({', '.join(term.values)})"
                has = labels.get(term.label)
                return f"has {f'{term.label}={has}' if has is not None else f'no label {term.label}'}, needed is {term}"
        for term in self.exclude:
            if term.holds(node, labels):
                what = "is excluded by name" if term.label == NODE else f"has {term.label}={labels[term.label]}"
                return what if term.label == NODE else f"{what}, which is excluded"
        return ""

    def score(self, node: str, labels: Mapping[str, str]) -> int:
        """How preferred a node is: of two allowed nodes, the one with the higher score is taken first."""
        wanted = sum(term.holds(node, labels) for term in self.prefer)
        return wanted - sum(term.holds(node, labels) for term in self.avoid)


def value_of(label: str, node: str, labels: Mapping[str, str]) -> str:
    """A node's value of a label; empty if it has none."""
    return node if label == NODE else labels.get(label, "")


def is_pattern(text: str) -> bool:
    """Returns whether this text can name nodes: a name, or a name with ranges whose ends are in order."""
    found = _RANGED.fullmatch(text)
    if found is None:
        return bool(text) and "[" not in text and "]" not in text
    return all(low <= high for low, high, _ in _spans(found[2]))


def named(patterns: tuple[str, ...], node: str) -> bool:
    """Returns whether one of these patterns names the node. If a range begins with 0, numbers in the node's name must
    have as many digits."""
    plain, ranged = _sorted(patterns)
    if node in plain:
        return True
    for before, after, by_digits in ranged:
        if node.startswith(before) and node.endswith(after):
            digits = node[len(before) : len(node) - len(after)]
            if digits.isdecimal() and digits.isascii() and len(digits) <= _MOST_DIGITS:
                number, count = int(digits), len(digits)
                if _covers(by_digits.get(count), number):
                    return True
                if (digits[0] != "0" or count == 1) and _covers(by_digits.get(0), number):
                    return True
    return False


def has_ranges(pattern: str) -> bool:
    """Returns whether the pattern may name several nodes."""
    return _ranged(pattern) is not None


_Bounds = tuple[list[int], list[int]]
"""The lower and the upper bounds of ranges that are apart from each other, ascending."""
_Ranges = tuple[str, str, dict[int, _Bounds]]
"""The text before and after the ranges, and the ranges by the digits that they need (0: any)."""


def _covers(ranges: _Bounds | None, number: int) -> bool:
    if ranges is None:
        return False
    at = bisect_right(ranges[0], number) - 1
    return at >= 0 and number <= ranges[1][at]


@lru_cache(maxsize=1024)
def _sorted(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[_Ranges, ...]]:
    """Plain names, and what all patterns with ranges name together: most of a long list are names, and a set finds a
    name at once; and of a job with hundreds of ranges not each one may be looked at for each node."""
    plain, found = set[str](), dict[tuple[str, str], dict[int, list[tuple[int, int]]]]()
    for pattern in patterns:
        if (ranged := _ranged(pattern)) is None:
            plain.add(pattern)
            continue
        before, after, spans = ranged
        by_digits = found.setdefault((before, after), {})
        for low, high, digits in spans:
            by_digits.setdefault(digits, []).append((low, high))
    ranges = tuple((*text, {n: _joined(spans) for n, spans in of.items()}) for text, of in found.items())
    return frozenset(plain), ranges


def _joined(spans: list[tuple[int, int]]) -> _Bounds:
    """Those that overlap as one."""
    lows, highs = list[int](), list[int]()
    for low, high in sorted(spans):
        if high < low:
            continue  # it names nothing
        if highs and low <= highs[-1]:
            highs[-1] = max(highs[-1], high)
        else:
            lows.append(low)
            highs.append(high)
    return lows, highs


def names(pattern: str, node: str) -> bool:
    """Returns whether ``pattern`` (``n7``, ``n[1-8,12]``, ``gpu[01-16]-a``) names this node."""
    return named((pattern,), node)


@lru_cache(maxsize=4096)
def _ranged(pattern: str) -> tuple[str, str, list[tuple[int, int, int]]] | None:
    """The text before and after the ranges, and the ranges; None for a plain name."""
    found = _RANGED.fullmatch(pattern)
    return None if found is None else (found[1], found[3], _spans(found[2]))


def _spans(ranges: str) -> list[tuple[int, int, int]]:
    """(from, to, digits or 0) of ``01-16,20``."""
    spans = []
    for one in ranges.split(","):
        low, _, high = one.partition("-")
        width = len(low) if low.startswith("0") and len(low) > 1 else 0
        spans.append((int(low), int(high or low), width))
    return spans
