"""Identity: one agent at a time, a life that outlives agents and ends with the boot, starts that are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.agent.identity import Identity, IdentityError, LockHeldError

Make = Callable[..., Identity]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Identity] = []

    def one(boot: str = "boot-1") -> Identity:
        made.append(Identity(tmp_path / "run", boot))
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


def test_a_renewed_life_is_new_and_lasts(make: Make) -> None:
    first = make()
    one = first.take()
    renewed = first.renew()
    assert (renewed.life != one.life, renewed.start) == (True, 1)
    first.release()
    again = make().take()
    assert (again.life, again.start) == (renewed.life, 2)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"boot_id": "boot-1"}', '{"boot_id": "boot-1", "life": "x", "start": "y"}']
)
def test_a_damaged_file_is_never_guessed_at(make: Make, tmp_path: Path, text: str) -> None:
    file = tmp_path / "run" / "life.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(IdentityError, match=r"life\.json is damaged .*remove it"):
        make().take()
    assert file.read_text() == text


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
