"""Looking at this machine: real folders, sockets and files."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import subprocess
import threading
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from nodeagent.doctor.machine import NEEDED, Looker, _taken, clock_rate, closed, look_at, look_at_folder, rate_of
from nodeagent.hardware import discovery
from nodeagent.hardware.expected import Seen
from nodeagent.hardware.saved import FILE, SavedHealth, save_memory
from nodeagent.model.facts import HostFacts
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.trust.certificate import certificate_digest, fingerprint

ROOT = os.geteuid() == 0
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def config(folder: Path, **more: Any) -> AgentConfig:
    dirs = {"run": folder / "run", "state": folder / "state", "logs": folder / "logs"}
    return AgentConfig.model_validate({"dirs": dirs} | more)


def test_a_look_at_this_machine(tmp_path: Path) -> None:
    facts = look_at(config(tmp_path), "n1", "127.0.0.1", 0)
    assert [f.key for f in facts.folders] == ["dirs.run", "dirs.state", "dirs.logs"]
    assert [f.problem for f in facts.folders] == ["", "", ""], "they can be made"
    assert facts.folders[0].free and facts.folders[0].total
    assert facts.shm_free is not None and facts.shm_total is not None and facts.shm_free <= facts.shm_total
    assert facts.memlock == resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert (facts.address_problem, facts.interface, facts.interface_state) == ("", "", None)
    assert facts.root == ROOT
    assert not (tmp_path / "run").exists(), "it changes nothing"


def test_a_machine_that_was_renamed_under_its_node(tmp_path: Path) -> None:
    here = socket.gethostname().partition(".")[0].lower()
    found = [look_at(config(tmp_path), name, "", gpus).other_name for name in (here, "n1") for gpus in (0, None)]
    assert found == ["", "", here, ""], "without an agent there is no node of an older name"
    assert look_at(config(tmp_path, node={"id": "n1"}), "n1", "", 0).other_name == ""


def test_without_an_agent_its_limits_are_not_known_but_its_modules_are(tmp_path: Path) -> None:
    facts = look_at(config(tmp_path), "n1", "", None)
    assert (facts.memlock, facts.missing) == (None, ())


def test_an_installation_has_all_that_is_looked_for() -> None:
    wanted = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    installed = {re.split(r"[<>=]", one)[0] for one in wanted}
    brought = packages_distributions()
    assert [name for name in NEEDED if not installed & {one.lower().replace("_", "-") for one in brought[name]}] == []


def test_an_address_that_is_not_this_machines(tmp_path: Path) -> None:
    assert look_at(config(tmp_path), "n1", "192.0.2.7", 0).address_problem == "Cannot assign requested address"


def test_a_certificate(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pem", tmp_path / "bad.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "10", "-subj", "/CN=n1"]
    subprocess.run([*make, "-keyout", "/dev/null", "-out", str(good)], check=True, capture_output=True, timeout=30)
    left = look_at(config(tmp_path, api={"tls": {"cert": str(good)}}), "n1", "", 0).certificate_left
    assert left is not None and 9.9 * 86400 < left <= 10 * 86400
    assert certificate_digest(good) == fingerprint(good.read_text()) != ""
    assert certificate_digest(tmp_path / "none.pem") == ""
    bad.write_text("nothing")
    facts = look_at(config(tmp_path, api={"tls": {"cert": str(bad)}}), "n1", "", 0)
    assert (facts.certificate, facts.certificate_left) == (str(bad), None)
    assert "openssl cannot read it" in facts.certificate_problem
    assert look_at(config(tmp_path, api={"listen": "off", "tls": {"cert": str(bad)}}), "n1", "", 0).certificate == ""


def test_interfaces(tmp_path: Path) -> None:
    there = look_at(config(tmp_path, node={"data_interface": "lo"}), "n1", "", 0)
    assert (there.interface, there.interface_state) == ("lo", "unknown")
    assert look_at(config(tmp_path, node={"data_interface": "ib9"}), "n1", "", 0).interface_state == "missing"


def test_gpus_without_a_driver_where_no_agent_reports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = ("0000:3b:00",)
    monkeypatch.setattr(discovery, "installed_slots", lambda: slots)
    monkeypatch.setattr(discovery, "SIGNS", ())

    def undriven(gpus: int | None, **more: Any) -> tuple[str, ...]:
        return look_at(config(tmp_path, **more), "n1", "", gpus).undriven

    assert (undriven(None), undriven(0, health="off")) == (slots, slots)
    assert undriven(0) == (), "its agent has a verdict, or was told to do without them"
    assert undriven(None, node={"gpus": "none"}) == undriven(None, node={"gpus": ["GPU-a"]}) == ()
    monkeypatch.setattr(discovery, "SIGNS", (tmp_path,))
    assert undriven(None) == ()


def test_gpus_that_were_acknowledged_as_gone_are_missed_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were reported as before wherever no agent ran."""
    slots = ("0000:3b:00", "0000:5e:00")
    monkeypatch.setattr(discovery, "installed_slots", lambda: slots)
    monkeypatch.setattr(discovery, "SIGNS", ())
    here = config(tmp_path)

    def look(gpus: int | None, *gone: str) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
        save_memory(here.dirs.state / FILE, SavedHealth(seen=Seen(renounced=gone)))
        facts = look_at(here, "n1", "", gpus)
        return facts.gpus_missed, facts.undriven, facts.given_up

    here.dirs.state.mkdir(parents=True)
    assert look(None, slots[0]) == (False, slots[1:], slots[:1])
    assert look(None, *slots) == (False, (), slots)
    monkeypatch.setattr(discovery, "SIGNS", (tmp_path,))
    assert look(0) == (True, (), ())
    assert look(0, slots[0]) == (True, (), slots[:1]), "and the other one?"
    assert look(0, *slots) == (False, (), slots)
    (here.dirs.state / FILE).write_text("?")
    assert look_at(here, "n1", "", 0).given_up == ()


def test_ports_that_somebody_listens_on_are_counted(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        low = min(port, 65535 - 63)
        around = config(tmp_path, ports={"api": 0, "rendezvous": f"{low}-{low + 63}"})
        before = _taken((port, port))  # on another of so many, another program may begin to listen, or end
        one.listen()
        after, all_taken = _taken((port, port)), look_at(around, "n1", "", 0).ports_taken
    assert (before, after) == (0, 1)
    assert all_taken is not None and all_taken >= 1


def test_ports_that_the_kernel_gives_away(tmp_path: Path) -> None:
    facts = look_at(config(tmp_path, ports={"api": 0, "rendezvous": "1024-65535"}), "n1", "", 0)
    assert "overlaps the kernel's ephemeral ports" in facts.ports_problem
    assert facts.ports_right


@pytest.mark.parametrize(
    ("mode", "others"), [(0o755, False), (0o777, True), (0o1777, False)], ids=["usual", "open", "sticky"]
)
def test_folders_that_others_can_write_to(tmp_path: Path, mode: int, others: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    assert look_at_folder("dirs.run", folder).others_write == others


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert look_at_folder("dirs.run", tmp_path / "f").problem == "is no folder"
    assert "Not a directory" in look_at_folder("dirs.run", tmp_path / "f" / "below").problem


@pytest.mark.skipif(ROOT, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o500)
    assert look_at_folder("dirs.run", tmp_path / "a").problem == "may not be written to"
    assert "cannot be made" in look_at_folder("dirs.run", tmp_path / "a" / "b").problem


@pytest.mark.skipif(not ROOT, reason="only root can give folders away")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.chown(tmp_path / "a", 12345, 12345)
    assert look_at_folder("dirs.run", tmp_path / "a").problem == "belongs to another user (uid 12345)"


def test_the_first_closed_folder_on_the_way(tmp_path: Path) -> None:
    start = closed(tmp_path)  # pytest's own folders may be closed
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    assert closed(tmp_path / "a/b") == (start or str(tmp_path / "a"))
    assert closed(Path("/usr/bin")) == ""


async def test_a_look_that_hangs_is_reported_and_not_begun_again(tmp_path: Path) -> None:
    go, there, begun = threading.Event(), threading.Event(), []

    def hang(*_args: object) -> HostFacts:
        begun.append(1)
        there.set()
        go.wait(20)
        return HostFacts(node="n1", root=False)

    looker = Looker(hang, bound=0.05)
    for _ in range(2):
        (message,) = (await looker.look(config(tmp_path), "n1", "", 0)).unknown
        assert "does a disk hang" in message and str(tmp_path) in message
    assert there.wait(30), "its thread may begin late"
    assert len(begun) == 1
    go.set()
    async with asyncio.timeout(10):
        while (await looker.look(config(tmp_path), "n1", "", 0)).unknown:
            pass


async def test_a_fault_of_the_look_itself_is_raised(tmp_path: Path) -> None:
    def broken(*_args: object) -> HostFacts:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await Looker(broken, 20.0).look(config(tmp_path), "n1", "", 0)


def test_the_kernel_says_how_it_slews_its_clock() -> None:
    """chrony slews with tick and frequency; nothing here is slewed by more than a time service's trim."""
    assert rate_of(10_000, 0) == 0
    assert rate_of(10_833, 0) == pytest.approx(0.0833)
    assert rate_of(10_000, -500 * 65_536) == pytest.approx(-0.0005)
    found = clock_rate()
    assert found is None or abs(found) < 0.1
