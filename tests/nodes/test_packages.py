"""The bundle and the .deb on a machine with systemd: what becomes of the agent's unit. Everything else of them is in
``tests/integration/test_release.py``."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent import __version__
from release import bundle, deb, wheels
from tests.nodes.image import python_version
from tests.nodes.lab import lab, why_not
from tests.nodes.node import Node, wait_for

pytestmark = [pytest.mark.nodes_short, pytest.mark.timeout(600)]

UNIT = "nodeagent.service"
ENDS = "import os, sys; 'run' in sys.orig_argv and os._exit(1)\n"


@pytest.fixture(scope="module")
def machine() -> Iterator[Node]:
    """A bare one, where /shared has three releases, old, new and broken, and the .debs of the first and the last. The
    agent of the broken one ends at once."""
    if problem := why_not() or ("" if shutil.which("dpkg-deb") else "no dpkg-deb here"):
        pytest.skip(problem)
    with lab() as one:
        node = one.add("n1", [])
        wheel = wheels.build(one.folder)
        bundle.lay_out(wheel, [python_version(one.base)], "x86_64", one.shared / "old")
        for name, file, text in (("new", "another.pth", "\n"), ("broken", "broken.pth", ENDS)):
            shutil.copytree(one.shared / "old", one.shared / name)
            with zipfile.ZipFile(one.shared / name / "wheels" / wheel.name, "a") as archive:
                archive.writestr(file, text)
            with (one.shared / name / UNIT).open("a") as unit:
                unit.write(f"# of {name}\n")
        deb.build(one.shared / "old", __version__, "x86_64", one.shared)
        deb.build(one.shared / "broken", f"{__version__}+broken", "x86_64", one.shared)
        one.boot()
        yield node


def setup(node: Node, release: str, code: int = 0) -> str:
    """What it prints."""
    done = node.run("sh", f"/shared/{release}/setup.sh", "install", check=False, limit=180)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def running(node: Node) -> Path:
    """The agent's program, once it is up."""
    wait_for(lambda: is_active(node), 60, "the agent runs", node.journal)
    pid = node.run("systemctl", "show", "-P", "MainPID", UNIT).stdout.strip()
    return Path(node.here(f"/proc/{pid}/cmdline").read_text().split("\0")[0])


def package(node: Node, version: str = __version__, code: int = 0) -> str:
    """What dpkg prints while it installs that version."""
    done = node.run("dpkg", "-i", f"/shared/nodeagent_{version}_amd64.deb", check=False, limit=180)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def unit(node: Node) -> tuple[str, str]:
    """The file that systemd has read, and its last line."""
    path = node.run("systemctl", "show", "-P", "FragmentPath", UNIT).stdout.strip()
    assert node.run("systemctl", "show", "-P", "NeedDaemonReload", UNIT).stdout == "no\n"
    return path.removeprefix("/usr"), node.run("tail", "-n", "1", path).stdout.strip()


def is_active(node: Node) -> bool:
    return node.run("systemctl", "is-active", UNIT, check=False).stdout == "active\n"


def in_use(node: Node) -> Path:
    return Path("/opt/nodeagent", node.run("readlink", "/opt/nodeagent/bin").stdout.strip())


def test_no_upgrade_leaves_the_node_without_an_agent(machine: Node) -> None:
    setup(machine, "old")
    machine.run("/opt/nodeagent/bin/nodeagent", "keygen", "/etc/nodeagent/cluster.key")
    assert "did not run, and starts" in setup(machine, "old"), "a second install starts what is enabled"
    old = in_use(machine)
    assert running(machine).parent == old

    text = setup(machine, "broken", code=1)
    assert f"The agent of {old.parent.name} runs again" in text
    assert running(machine).parent == in_use(machine) == old
    assert unit(machine) == (f"/etc/systemd/system/{UNIT}", "WantedBy=multi-user.target"), "the unit of old"

    machine.run("sh", "/shared/new/setup.sh", "install", "--no-restart", limit=180)
    assert running(machine).parent == old != in_use(machine), "as after an install that was interrupted"
    assert "has been restarted" in setup(machine, "new")
    assert running(machine).parent == in_use(machine) != old
    assert unit(machine) == (f"/etc/systemd/system/{UNIT}", "# of new")


def test_the_packages_unit_takes_the_place_of_the_bundles(machine: Node) -> None:
    setup(machine, "new")
    running(machine)
    assert "a bundle was installed here" in package(machine)
    assert unit(machine) == (f"/lib/systemd/system/{UNIT}", "WantedBy=multi-user.target")
    link = machine.run("readlink", f"/etc/systemd/system/multi-user.target.wants/{UNIT}").stdout.strip()
    assert link.endswith(f"/lib/systemd/system/{UNIT}")
    assert machine.run("systemctl", "is-enabled", UNIT).stdout == "enabled\n"
    assert running(machine).parent == in_use(machine)


def test_a_package_whose_agent_does_not_start_is_left_again(machine: Node) -> None:
    """What dpkg unpacked last is not what runs: it says so, and both ways out of it."""
    setup(machine, "old")
    machine.run("sh", "-c", "cd /etc/nodeagent; [ -e cluster.key ] || /opt/nodeagent/bin/nodeagent keygen cluster.key")
    machine.run("systemctl", "enable", "--now", UNIT)
    package(machine)
    old = running(machine).parent
    text = package(machine, f"{__version__}+broken", code=1)
    assert f"The agent of {old.parent.name} runs again" in text
    assert f"then: dpkg --configure nodeagent. Or keep {old.parent.name}: dpkg -i its .deb" in text
    status = ("dpkg-query", "-W", "-f", "${db:Status-Status}", "nodeagent")
    assert machine.run(*status).stdout == "half-configured"
    for again in (lambda: None, lambda: machine.run("dpkg", "--configure", "nodeagent", check=False, limit=180)):
        again()
        assert running(machine).parent == in_use(machine) == old
        assert unit(machine) == (f"/lib/systemd/system/{UNIT}", "WantedBy=multi-user.target"), "the unit of old"
    package(machine)
    assert machine.run(*status).stdout == "installed"
    assert running(machine).parent == in_use(machine) == old


def test_only_the_agents_own_pods_keep_the_package(machine: Node) -> None:
    setup(machine, "new")
    python = f"{in_use(machine)}/python"
    shim = (python, "-c", "import time; time.sleep(1000)", "-m", "nodeagent.shim")
    machine.run("systemd-run", "--slice=nodeagent.slice", "--unit=nodeagent-pod-own", *shim, "/data/run/pods/ab")
    cluster = "/run/user/1000/nodeagent/local/it"
    machine.run("sh", "-c", f"mkdir -p {cluster} && touch {cluster}/cluster.json")
    machine.run("systemd-run", "--unit=local", *shim, f"{cluster}/n1/pods/ab")
    refused = machine.run("/opt/nodeagent/setup", "remove", check=False)
    assert (refused.returncode, refused.stderr.count("1 pods live here")) == (6, 1), refused.stdout + refused.stderr
    machine.run("systemctl", "stop", "nodeagent-pod-own")
    removed = machine.run("/opt/nodeagent/setup", "remove", limit=180)
    assert "1 pods of people's own" in removed.stdout
    assert not is_active(machine)
