"""Durations, sizes and ranges as people write them. Pure: text (or a number) in, a number out, ``CheckError`` if it is
neither. Never knows which key it reads. Loads no pydantic: the tool reads its options with it."""

from __future__ import annotations

import math
import re

from nodeagent.model.duration import MOST_DURATION
from nodeagent.spec.errors import CheckError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_POWERS = {"": 0, "B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
_SIZE = re.compile(r"(\d{1,15})\s*([A-Za-z]*)")
_PORTS = re.compile(r"(\d{1,6})\s*-\s*(\d{1,6})")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,3})?)\s*%")
_LOOKALIKE = {"sec": "s", "secs": "s", "second": "s", "seconds": "s", "min": "m", "mins": "m", "minute": "m",
              "minutes": "m", "hour": "h", "hours": "h", "hr": "h", "day": "d", "days": "d"}  # fmt: skip


def show(value: object) -> str:
    """A value as it would look in the file, short enough for one line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"'{text}'" if isinstance(value, str) else text


def meant(value: object) -> int | None:
    """The whole number that ``010``, ``1e3``, ``1_000`` or a quoted ``"4"`` was meant to be; None if it is unclear."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:  # a float holds these exactly
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]{1,18}", digits := value.strip().replace("_", "")):
        return int(digits)
    return None


def whole(value: object, low: int, high: int, example: str = "") -> int:
    """A whole number within ``low..high``. ``example`` is what to write when it is unclear what was meant."""
    if isinstance(value, int) and not isinstance(value, bool):
        if low <= value <= high:
            return value
        raise CheckError(f"{show(value)} is out of range", f"write a whole number from {low} to {high}")
    if (number := meant(value)) is not None and not low <= number <= high:
        raise CheckError(f"{show(value)} is out of range", f"write a whole number from {low} to {high}")
    if number is None:
        right = f"write {example}" if example else f"write a number such as {max(low, 1)}"
    else:
        right = f"write {number}" + (" without quotes" if str(number) == value else "")
    raise CheckError(f"{show(value)} is not a whole number", right)


def duration(value: object) -> float:
    """``500ms``, ``30s``, ``1h30m``, or a number of seconds, to seconds; ten years at most."""
    seconds = _seconds(value)
    if seconds > MOST_DURATION:
        raise CheckError(f"{show(value)} is out of range", f"it must be at most {MOST_DURATION // 86_400}d")
    return float(seconds)


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not value >= 0:
            raise CheckError(f"{value} is not a duration", "it must not be below zero: write for instance 30s")
        return value
    if not isinstance(value, str):
        raise CheckError(f"{show(value)} is not a duration", "write for instance 30s, 10m or 1h30m")
    text = value.strip()
    if _DURATION.fullmatch(text):
        parts = _PART.findall(text)
        units = [list(_SECONDS).index(unit) for _, unit in parts]
        if units == sorted(set(units), reverse=True):
            return math.fsum(float(number) * _SECONDS[unit] for number, unit in parts)
        raise CheckError(f"{show(value)} is not a duration", "write each unit once, the longest first, as in 1h30m")
    spelled = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text)
    unit = _LOOKALIKE.get(spelled[2].lower(), spelled[2].lower()) if spelled else ""
    if spelled and unit in _SECONDS and (right := spelled[1] + unit) != text:
        raise CheckError(f"{show(value)} is not a duration", f"write {right}")
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise CheckError(f"{show(value)} has no unit", f"write {text}s for seconds or {text}m for minutes")
    raise CheckError(f"{show(value)} is not a duration", "write for instance 500ms, 30s, 10m or 1h30m")


def duration_range(value: object) -> tuple[float, float]:
    """``0s..30s``, or one duration for both ends."""
    low, dots, high = value.partition("..") if isinstance(value, str) else (value, "", value)
    try:
        start, end = duration(low), duration(high if dots else low)
    except CheckError as wrong:
        raise CheckError(f"{show(value)} is not a range of durations", "write for instance 0s..30s") from wrong
    if start > end:
        raise CheckError(
            f"{show(value)} goes down", f"write the shorter one first: {str(high).strip()}..{str(low).strip()}"
        )
    return start, end


def size(value: object) -> int:
    """``64MiB``, or a number of bytes, to bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match and match[2] in _POWERS:
        return int(match[1]) << (10 * _POWERS[match[2]])
    if match and (first := match[2][:1].upper()) in "KMGT" and match[2][1:].lower() in ("", "b", "ib"):
        raise CheckError(f"{show(value)} is not a size", f"write {match[1]}{first}iB (1024-based)")
    raise CheckError(f"{show(value)} is not a size", "write for instance 512KiB, 64MiB or 1GiB, or a number of bytes")


def port_range(value: object) -> tuple[int, int]:
    """``29400-29899`` to its two ends, both inside."""
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(v) is int for v in value):
        low, high = value
    elif isinstance(value, str) and (match := _PORTS.fullmatch(value.strip())):
        low, high = int(match[1]), int(match[2])
    else:
        raise CheckError(f"{show(value)} is not a range of ports", "write for instance 29400-29899")
    if not 1 <= low <= high <= 65535:
        raise CheckError(f"{low}-{high} is not a range of ports", "ports go from 1 to 65535, the lower one first")
    return low, high


def share(value: object) -> float:
    """A share of a whole: ``80%``, or a number from 0 to 1."""
    if isinstance(value, str) and (found := _SHARE.fullmatch(value.strip())):
        return float(found[1]) / 100
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise CheckError(f"{show(value)} is not a share", "write for instance 80%, or 0.8")
