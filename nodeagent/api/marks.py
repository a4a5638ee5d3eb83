"""How far a stream of log lines was read, so that reading again from the start neither repeats nor drops a line.

Standard library only: the tool uses it too. A source's lines come in the order of their times; several may share one.
"""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]
Source = tuple[str, int, int, str]
"""Node, generation, rank, stream."""


def source_of(line: Line) -> Source:
    """Whose line it is."""
    return line["node"], line["generation"], line["rank"], line["stream"]


class Marks:
    """The last time seen of each source, and how many lines had it."""

    def __init__(self) -> None:
        self._last: dict[Source, tuple[str, int]] = {}
        self._began: dict[str, str] = {}

    @property
    def oldest(self) -> int:
        """The oldest generation seen; 1 without any."""
        return min((generation for _, generation, _, _ in self._last), default=1)

    @property
    def any(self) -> bool:
        """Whether any line was seen."""
        return bool(self._last)

    def seen(self, line: Line) -> None:
        """This line was passed on."""
        source = source_of(line)
        self._began.setdefault(line["node"], line["time"])
        last, count = self._last.get(source, ("", 0))
        self._last[source] = (line["time"], count + 1 if line["time"] == last else 1)

    def again(self, tail: bool) -> Skipper:
        """For reading the same sources anew from their start. ``tail``: the first reading was of the last lines only,
        so that what is older than its first line of a node is not wanted either."""
        return Skipper(dict(self._last), dict(self._began) if tail else {})


class Skipper:
    """Says which lines of a second reading were passed on in the first."""

    def __init__(self, marks: dict[Source, tuple[str, int]], began: dict[str, str]) -> None:
        self._left = marks
        self._began = began

    def skip(self, line: Line) -> bool:
        """Ask once for each line, in order."""
        source = source_of(line)
        if source not in self._left:
            return bool(line["time"] < self._began.get(line["node"], ""))
        last, count = self._left[source]
        if line["time"] < last:
            return True
        if line["time"] > last or count == 0:
            del self._left[source]
            return False
        self._left[source] = (last, count - 1)
        return True
