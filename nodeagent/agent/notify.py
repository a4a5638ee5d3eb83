"""sd_notify: telling systemd that the agent is ready, alive, and what it does. Silent where systemd did not start
it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends to NOTIFY_SOCKET (a path, or abstract with a leading @)."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        usec = environ.get("WATCHDOG_USEC", "")
        self.watchdog = int(usec) / 1e6 if usec.isdigit() else None
        """Seconds between two pings that systemd allows at most; None without a watchdog."""
        self._status = ""

    def ready(self) -> None:
        self._send(f"READY=1\nMAINPID={os.getpid()}")

    def alive(self) -> None:
        """Feed the watchdog: call only after real progress of the loop."""
        if self.watchdog is not None:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; sent only when it changed."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def stopping(self, patience: float | None = None) -> None:
        """``patience``: seconds that this may take, whatever the unit says."""
        self._send("STOPPING=1" + (f"\nEXTEND_TIMEOUT_USEC={round(patience * 1e6)}" if patience is not None else ""))

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            try:
                out.sendto(message.encode(), address)
            except OSError:  # systemd went away or the socket is full: it will ask again by itself
                return
