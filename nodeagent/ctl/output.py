"""Prints answers in a format: table, wide, json, yaml, name. Tables are plain aligned columns; on a terminal they fit
its width and have colours.

Must never cut a cell or break a word, and never print anything but data on stdout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from nodeagent.ctl.terminal import echo, printable

Json = dict[str, Any]

GAP = 3
"""Spaces between two columns."""
MOST_UNREAD_NAMED = 5
"""Records that cannot be read that a warning names."""
LEAST_TEXT = 28
"""Columns that a folded text needs to be readable within its row."""
_WORDS = re.compile(r"\s*[^\s,]*,?(?=\s|$)|\s*[^\s,]*,|\s*[^\s,]+")

STYLES = {
    "running": "green", "succeeded": "green", "ready": "green",
    "queued": "yellow", "forming": "yellow", "holding": "yellow", "pausing": "yellow", "paused": "yellow",
    "cordoned": "yellow", "draining": "yellow", "drained": "yellow", "maintenance": "yellow",
    "leaving": "yellow", "restarting": "yellow", "mute": "yellow", "silent": "red",
    "failed": "red", "lost": "red", "stopped": "bright_black", "left": "bright_black",
}  # fmt: skip
"""Phase or node state to colour, on a terminal."""


@dataclass(frozen=True, slots=True)
class Column:
    """The title of a column, and the function that makes a cell from an item."""

    title: str
    cell: Callable[[Json], object]
    wide: bool = False
    """Only in ``-o wide``."""
    text: bool = False
    """The cell is a sentence or a list of any length, and may be folded."""


def on_terminal() -> bool:
    """Returns whether stdout is a terminal."""
    return sys.stdout.isatty()


def coloured() -> bool:
    """Returns whether to use colours: on a terminal, unless NO_COLOR is set."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def text(value: object) -> str:
    """A cell in one line; an empty value is ``-``."""
    return "-" if value is None or value == "" else printable(str(value)).replace("\n", "\\n")


def count(number: int, thing: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def span(seconds: float | None) -> str:
    """A duration in kubectl's form: 42s, 5m12s, 3h2m, 2d4h."""
    if seconds is None:
        return "-"
    total = int(seconds)
    if total < 120:
        return f"{total}s"
    if total < 3 * 3600:
        minutes, rest = divmod(total, 60)
        if minutes < 60:
            return f"{minutes}m{rest}s" if rest else f"{minutes}m"
        return f"{minutes // 60}h{minutes % 60}m" if minutes % 60 else f"{minutes // 60}h"
    if total < 48 * 3600:
        return f"{total // 3600}h{total % 3600 // 60}m"
    return f"{total // 86400}d{total % 86400 // 3600}h"


def moment(at: float) -> str:
    """A Unix time as a date and a time of day, here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None if stdout is no terminal, and nothing is fitted to a width."""
    return shutil.get_terminal_size().columns if on_terminal() else None


def size(number: int | None) -> str:
    """Bytes in readable form: 512Ki, 3.2Gi."""
    if number is None:
        return "-"
    value = float(number)
    for unit in ("", "Ki", "Mi", "Gi"):
        if value < 1024:
            return f"{value:.3g}{unit}" if value < 1000 else f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.1f}Ti"


def of_devices(used: Json, what: str) -> float:
    """Hours of GPUs that were ``lost``, or ``overhead``; of CPU slots where no GPU was used. GOODPUT is of the same."""
    found: float = used[f"{what}_gpu_hours"] if used["gpu_hours"] else used[f"{what}_slot_hours"]
    return found


def hours(value: float) -> str:
    """Hours of devices, to a tenth of an hour; a value above zero is never shown as 0."""
    return "-" if not value else f"{value:,.1f}" if value >= 0.05 else "<0.1"


def part(value: float | None) -> str:
    """A part of 1, as a percentage; never rounded up to 100 %."""
    return "-" if value is None else "100%" if value == 1 else f"{min(value, 0.999) * 100:.1f}%"


def fold(line: str, width: int | None, indent: int) -> list[str]:
    """The line, broken between words (and after commas) if it is wider than ``width``; the rest is indented, less where
    there would be no room to read it."""
    if width is None or len(line) <= width:
        return [line]
    if width - indent < LEAST_TEXT:
        indent = min(indent, 4, width // 2)
    lines, rest = [], ""
    for word in _WORDS.findall(line):
        if rest.strip() and len(rest) + len(word) > width:
            lines.append(rest.rstrip())
            rest = " " * indent + word.lstrip()
        else:
            rest += word
        while len(rest.rstrip()) > width:  # one word that is longer than a line
            lines.append(rest[:width])
            rest = " " * indent + rest[width:]
    return [*lines, rest.rstrip()] if rest.strip() else lines


def table_lines(
    columns: Sequence[Column], rows: Sequence[Json], width: int | None = None, colour: bool = False
) -> list[str]:
    """Aligned columns with upper-case titles, three spaces apart, in kubectl's form.

    Within a ``width`` no word is broken and nothing is left out: the last column is folded if it is text and has the
    room; other columns that do not fit are printed below their row, with their titles.
    """
    titles = [c.title for c in columns]
    cells = [[text(c.cell(row)) for c in columns] for row in rows]
    widths = [max(len(title), *(len(row[i]) for row in cells), 0) for i, title in enumerate(titles)]
    inside, gap = list(range(len(columns))), GAP

    def needed() -> int:
        return sum(widths[i] for i in inside) + gap * (len(inside) - 1)

    if width is not None and needed() > width:
        texts = sorted((i for i in inside[1:] if columns[i].text), key=lambda i: widths[i])
        while needed() > width and texts:
            widest = texts.pop()
            room = width - (needed() - widths[widest])
            if widest == inside[-1] and room >= LEAST_TEXT:
                widths[widest] = room
            else:
                inside.remove(widest)
        gap = gap if needed() <= width else 2
        while needed() > width and len(inside) > 1:
            inside.pop()
    below = [i for i in range(len(columns)) if i not in inside]
    lines = _row(titles, inside, widths, gap, False)
    for row in cells:
        lines += _row(row, inside, widths, gap, colour)
        for i in below:
            if row[i] != "-":
                lines += fold(f"  {titles[i]}: {row[i]}", width, 4)
    return lines


def _row(cells: Sequence[str], inside: Sequence[int], widths: Sequence[int], gap: int, colour: bool) -> list[str]:
    """One row; its last cell may take several lines."""
    last = inside[-1]
    first, *more = fold(cells[last], widths[last], 0)
    shown = [paint(cells[i].ljust(widths[i]), colour) for i in inside[:-1]] + [paint(first, colour)]
    left = sum(widths[i] + gap for i in inside[:-1])
    return [(" " * gap).join(shown).rstrip(), *(" " * left + line for line in more)]


def dump(value: object, fmt: str) -> None:
    """Prints JSON or YAML."""
    if fmt == "yaml":
        echo(yaml_text(value), nl=False)
    else:
        echo(json.dumps(value, indent=2, ensure_ascii=False))


def yaml_text(value: object) -> str:
    """The value as YAML, in a form that reads back as the same value once ``echo`` has shown its control characters."""
    import yaml

    plain: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return plain if printable(plain) == plain else str(yaml.safe_dump(value, sort_keys=False))


def notice(answer: Json, fmt: str) -> None:
    """Warn on stderr if the agent's answer is its last known state, or lacks what cannot be read in the store; JSON and
    YAML have this in the data."""
    if fmt in ("json", "yaml"):
        return
    since, unread = answer.get("store_away_since"), answer.get("unread", [])
    if unread:
        named = "; ".join(f"{one['key']}: {one['why']}" for one in unread[:MOST_UNREAD_NAMED])
        more = f"; and {len(unread) - MOST_UNREAD_NAMED} more" if len(unread) > MOST_UNREAD_NAMED else ""
        echo(f"nodeagentctl: left out, since the store's record cannot be read: {named}{more}", err=True)
    if since is not None:
        echo(  # not for how long: the agent's clock may differ from ours
            f"nodeagentctl: the store has not answered the agent that was asked since {moment(since)}: what is shown "
            "is from then; running jobs go on, on the lease of each node or on failsafe time; through this agent "
            "nothing can be changed until the store answers it",
            err=True,
        )


def show(
    answer: Json, fmt: str, kind: str, columns: Sequence[Column], *, single: bool = False, empty: str = ""
) -> None:
    """Print a list (or, ``single``, one item) in the requested format. If a table has no rows, ``empty`` is printed on
    stderr."""
    notice(answer, fmt)
    rows = [answer] if single else answer["items"]
    if fmt in ("json", "yaml"):
        dump(answer, fmt)
    elif fmt == "name":
        for row in rows:
            echo(f"{kind}/{row['name']}")
    elif not rows:
        echo(empty, err=True)
    else:
        chosen = [c for c in columns if fmt == "wide" or not c.wide]
        echo("\n".join(table_lines(chosen, rows, terminal_width(), coloured())))


def paint(word: str, enabled: bool) -> str:
    """The word in its state's colour."""
    style = STYLES.get(word.strip().lower())
    return click.style(word, fg=style) if enabled and style else word
