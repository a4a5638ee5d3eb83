"""How answers are shown: table, wide, json, yaml, name. Plain aligned columns off a terminal, colours on one.

Must never cut a cell off a terminal, and never print anything but data on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

Json = dict[str, Any]

STYLES = {
    "running": "green", "succeeded": "green", "ready": "green",
    "queued": "yellow", "forming": "yellow", "holding": "yellow", "pausing": "yellow", "paused": "yellow",
    "cordoned": "yellow", "draining": "yellow", "restarting": "yellow", "silent": "red",
    "failed": "red", "lost": "red", "stopped": "bright_black", "left": "bright_black",
}  # fmt: skip
"""Phase or node state to colour, on a terminal."""


@dataclass(frozen=True, slots=True)
class Column:
    """A title and how to get the cell from an item."""

    title: str
    cell: Callable[[Json], object]
    wide: bool = False
    """Only in ``-o wide``."""


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def coloured() -> bool:
    """Whether colours are wanted: on a terminal, unless NO_COLOR is set."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def text(value: object) -> str:
    """A cell: nothing is ``-``."""
    return "-" if value is None or value == "" else str(value)


def span(seconds: float | None) -> str:
    """A duration as kubectl shows it: 42s, 5m12s, 3h2m, 2d4h."""
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


def table_lines(columns: Sequence[Column], rows: Sequence[Json]) -> list[str]:
    """Aligned plain columns, upper-case titles, three spaces apart, as kubectl's."""
    cells = [[c.title for c in columns]] + [[text(c.cell(row)) for c in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return ["   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _rich_table(columns: Sequence[Column], rows: Sequence[Json]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.title, overflow="fold")
    for row in rows:
        cells = [text(c.cell(row)) for c in columns]
        table.add_row(*(Text(cell, style=STYLES.get(cell.lower(), "")) for cell in cells))
    Console(highlight=False, no_color=not coloured()).print(table)


def dump(value: object, fmt: str) -> None:
    """As JSON or YAML."""
    if fmt == "yaml":
        import yaml

        click.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), nl=False)
    else:
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def notice(answer: Json, fmt: str) -> None:
    """Say on stderr that the agent speaks of what it last knew, where that is so; JSON and YAML have it within."""
    since = answer.get("store_away_since")
    if since is not None and fmt not in ("json", "yaml"):
        ago = span(max(0.0, time.time() - since))
        click.echo(
            f"nodeagentctl: the store has not answered for {ago}: what is shown is from then; running jobs go on while "
            "their keepers lend them time, nothing can be changed or recovered until it is back",
            err=True,
        )


def show(
    answer: Json, fmt: str, kind: str, columns: Sequence[Column], *, single: bool = False, empty: str = ""
) -> None:
    """Print a list (or, ``single``, one item) in the format asked for. ``empty`` is said on stderr when a table has no
    rows."""
    notice(answer, fmt)
    rows = [answer] if single else answer["items"]
    if fmt in ("json", "yaml"):
        dump(answer, fmt)
    elif fmt == "name":
        for row in rows:
            click.echo(f"{kind}/{row['name']}")
    elif not rows:
        click.echo(empty, err=True)
    else:
        chosen = [c for c in columns if fmt == "wide" or not c.wide]
        if on_terminal():
            _rich_table(chosen, rows)
        else:
            click.echo("\n".join(table_lines(chosen, rows)))


def paint(word: str, enabled: bool) -> str:
    """The word in its state's colour."""
    style = STYLES.get(word.lower())
    return click.style(word, fg=style) if enabled and style else word
