"""The known word that a person most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to ``word``, whatever its case, with ``-`` and ``_`` alike; None if none is near."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    by_plain = {plain(k): k for k in known}
    near = difflib.get_close_matches(plain(word), by_plain, n=1, cutoff=0.6)
    return by_plain[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str], *, say: str = "known are") -> str:
    """``did you mean 'x'?``, or the list of what is known."""
    words = list(known)
    best = closest(word, words)
    return f"did you mean '{best}'?" if best else f"{say} {', '.join(words)}"
