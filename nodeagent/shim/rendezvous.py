"""The address held for one generation: a listening socket served by a store process, or a free port kept free.

Standard library only. One address at a time; a newer promise lets go of the older one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
from collections.abc import Callable, Iterable, Set
from typing import Any

from nodeagent.osutil.tcp import TABLES, ask_kernel, listeners, owners, sockets
from nodeagent.shim.forkserver.client import ForkServer
from nodeagent.shim.loop import Delay, Loop
from nodeagent.shim.processes import watched

STORE_BOUND = 5.0
"""Seconds until a store process that does not answer is given up, and the port is only kept free."""
LOOK_AGAIN = 5.0
"""Seconds from one look for free ports that there were too few of to the next."""
NAMED = 3
"""Users that a sentence names, those with most ports first."""


def bind_free(host: str, bounds: tuple[int, int], avoid: int = 0, above: int = 0) -> socket.socket:
    """A socket bound to a free port within the bounds, but not to ``avoid``, with so many ports ``above`` it there
    if one is free that has them. Without SO_REUSEADDR first, since only
    that excludes others for certain; ports of which old connections linger are the second choice. Raises OSError if
    there is none. ``host`` is an address: to look up a name would take nobody knows how long."""
    low, high = bounds
    free = [port for port in range(low, high + 1) if port != avoid]
    ports = [port for port in free if port + above <= high]
    first = random.randrange(len(ports)) if ports else 0
    ports = ports[first:] + ports[:first] + [port for port in free if port + above > high]
    family, _, _, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    for reuse in (False, True):
        for port in ports:
            candidate = socket.socket(family, socket.SOCK_STREAM)
            try:
                candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                candidate.bind((target[0], port, *target[2:]))
                if reuse:
                    candidate.listen()
                    candidate.shutdown(socket.SHUT_RDWR)  # bound again, no longer listening
            except OSError as error:
                candidate.close()
                if error.errno == errno.EADDRNOTAVAIL:  # as of every other port
                    raise OSError(f"{host} is no address of this machine") from error
                continue
            return candidate
    raise OSError(f"no free port in {low}-{high} on {host} ({_who_has(range(low, high + 1))})")


def _who_has(ports: range) -> str:
    """In words, for everybody: whose they are."""
    try:
        found = sorted(owners(ports).items(), key=lambda one: (-len(one[1]), one[0]))
    except OSError as error:
        return f"whose they are cannot be read: {error.strerror}"
    named = [f"uid {uid} has {len(held)} of them" for uid, held in found[:NAMED]]
    return ", ".join(named) or "the kernel names nobody for sockets that are bound and do not listen"


def taken(host: str, ports: Iterable[int], me: int, others: Callable[[], Set[int]]) -> str:
    """Which of these ports, that workers here were to bind, somebody else has, in words that "of" and the node's name
    may follow; empty: nobody has, as far as it can be seen. ``me``: the user whose sockets the workers' are;
    ``others``: those whose they may be as well, asked only if a listener is not mine. What is left of connections is
    nobody's."""
    held = {port for port in ports if not _is_free(host, port)}
    if not held:
        return ""
    try:
        users = {port: uids for port, uids in listeners(ask_kernel).items() if port in held}
        strange = {port: uids for port, uids in users.items() if me not in uids}
        mine = others() if strange else set[int]()
        hidden = held - users.keys()
        if hidden:
            hidden -= {one.port for table in TABLES for one in sockets(table)}
    except OSError:  # no descriptor to look with, say: then nobody is accused
        return ""
    for port, uids in sorted(strange.items()):
        if mine.isdisjoint(uids):
            return f"uid {min(uids)} listens on port {port}"
    return f"a socket that the kernel does not list holds port {min(hidden)}" if hidden else ""


def _is_free(host: str, port: int) -> bool:
    """On all addresses: those who are to bind it may want any of them."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


class PortSearch:
    """Whether this node has had too few free ports, as a node that others try then only where they must. Looked at
    again and again until it has them, whatever is asked of the node meanwhile."""

    def __init__(self, loop: Loop, bounds: tuple[int, int], changed: Callable[[], None]) -> None:
        self._loop, self._bounds, self._changed = loop, bounds, changed
        self._again: Delay | None = None
        self.lack = ""
        """Why, in a sentence for everybody; empty: the last search found all."""

    def find(self, host: str, count: int = 1, avoid: int = 0, above: int = 0) -> list[socket.socket]:
        """So many sockets as of ``bind_free``. Raises OSError if there are fewer."""
        found: list[socket.socket] = []
        self.forget()
        try:
            for _ in range(count):
                found.append(bind_free(host, self._bounds, avoid, above))
        except OSError as error:
            _close(found)
            self.lack = str(error)
            self._again = self._loop.after(LOOK_AGAIN, lambda: self._look(host, count, avoid, above))
            raise
        return found

    def forget(self) -> None:
        """The last search was at an address that is this node's no more."""
        self.lack = ""
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _look(self, host: str, count: int, avoid: int, above: int) -> None:
        before = self.lack
        with contextlib.suppress(OSError):  # ``lack`` says so
            _close(self.find(host, count, avoid, above))
        if self.lack != before:
            self._changed()


def _close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


class PlacePorts:
    """Ports that are kept free for the places of one generation on this node, until their workers start."""

    def __init__(self, search: PortSearch) -> None:
        self.search = search
        self._sockets: list[socket.socket] = []
        self.token: dict[str, Any] | None = None
        self.held: list[int] = []
        self.problem = ""

    def hold(self, token: dict[str, Any], local: str, count: int) -> None:
        """So many of this address for this generation instead of those before; none, and ``problem``, if there are too
        few."""
        self.starting()
        self.token, self.held, self.problem = token, [], ""
        try:
            self._sockets = self.search.find(local, count)
        except OSError as error:
            self.problem = str(error)
        self.held = [one.getsockname()[1] for one in self._sockets]

    def starting(self) -> None:
        """The ports are the workers' to bind."""
        _close(self._sockets)
        self._sockets = []


class Holder:
    """Owns the socket and the store process."""

    def __init__(self, loop: Loop, address: str, ports: tuple[int, int], changed: Callable[[], None]) -> None:
        self._loop, self._host, self._changed = loop, address, changed
        self.search = PortSearch(loop, ports, changed)
        self._socket: socket.socket | None = None
        self._store = -1
        """pidfd of the store process that serves now."""
        self._answer = -1
        self._bound: Delay | None = None
        self._last = 0
        self.token: dict[str, Any] | None = None
        self.held: dict[str, Any] | None = None
        """As base.Rendezvous, once the address can be used."""
        self.problem = ""

    @property
    def failed(self) -> bool:
        """There was no address to have; asking again may find one."""
        return self.held is None and bool(self.problem)

    def hold(self, token: dict[str, Any], local: str, fork_server: ForkServer, above: int = 0) -> None:
        """Take a new address; ``held`` follows. ``local``: what the host's name means here, looked up beforehand.
        ``above``: as of ``bind_free``."""
        self.release()
        self.token = token
        try:
            (held,) = self.search.find(local, avoid=self._last, above=above)
        except OSError as error:
            self.problem = str(error)
            self._changed()
            return
        self._socket, self._last = held, held.getsockname()[1]
        if fork_server.warm and fork_server.has_torch:
            self._host_store(held, fork_server)
        else:
            self._ready(store_hosted=False)

    def relocate(self, address: str) -> None:
        """Where the next ones are held; ``held`` stays."""
        self._host = address
        self.search.forget()
        self._changed()

    def starting(self) -> None:
        """The workers start: a port without a store is now rank 0's to bind."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def release(self) -> None:
        """Give up address and store process."""
        self.held = self.token = None
        self.problem = ""
        self._forget_answer()
        self.starting()
        self._kill_store()

    def _host_store(self, held: socket.socket, fork_server: ForkServer) -> None:
        self._answer, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._loop.watch(self._answer, self._answered)
        self._bound = self._loop.after(STORE_BOUND, lambda: self._without_store("the store process did not answer"))
        token = self.token

        def forked(pid: int, error: str) -> None:
            if pid:
                try:
                    self._adopt_store(pid, fork_server)
                except OSError as problem:
                    fork_server.reap(pid, lambda _status: None)
                    pid, error = 0, f"the store process cannot be watched: {problem.strerror}"
            if token is not self.token:
                self._kill_store()
            elif not pid:
                self._without_store(error)

        held.listen(1024)
        fork_server.host_store(self._host, held.getsockname()[1], held.fileno(), theirs, forked)
        os.close(theirs)

    def _answered(self) -> None:
        answer = os.read(self._answer, 4096).decode(errors="replace")
        if answer == "ok":
            self._forget_answer()
            self.starting()
            self._ready(store_hosted=True)
        else:
            self._without_store(answer or "the store process died")

    def _without_store(self, why: str) -> None:
        self._forget_answer()
        self.problem = f"no store process: {why}"  # behind the colon is output, too (plan/pods/report.py)
        self._kill_store()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._ready(store_hosted=False)

    def _adopt_store(self, pid: int, fork_server: ForkServer) -> None:
        """Have it reaped when it ends. Raises OSError."""
        pidfd = self._store = watched(pid)

        def ended() -> None:
            self._loop.forget(pidfd)
            if self._store == pidfd:  # by itself: nobody can join there
                self._store, self.held, self.problem = -1, None, "the store process died"
                self._changed()
            os.close(pidfd)
            fork_server.reap(pid, lambda _status: None)

        self._loop.watch(pidfd, ended)

    def _kill_store(self) -> None:
        if self._store >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._store, signal.SIGKILL)
            self._store = -1

    def _forget_answer(self) -> None:
        if self._bound is not None:
            self._bound.cancel()
            self._bound = None
        if self._answer >= 0:
            self._loop.forget(self._answer)
            os.close(self._answer)
            self._answer = -1

    def _ready(self, store_hosted: bool) -> None:
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.held = {"token": self.token, "address": f"{host}:{self._last}", "store_hosted": store_hosted}
        self._changed()
