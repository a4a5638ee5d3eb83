"""Identity: one agent at a time, a life that outlives agents and ends with the boot, starts that are counted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.agent.identity import Identity, IdentityError

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
    with pytest.raises(IdentityError, match=rf"another agent \(pid {pid}\) .*dirs\.run"):
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


HOLDER = """
import os, sys
from pathlib import Path
from nodeagent.agent.identity import Identity
identity = Identity(Path(sys.argv[1]), "boot-1")
identity.take()
identity.hand_to(os.getpid())
print(identity.awaited, flush=True)
for line in sys.stdin:
    if line.strip().isdigit():
        identity.hold_off(float(line))
    print(identity.awaited, flush=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run folder as a stand-in; it answers each line with whether it is awaited."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        yield process
        process.kill()


def asked(process: subprocess.Popen[str], line: str = "?") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_start_waits_behind_a_stand_in_and_then_ends_it(make: Make, stand_in: subprocess.Popen[str]) -> None:
    start = make()
    start.queue()
    assert start.stood_in_for
    assert asked(stand_in) == "True", "it waits for as long as the start takes"
    assert stand_in.poll() is None
    assert start.take().start == 2
    assert stand_in.wait(5) == -signal.SIGKILL
    assert not start.stood_in_for


def test_one_start_at_a_time_waits(make: Make, stand_in: subprocess.Popen[str]) -> None:
    make().queue()
    with pytest.raises(IdentityError, match="another agent is just starting"):
        make().queue()
    assert stand_in.poll() is None


def test_a_start_that_is_given_up_is_not_waited_for(make: Make, stand_in: subprocess.Popen[str]) -> None:
    start = make()
    start.queue()
    start.release()
    assert asked(stand_in) == "False"


def test_a_stand_in_that_has_gone_meanwhile_is_no_hindrance(make: Make, stand_in: subprocess.Popen[str]) -> None:
    start = make()
    start.queue()
    stand_in.kill()
    stand_in.wait()
    assert not start.stood_in_for
    assert start.take().start == 2


def test_an_agent_that_is_no_stand_in_is_left_alone(make: Make) -> None:
    make().take()
    with pytest.raises(IdentityError, match="another agent"):
        make().queue()


def test_a_start_that_cannot_be_leaves_the_stand_in_alone(
    make: Make, stand_in: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "run" / "life.json").write_text("{")
    with pytest.raises(IdentityError, match=r"life\.json is damaged"):
        make().take()
    assert asked(stand_in) == "True"


def test_a_stand_in_says_until_when_it_must_not_be_ended(make: Make, stand_in: subprocess.Popen[str]) -> None:
    start = make()
    start.queue()
    assert start.held_off == 0.0
    asked(stand_in, "12345678")
    assert start.held_off == 12345678.0
    asked(stand_in, "5")
    assert start.held_off == 5.0, "nothing of the longer line is left"
    start.take()
    assert start.held_off == 0.0
