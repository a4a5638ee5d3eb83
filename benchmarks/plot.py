"""The recovery table as a picture, ``docs/benchmarks.svg``: bars on a scale of powers of ten. Pure."""

from __future__ import annotations

import math
import statistics
from html import escape
from typing import Any

from benchmarks.recovery import ROWS

Results = dict[str, Any]

WIDTH, LEFT, RIGHT = 900, 380, 70
BAR, GAP, TOP = 12, 14, 34
LEAST, MOST = 0.01, 100.0
"""Seconds at the ends of the scale."""
OURS, RIVAL = "#2b6cb0", "#b0b7c3"


def svg(results: Results) -> str:
    """Medians; rows that were not measured are left out."""
    parts, y = [], TOP
    for phase, row in ROWS.items():
        if phase not in results:
            continue
        parts.append(_text(LEFT - 10, y + BAR + 4, row.text.replace("`", ""), "end"))
        for name, colour in (("nodeagent", OURS), ("torchrun", RIVAL)):
            if seconds := results[phase].get(name):
                parts.append(_bar(y, statistics.median(seconds), colour))
            elif name == "torchrun":
                why = results[phase].get("torchrun_instead") or row.instead
                parts.append(_text(LEFT + 6, y + BAR - 2, why, "start", RIVAL))
            y += BAR
        y += GAP
    height = y + 10
    lines = []
    for power in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
        x = _x(10.0**power)
        lines.append(f'<line x1="{x:.0f}" y1="{TOP - 8}" x2="{x:.0f}" y2="{height}" stroke="#e2e6ec"/>')
        lines.append(_text(x, TOP - 14, f"{10.0**power:g} s", "middle"))
    generation = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
    )
    legend = _text(10, 16, "nodeagent", "start", OURS) + "\n" + _text(90, 16, "torchrun, tuned", "start", "#6b7280")
    return generation + "\n".join([*lines, legend, *parts]) + "\n</svg>\n"


def _x(seconds: float) -> float:
    share = math.log10(min(max(seconds, LEAST), MOST) / LEAST) / math.log10(MOST / LEAST)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _bar(y: float, seconds: float, colour: str) -> str:
    width = max(1.0, _x(seconds) - LEFT)
    bar = f'<rect x="{LEFT}" y="{y:g}" width="{width:.0f}" height="{BAR - 1}" fill="{colour}"/>'
    return bar + "\n" + _text(LEFT + width + 6, y + BAR - 2, f"{seconds:.3g} s", "start")


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#1f2937") -> str:
    return f'<text x="{x:.0f}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
