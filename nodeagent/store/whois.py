"""Which server a connection leads to, from its INFO. Standard library only: the lease process asks it too."""

from __future__ import annotations


class NotPrimaryError(ConnectionError):
    """The server is a replica."""


def identity(info: dict[str, str]) -> str:
    """Of the server process, and of the history of writes that it is in. Raises ConnectionError where the server does
    not say who it is: without that no loss of writes is noticed."""
    process, history = info.get("run_id", ""), info.get("master_replid", "")
    if not process:
        raise ConnectionError("it does not say which process it is (run_id in INFO is empty): agents need that")
    return f"{process}-{history}" if history else process


def require_primary(info: dict[str, str]) -> None:
    """Raises NotPrimaryError for a replica: it refuses writes, and what it tells is old."""
    if info.get("role") != "master":
        place = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        raise NotPrimaryError(f"it is a replica of {place}")


def parse_info(text: str) -> dict[str, str]:
    """INFO's ``name:value`` lines."""
    lines = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}
