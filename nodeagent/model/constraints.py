"""What a job asks of its nodes: labels they must have, must not have, or better have, and how they lie to each other.

Owns the meaning of one term. How a person writes it is ``spec/placementfile.py``'s; which nodes are chosen is
``plan/``'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from pydantic import Field

from nodeagent.model.base import Record

NODE = "node"
"""The label that every node has: its own id. Its values may hold ranges: ``n[1-8,12]``."""
MOST_TERMS, MOST_VALUES = 16, 256
"""Of a job or of a role: a role has the job's terms too."""
MOST_RANGES = 16
"""Values with ranges of one term; of all terms of a role twice as many."""
MOST_TEXT = 128
"""Most characters of a label, or of one of its values."""

_RANGED = re.compile(r"([^\[\],]*)\[(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\]([^\[\],]*)")


class Match(Record):
    """A label with one of these values; without values: with any."""

    label: str = Field(min_length=1, max_length=MOST_TEXT)
    values: tuple[str, ...] = Field(default=(), max_length=MOST_VALUES)

    def __str__(self) -> str:
        return f"{self.label}={'|'.join(self.values)}" if self.values else self.label

    def holds(self, node: str, labels: Mapping[str, str]) -> bool:
        """Whether this node is such a one."""
        if self.label == NODE:
            return not self.values or named(self.values, node)
        value = labels.get(self.label)
        return value is not None and (not self.values or value in self.values)


class Constraints(Record):
    """What the places of one role ask of their nodes. All of ``require`` must hold and none of ``exclude``; of nodes
    that may be had, those with more of ``prefer`` and less of ``avoid`` come first."""

    require: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    exclude: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    prefer: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    avoid: tuple[Match, ...] = Field(default=(), max_length=2 * MOST_TERMS)
    spread: str = Field(default="", max_length=MOST_TEXT)
    """Places go to as many values of this label as there are; empty: no matter."""
    pack: str = Field(default="", max_length=MOST_TEXT)
    """Places go to as few values of this label as will do; empty: no matter."""

    @property
    def hard(self) -> bool:
        """Some nodes may not be used at all."""
        return bool(self.require or self.exclude)

    @property
    def words(self) -> str:
        """What may be used, as what follows "a node": ``with gpu=h100, without spot``."""
        has, lacks = " and ".join(map(str, self.require)), " or ".join(map(str, self.exclude))
        return ", ".join([f"with {has}"] * bool(has) + [f"without {lacks}"] * bool(lacks))

    def unmet(self, node: str, labels: Mapping[str, str]) -> str:
        """Why this node may not be used, as what follows its name in a sentence; empty if it may."""
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
        """How welcome a node is: of two that may be used, the one with more is taken first."""
        wanted = sum(term.holds(node, labels) for term in self.prefer)
        return wanted - sum(term.holds(node, labels) for term in self.avoid)


def value_of(label: str, node: str, labels: Mapping[str, str]) -> str:
    """A node's value of a label; empty if it has none."""
    return node if label == NODE else labels.get(label, "")


def is_pattern(text: str) -> bool:
    """Whether this can name nodes: a name, or one with ranges in it whose ends are in order."""
    found = _RANGED.fullmatch(text)
    if found is None:
        return bool(text) and "[" not in text and "]" not in text
    return all(low <= high for low, high, _ in _spans(found[2]))


def named(patterns: tuple[str, ...], node: str) -> bool:
    """Whether one of these names the node."""
    plain, ranged = _sorted(patterns)
    if node in plain:
        return True
    for pattern in ranged:  # noqa: SIM110 - asked for each node and job: any() takes twice as long
        if names(pattern, node):
            return True
    return False


def has_ranges(pattern: str) -> bool:
    """It may name several nodes."""
    return _ranged(pattern) is not None


@lru_cache(maxsize=1024)
def _sorted(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names, and those with ranges: of a long list most are names, which are found at once."""
    ranged = tuple(pattern for pattern in patterns if has_ranges(pattern))
    return frozenset(patterns).difference(ranged), ranged


def names(pattern: str, node: str) -> bool:
    """Whether ``pattern`` (``n7``, ``n[1-8,12]``, ``gpu[01-16]-a``) names this node. A number that begins with 0 has as
    many digits in the node's name."""
    ranged = _ranged(pattern)
    if ranged is None:
        return pattern == node
    before, after, spans = ranged
    if not (node.startswith(before) and node.endswith(after)):
        return False
    digits = node[len(before) : len(node) - len(after)]
    if not (digits.isdecimal() and digits.isascii()):
        return False
    number, digit_count = int(digits), len(digits)
    for low, high, width in spans:
        if low <= number <= high and (digit_count == width if width else digits[0] != "0" or digit_count == 1):
            return True
    return False


@lru_cache(maxsize=4096)
def _ranged(pattern: str) -> tuple[str, str, list[tuple[int, int, int]]] | None:
    """What is before and after the ranges, and the ranges; None of a plain name."""
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
