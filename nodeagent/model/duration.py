"""The longest duration. Standard library only: the tool reads durations before it loads anything else."""

from __future__ import annotations

MOST_DURATION = 3650 * 86_400
"""Seconds: ten years. A moment that is reckoned with a duration must be a date."""
