"""What ``release/setup.sh`` does with the agent's unit: it starts none that an operator stopped for good."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "release" / "setup.sh"
STUBS = """set -eu
systemctl() {
    case "$1" in
        is-active) [ "$active" = yes ] ;;
        is-enabled) [ "$enabled" = yes ] ;;
        *) echo "systemctl $*" ;;
    esac
}
sysusers() { :; }
booted() { :; }
say() { echo "say $*"; }
"""
ACTIVE, ENABLED, FIRST, KEY = "active", "enabled", "first", "key"


def calls(folder: Path, *has: str, restart: str = "yes") -> tuple[list[str], str]:
    """What it asks of systemd after ``daemon-reload``, and what it says."""
    if KEY in has:
        (folder / "cluster.key").touch()
    text = SETUP.read_text()
    function = text[text.index("restart() {") : text.index("switch_to() {")].replace("systemd-sysusers", "sysusers")
    values = {
        "etc": str(folder), "restart": restart, "was": "" if FIRST in has else "0.1-abc",
        "active": "yes" if ACTIVE in has else "no", "enabled": "yes" if ENABLED in has else "no",
    }  # fmt: skip
    script = STUBS + "".join(f"{name}='{value}'\n" for name, value in values.items()) + function + "restart\n"
    lines = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout.splitlines()
    asked = [line.removeprefix("systemctl ") for line in lines if line.startswith("systemctl ")]
    assert asked[0] == "daemon-reload"
    return asked[1:], "\n".join(line for line in lines if line.startswith("say "))


ENABLE, START = "enable --quiet nodeagent", "start --no-block nodeagent"


@pytest.mark.parametrize(
    ("has", "asked"),
    [
        ((FIRST, KEY), [ENABLE, START]),
        ((FIRST,), [ENABLE]),
        ((ENABLED, KEY), [START]),
        ((ENABLED,), []),
        ((KEY,), []),
        ((ACTIVE, ENABLED, KEY), ["restart nodeagent"]),
        ((ACTIVE, KEY), ["restart nodeagent"]),
    ],
)
def test_an_install_starts_what_is_new_or_enabled(tmp_path: Path, has: tuple[str, ...], asked: list[str]) -> None:
    """One that an operator had disabled was enabled and started by the next upgrade."""
    assert calls(tmp_path, *has)[0] == asked


@pytest.mark.parametrize("has", [(FIRST, KEY), (ENABLED, KEY), (KEY,), (ACTIVE, ENABLED, KEY)])
def test_without_a_restart_nothing_is_started(tmp_path: Path, has: tuple[str, ...]) -> None:
    """A first roll-out started the agent with the stock config, before the store had been asked."""
    asked, _ = calls(tmp_path, *has, restart="no")
    assert asked == []


def test_what_is_left_as_it_is_is_reported(tmp_path: Path) -> None:
    assert "systemctl enable --now nodeagent" in calls(tmp_path, KEY)[1]
    assert "systemctl restart nodeagent" in calls(tmp_path, ACTIVE, ENABLED, KEY, restart="no")[1]
    assert "systemctl enable --now nodeagent" in calls(tmp_path, FIRST, KEY, restart="no")[1]
