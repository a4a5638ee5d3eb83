"""Orders, and what the lease process shows and keeps: written and read back, and whatever else may lie there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.lease.core import Departure
from nodeagent.lease.order import LeaseOrder, Server, Tls, order_file, read_order, remove_order, script_of, write_order
from nodeagent.lease.statefiles import (
    NOT_BRIDGED,
    Bridged,
    LeaseStatus,
    Pulse,
    PulseWriter,
    address_reader,
    bridged_reader,
    find_holder,
    pulse_file,
    read_departure,
    read_pulse,
    read_status,
    read_withdrawn,
    take_lock,
    write_address,
    write_bridged,
    write_departure,
    write_status,
    write_withdrawn,
)
from nodeagent.lease.withdrawals import Withdrawal, Withdrawals
from tests.descriptors import seen_with
from tests.unit.lease.build import ORDER as PLAIN
from tests.unit.lease.build import SOURCES

ORDER = PLAIN._replace(server=PLAIN.server._replace(greeting=(("AUTH", "ann", "pw"), ("SELECT", "3"))))
OVER_TLS = ORDER._replace(server=ORDER.server._replace(tls=Tls("ca", "", "", "name")))


@pytest.mark.parametrize("order", [ORDER, OVER_TLS, ORDER._replace(server=Server("/s", "", 0, (), None))])
def test_an_order_is_read_as_it_was_written_and_by_nobody_else(tmp_path: Path, order: LeaseOrder) -> None:
    write_order(tmp_path, order, SOURCES)
    assert read_order(tmp_path, "b") == order
    assert order_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_without_a_descriptor_nothing_counts_as_not_written(tmp_path: Path) -> None:
    """A lease process that starts then would take a life up again that was to go."""
    departure, status = Departure("l1", 1, "e1", 5.0, True, "why"), LeaseStatus("left", "why", ("l1", 1, "e1"))
    write_departure(tmp_path, departure)
    write_status(tmp_path, status)
    pulse = Pulse(1.0, 2.0, 3.0, 4.0)
    PulseWriter(tmp_path).beat(pulse)
    withdrawn = Withdrawals("l1", {"u1": Withdrawal(4, 12.5)})
    write_withdrawn(tmp_path, withdrawn)
    looks: tuple[tuple[Callable[[], object], object], ...] = (
        (lambda: read_departure(tmp_path, 20.0), departure),
        (lambda: read_status(tmp_path), status),
        (lambda: read_pulse(pulse_file(tmp_path)), pulse),
        (lambda: read_withdrawn(tmp_path, 20.0), withdrawn),
    )
    for look, written in looks:

        def sees(look: Callable[[], object] = look, written: object = written) -> None:
            assert look() == written

        assert seen_with(sees, 2) == [False, True]


def test_there_is_none(tmp_path: Path) -> None:
    assert read_order(tmp_path, "b") is None
    write_order(tmp_path, ORDER, SOURCES)
    assert read_order(tmp_path, "another boot") is None


def test_its_scripts_lie_beside_it_as_long_as_it_does(tmp_path: Path) -> None:
    def sources() -> dict[str, str]:
        return {file.stem: file.read_text() for file in tmp_path.glob("*.lua")}

    write_order(tmp_path, ORDER, SOURCES)
    assert sources() == SOURCES
    assert script_of(tmp_path, ORDER.renew).file.read_text() == SOURCES[ORDER.renew]
    assert order_file(tmp_path).stat().st_size < 2000, "it is read without them"
    later = {"d": "return 4", "b": "return 2", "c": "return 3"}
    write_order(tmp_path, ORDER._replace(renew="d"), later)
    assert sources() == later
    for _ in range(2):
        remove_order(tmp_path)
        assert not list(tmp_path.iterdir())


def test_an_order_that_cannot_be_written_takes_no_script_from_the_one_before(tmp_path: Path) -> None:
    write_order(tmp_path, ORDER, SOURCES)
    (tmp_path / "order.json.new").mkdir()
    with pytest.raises(IsADirectoryError):
        write_order(tmp_path, ORDER._replace(renew="d"), {"d": "return 4"})
    assert read_order(tmp_path, "b") == ORDER
    assert all(script_of(tmp_path, sha).file.read_text() == source for sha, source in SOURCES.items())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', "1"])
def test_what_is_no_order_is_reported(tmp_path: Path, text: str) -> None:
    order_file(tmp_path).write_text(text)
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_order(tmp_path, "b")


@pytest.mark.parametrize("change", [{"new": 1}, {"fence": None}])
def test_an_order_of_another_version_is_reported(tmp_path: Path, change: dict[str, object]) -> None:
    write_order(tmp_path, ORDER, SOURCES)
    data = json.loads(order_file(tmp_path).read_text()) | change
    order_file(tmp_path).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    with pytest.raises(TypeError):
        read_order(tmp_path, "b")


def test_what_runs_without_the_store_and_where_it_is_asked(tmp_path: Path) -> None:
    assert (bridged_reader(tmp_path).once(), address_reader(tmp_path).once()) == (NOT_BRIDGED, "")
    bridged = Bridged({"u1": 12.5}, {"u2": "why"})
    write_bridged(tmp_path, bridged)
    write_address(tmp_path, "10.0.0.1:29400")
    assert (bridged_reader(tmp_path).once(), address_reader(tmp_path).once()) == (bridged, "10.0.0.1:29400")
    (tmp_path / "failsafe.json").write_text("{}")
    (tmp_path / "address").write_bytes(b"\xff")
    assert (bridged_reader(tmp_path).once(), address_reader(tmp_path).once()) == (NOT_BRIDGED, "")


def test_its_pulse(tmp_path: Path) -> None:
    assert read_pulse(pulse_file(tmp_path)) is None
    writer = PulseWriter(tmp_path)
    assert read_pulse(pulse_file(tmp_path)) is None
    for pulse in (Pulse(1.5, 1.0, 3.0, 1.0), Pulse(2.5, 2.0, 0.0, 1.5)):
        writer.beat(pulse)
        assert read_pulse(pulse_file(tmp_path)) == pulse
    data = (tmp_path / "pulse").read_bytes()
    (tmp_path / "pulse").write_bytes(data[:32] + bytes(32))
    assert read_pulse(pulse_file(tmp_path)) is None, "half of it is old"


def test_nobody_holds_the_lock(tmp_path: Path) -> None:
    assert find_holder(tmp_path) is None
    (tmp_path / "lock").write_text("1 0.1.0\n")
    assert find_holder(tmp_path) is None, "it was left behind"


def test_who_holds_the_lock_is_not_seen_by_itself(tmp_path: Path) -> None:
    """A process's own locks do not stand in its way; tests of the process see the others'."""
    assert take_lock(tmp_path, "0.1.0") is not None
    assert find_holder(tmp_path) is None
