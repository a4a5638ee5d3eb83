"""Killing a process that may hang in the driver: it is waited for a moment, never longer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

DIES = 1.0
"""Seconds in which a killed process is gone, unless the kernel holds it."""


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill it and all of its session, which must be its own; one that does not die is left to itself."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DIES):
            await process.wait()
