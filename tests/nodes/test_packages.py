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
    """A bare one, where /shared has three releases, old, new and broken, and the .deb of the first. The agent of the
    broken one ends at once."""
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
        deb.build(one.shared / "old", __version__, "x86_64", one.shared)
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

    setup(machine, "new")
    assert running(machine).parent == in_use(machine) != old


def test_the_packages_unit_takes_the_place_of_the_bundles(machine: Node) -> None:
    setup(machine, "new")
    running(machine)
    package = next(machine.here("/shared").glob("*.deb"))
    done = machine.run("dpkg", "-i", f"/shared/{package.name}", check=False, limit=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a bundle was installed here" in done.stdout
    unit = machine.run("systemctl", "show", "-P", "FragmentPath", UNIT).stdout.strip()
    assert unit.removeprefix("/usr") == f"/lib/systemd/system/{UNIT}"
    link = machine.run("readlink", f"/etc/systemd/system/multi-user.target.wants/{UNIT}").stdout.strip()
    assert link.endswith(f"/lib/systemd/system/{UNIT}")
    assert machine.run("systemctl", "is-enabled", UNIT).stdout == "enabled\n"
    assert running(machine).parent == in_use(machine)


def test_only_the_agents_own_pods_keep_the_package(machine: Node) -> None:
    setup(machine, "new")
    python = f"{in_use(machine)}/python"
    shim = (python, "-c", "import time; time.sleep(1000)", "-m", "nodeagent.shim")
    machine.run("systemd-run", "--slice=nodeagent.slice", "--unit=nodeagent-pod-own", *shim, "/data/run/pods/ab")
    machine.run("systemd-run", "--unit=local", *shim, "/run/user/1000/nodeagent/local/it/n1/pods/ab")
    refused = machine.run("/opt/nodeagent/setup", "remove", check=False)
    assert (refused.returncode, refused.stderr.count("1 pods live here")) == (6, 1), refused.stdout + refused.stderr
    machine.run("systemctl", "stop", "nodeagent-pod-own")
    removed = machine.run("/opt/nodeagent/setup", "remove", limit=180)
    assert "1 pods of people's own" in removed.stdout
    assert not is_active(machine)
