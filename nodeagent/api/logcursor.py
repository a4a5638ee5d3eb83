"""Remembers how far a stream of log lines was read, so that a second reading neither repeats nor drops a line.

Standard library only, because the tool uses it too. A source's lines come in the order of their times; several lines
may share one time.
"""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]
Source = tuple[str, int, int, str]
"""Node, generation, rank, stream."""


def source_of(line: Line) -> Source:
    """The source that wrote a line."""
    return line["node"], line["generation"], line["rank"], line["stream"]


class LogCursor:
    """The last time seen of each source, and the number of lines with that time."""

    def __init__(self) -> None:
        self._last: dict[Source, tuple[str, int]] = {}
        self._began: dict[str, str] = {}

    @property
    def oldest(self) -> int:
        """The oldest generation seen; 1 without any."""
        return min((generation for _, generation, _, _ in self._last), default=1)

    @property
    def any(self) -> bool:
        """Returns whether any line was seen."""
        return bool(self._last)

    def seen(self, line: Line) -> None:
        """Call for every line that is passed on."""
        source = source_of(line)
        self._began.setdefault(line["node"], line["time"])
        last, count = self._last.get(source, ("", 0))
        self._last[source] = (line["time"], count + 1 if line["time"] == last else 1)

    def again(self, tail: bool) -> Skipper:
        """A filter for reading the same sources from the start. ``tail``: the first reading had only the last lines, so
        lines older than the first one of a node are skipped too."""
        return Skipper(dict(self._last), dict(self._began) if tail else {})


class Skipper:
    """Finds the lines of a second reading that were passed on in the first."""

    def __init__(self, marks: dict[Source, tuple[str, int]], began: dict[str, str]) -> None:
        self._left = marks
        self._began = began

    def skip(self, line: Line) -> bool:
        """Returns whether to skip this line. Call it once for each line, in order."""
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
