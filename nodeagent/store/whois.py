"""Identifies the server behind a connection by its INFO. Standard library only, because the lease process uses it
too."""

from __future__ import annotations


class NotPrimaryError(ConnectionError):
    """The server is a replica."""


def identity(info: dict[str, str]) -> str:
    """Identity of the server process, and of the history of its writes. Raises ConnectionError if INFO does not give
    it: without it a loss of writes would stay unnoticed."""
    process, history = info.get("run_id", ""), info.get("master_replid", "")
    if not process:
        raise ConnectionError("it does not say which process it is (run_id in INFO is empty): agents need that")
    return f"{process}-{history}" if history else process


def require_primary(info: dict[str, str]) -> None:
    """Raises NotPrimaryError for a replica: it refuses writes, and its data may be old."""
    if info.get("role") != "master":
        place = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        raise NotPrimaryError(f"it is a replica of {place}")


def parse_info(text: str) -> dict[str, str]:
    """INFO's ``name:value`` lines."""
    lines = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}
