"""Identity: one agent at a time, a life that outlives agents and ends with the boot, starts that are counted."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.agent.identity import Identity, IdentityError, LockHeldError
from nodeagent.spec.errors import CheckError
from tests.folders import is_held

Make = Callable[..., Identity]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Identity] = []

    def one(boot: str = "boot-1", configured: str | None = None, hostname: str = "n1.example.org") -> Identity:
        made.append(Identity(tmp_path / "run", boot, configured, hostname))
        return made[-1]

    yield one
    for identity in made:
        identity.release()


def test_a_restart_keeps_the_life_and_counts(make: Make) -> None:
    first = make()
    one = first.take()
    first.release()
    two = make().take()
    assert (one.start, two.start) == (1, 2)
    assert one.life == two.life


def test_a_reboot_ends_the_life(make: Make) -> None:
    first = make()
    one = first.take()
    first.release()
    two = make("boot-2").take()
    assert two.start == 1
    assert two.life != one.life


def test_a_second_agent_is_refused_and_the_first_is_named(make: Make, tmp_path: Path) -> None:
    one = make().take()
    pid = (tmp_path / "run" / "agent.lock").read_text().strip()
    with pytest.raises(LockHeldError, match=rf"another agent \(pid {pid}\) .*kill -9.*dirs\.run"):
        make().take()
    assert one.start == 1


def test_what_is_old_in_the_run_folder_is_removed_by_nobody_while_an_agent_is_there(make: Make, tmp_path: Path) -> None:
    """systemd-tmpfiles passes over a folder of /tmp that it cannot lock: what a job needs was gone after ten days."""
    (identity := make()).take()
    assert is_held(tmp_path / "run")
    identity.release()
    assert not is_held(tmp_path / "run")
    folder = os.open(tmp_path / "run", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        make().take()  # waits for nobody who cleans there
    finally:
        os.close(folder)


def test_a_renewed_life_is_new_and_lasts(make: Make) -> None:
    first = make()
    one = first.take()
    renewed = first.renew()
    assert (renewed.life != one.life, renewed.start) == (True, 1)
    first.release()
    again = make().take()
    assert (again.life, again.start) == (renewed.life, 2)


@pytest.mark.parametrize("hostname", ["renamed.example.org", "localhost"])
def test_a_machine_that_is_renamed_is_the_same_node_until_its_next_boot(make: Make, hostname: str) -> None:
    first = make()
    one = first.take()
    first.release()
    second = make(hostname=hostname)
    two = second.take()
    assert (second.node, second.before, two.life, two.start) == ("n1", "", one.life, 2)
    renewed = second.renew()
    second.release()
    third = make(hostname=hostname)
    assert (third.take().life, third.node) == (renewed.life, "n1"), "a new life of this boot, too"


def test_with_the_next_boot_a_node_is_called_as_its_machine_is_then(make: Make) -> None:
    first = make()
    one = first.take()
    first.release()
    second = make("boot-2", hostname="renamed")
    assert (second.take().life != one.life, second.node, second.before) == (True, "renamed", "")


@pytest.mark.parametrize("configured", ["n2", "n1"])
def test_a_life_never_goes_on_as_a_node_that_the_config_names(make: Make, configured: str) -> None:
    """n1 is the node already: a config that says so keeps it."""
    first = make()
    one = first.take()
    first.release()
    second = make(configured=configured, hostname="renamed")
    two = second.take()
    assert (second.node, second.before) == (configured, "" if configured == "n1" else "n1")
    second.release()
    if configured == "n2":
        third = make()
        assert (third.take().life, third.node) == (one.life, "n1"), "what runs is n1's as long as n2 has no life"
        third.release()
        second = make(configured=configured)
        second.take()
        two = second.renew()
        assert (second.before, two.life != one.life) == ("", True)
        second.release()
    again = make(configured=configured)
    assert (again.take().life, again.node, again.before) == (two.life, configured, "")


def test_a_name_that_no_node_can_have_is_refused_for_a_new_life_alone(make: Make) -> None:
    with pytest.raises(CheckError, match=r"set node\.id"):
        make(hostname="localhost").take()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"boot_id": "boot-1"}', '{"boot_id": "boot-1", "node": "n1", "life": "x", "start": "y"}',
        '{"boot_id": "boot-1", "life": "x", "start": 1}', '{"boot_id": "boot-1", "node": 7, "life": "x", "start": 1}',
        '{"boot_id": "boot-1", "node": "/", "life": "x", "start": 1}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_never_guessed_at(make: Make, tmp_path: Path, text: str) -> None:
    file = tmp_path / "run" / "life.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(IdentityError, match=r"life\.json is damaged .*remove it"):
        make().take()
    assert file.read_text() == text


def test_a_pipe_in_the_place_of_the_file_holds_up_no_start(make: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "life.json")
    with pytest.raises(IdentityError, match=r"life\.json is damaged .*it is no regular file.*remove it"):
        make().take()


def test_release_may_be_called_twice(make: Make) -> None:
    identity = make()
    identity.take()
    identity.release()
    identity.release()
    make().take()


def test_a_start_beside_another_agent_counts_nothing(make: Make, tmp_path: Path) -> None:
    make().take()
    before = (tmp_path / "run" / "life.json").read_text()
    with pytest.raises(LockHeldError, match="another agent"):
        make().take()
    assert (tmp_path / "run" / "life.json").read_text() == before
