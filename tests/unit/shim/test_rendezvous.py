"""Which port is taken for a rendezvous, or for a place; and what comes of a store process that cannot be had."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.plan.pods.report import without_output
from nodeagent.shim.loop import Loop
from nodeagent.shim.rendezvous import Holder, PlacePorts, PortSearch, bind_free, taken

BOUND = 20.0


@pytest.fixture
def low() -> Iterator[int]:
    """The first of ten ports that nobody has now."""
    for first in range(21_000, 30_000, 10):
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + 10):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
        yield first
        return
    pytest.fail("no ten free ports")


@pytest.mark.parametrize("above", [0, 4, 9, 10, 5000])
def test_what_counts_up_from_a_port_stays_in_the_range(low: int, above: int) -> None:
    """As long as a port is free that has so many above it; then any port will do."""
    taken: list[socket.socket] = []
    try:
        for _ in range(10):
            taken.append(bind_free("127.0.0.1", (low, low + 9), above=above))
        with pytest.raises(OSError, match=f"no free port in {low}-{low + 9} on 127.0.0.1"):
            taken.append(bind_free("127.0.0.1", (low, low + 9), above=above))
        ports = [one.getsockname()[1] - low for one in taken]
        room = max(0, 10 - above)
        assert sorted(ports[:room]) == list(range(room)) and sorted(ports) == list(range(10))
    finally:
        for one in taken:
            one.close()


def test_who_has_the_ports_is_named_and_they_are_looked_for_again(low: int) -> None:
    """By the users that the kernel lists; and a node that was without is told from one that was not, until it has so
    many again."""
    seen = list[str]()
    taken = [socket.create_server(("127.0.0.1", low + n)) for n in range(10)]
    search = PortSearch(Loop(), (low, low + 9), lambda: seen.append(search.lack))
    places, mine = PlacePorts(search), f"uid {os.getuid()} has"
    try:
        places.hold({"number": 1, "id": "g1"}, "127.0.0.1", 2)
        assert search.lack == f"no free port in {low}-{low + 9} on 127.0.0.1 ({mine} 10 of them)"
        assert places.problem == search.lack and not places.held
        for left in (9, 8):
            assert search._again is not None
            search._again.cancel()
            taken.pop().close()
            search._look("127.0.0.1", 2, 0, 0)
            assert (f"{mine} {left} of them" in search.lack) == (left == 9), "one is too few"
        assert len(seen) == 2 and search._again is None
        places.hold({"number": 2, "id": "g2"}, "127.0.0.1", 2)
        assert len(places.held) == 2
    finally:
        places.starting()
        for one in taken:
            one.close()


def test_ports_that_are_only_bound_have_no_owner_that_the_kernel_names(low: int) -> None:
    taken = [socket.socket() for _ in range(10)]
    try:
        for n, one in enumerate(taken):
            one.bind(("127.0.0.1", low + n))
        with pytest.raises(OSError, match=r"\(the kernel names nobody for sockets that are bound and do not listen\)$"):
            bind_free("127.0.0.1", (low, low + 9))
    finally:
        for one in taken:
            one.close()


def test_who_has_a_port_that_was_kept_for_workers(low: int) -> None:
    """Whoever it is: a port on another address is in the way of workers that want all of them."""
    me, asked = os.getuid(), list[int]()

    def others() -> set[int]:
        asked.append(1)
        return {me}

    assert taken("127.0.0.1", [low, low + 1], -1, others) == "" and not asked, "free ports cost no look"
    with socket.create_server(("127.0.0.2", low + 1)):
        assert taken("127.0.0.1", [low, low + 1], me, others) == "" and not asked
        assert taken("127.0.0.1", [low, low + 1], -1, others) == "" and asked
        assert taken("127.0.0.1", [low, low + 1], -1, set) == f"uid {me} listens on port {low + 1}"
    with socket.create_server(("127.0.0.1", low + 2)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        with socket.create_connection(("127.0.0.1", low + 2)), listener.accept()[0]:
            listener.close()
            assert taken("127.0.0.1", [low + 2], -1, set) == "", "what is left of connections listens to nobody"
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", low))
        assert taken("127.0.0.1", [low], me, set) == f"a socket that the kernel does not list holds port {low}"


def test_an_address_of_another_machine_is_named_not_its_ports() -> None:
    with pytest.raises(OSError, match=r"^192\.0\.2\.1 is no address of this machine$"):
        bind_free("192.0.2.1", (21_000, 21_009))


def test_without_a_store_process_the_workers_start_and_what_it_wrote_is_not_for_all(low: int) -> None:
    def host_store(_host: str, _port: int, _listening: int, answer: int, _forked: Any) -> None:
        os.write(answer, b"RuntimeError: s3cret")

    server = cast("Any", SimpleNamespace(warm=True, has_torch=True, host_store=host_store))
    holder = Holder(Loop(), "127.0.0.1", (low, low + 9), lambda: None)
    holder.hold({"number": 1, "id": "g1"}, "127.0.0.1", server)
    holder._answered()
    assert holder.held is not None and not holder.held["store_hosted"]
    assert holder.problem == "no store process: RuntimeError: s3cret"
    assert without_output(holder.problem) == ("no store process", "RuntimeError: s3cret")
    holder.release()


def test_a_node_that_is_reached_elsewhere_now_holds_the_next_one_there(low: int) -> None:
    """And it has not too few ports: it had no address to look at."""
    server = cast("Any", SimpleNamespace(warm=False, has_torch=False))
    seen = list[str]()
    holder = Holder(Loop(), "192.0.2.1", (low, low + 9), lambda: seen.append(holder.search.lack))
    holder.hold({"number": 1, "id": "g1"}, "192.0.2.1", server)
    assert holder.failed and "no address of this machine" in holder.search.lack
    holder.relocate("127.0.0.1")
    assert (holder.search.lack, holder.search._again, seen[-1]) == ("", None, "")
    holder.hold({"number": 1, "id": "g1"}, "127.0.0.1", server)
    assert holder.held is not None and holder.held["address"].startswith("127.0.0.1:")
    held = dict(holder.held)
    holder.relocate("127.0.0.2")
    assert holder.held == held, "the agents know that one"
    holder.release()


class Stores:
    """A fork server whose store processes serve nobody."""

    warm = has_torch = True

    def __init__(self) -> None:
        self.last: subprocess.Popen[bytes] | None = None

    def host_store(self, _host: str, _port: int, _fd: int, answer: int, forked: Callable[[int, str], None]) -> None:
        self.last = subprocess.Popen(["sleep", "600"])
        forked(self.last.pid, "")
        os.write(answer, b"ok")

    def reap(self, _pid: int, _then: Callable[[int], None]) -> None:
        assert self.last is not None
        self.last.wait()


def test_an_address_whose_store_has_died_is_held_no_longer() -> None:
    """Nobody could have joined there, and nothing asked for another one."""
    loop, stores, token = Loop(), Stores(), {"number": 1, "id": "g1"}
    seen: list[tuple[dict[str, Any] | None, str]] = []

    def hold() -> None:
        holder.hold(token, "127.0.0.1", cast(Any, stores))

    def changed() -> None:
        seen.append((holder.held, holder.problem))
        if len(seen) == 1:
            assert stores.last is not None
            stores.last.kill()
        elif holder.failed:
            loop.after(0.0, hold)
        else:
            loop.stop()

    holder = Holder(loop, "127.0.0.1", (20_000, 20_999), changed)
    loop.after(BOUND, loop.stop)
    try:
        hold()
        loop.run()
        (first, _), (none, problem), (second, _) = seen
        assert (none, problem) == (None, "the store process died")
        assert first is not None and second is not None and first["store_hosted"] and second["store_hosted"]
        assert first["address"] != second["address"]
    finally:
        holder.release()
        if stores.last is not None:
            stores.last.kill()
            stores.last.wait()
