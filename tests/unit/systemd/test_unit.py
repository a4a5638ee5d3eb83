"""The agent's unit: its sandbox leaves the agent what it looks at."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from nodeagent.hardware.plugins import PACKAGED

UNIT = Path(__file__).parents[3] / "systemd" / "nodeagent.service"


def values(key: str) -> list[str]:
    lines = UNIT.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.partition("=")[0] == key]


def test_the_clocks_rate_may_be_read_and_not_set() -> None:
    """Where ``ProtectClock`` kept adjtimex from it, nothing was ever found of a clock that nobody keeps right."""
    assert not values("ProtectClock")
    assert "adjtimex clock_adjtime" in values("SystemCallFilter")
    assert not values("SystemCallFilter")[0].startswith("~"), "what is allowed is listed"
    assert "CAP_SYS_TIME" not in values("CapabilityBoundingSet")[0].split()


NEEDED = [str(sign) for plugin in PACKAGED for sign in plugin.signs]


@pytest.mark.parametrize(
    "device",
    [*NEEDED, "char-nvidia-uvm", "char-drm", "/dev/davinci0", "/dev/davinci15", "/dev/devmm_svm", "/dev/hisi_hdc"],
)  # fmt: skip
def test_the_devices_of_each_vendor_may_be_opened(device: str) -> None:
    """A packaged plug-in's tool found no device under the shipped unit."""
    allowed = [value.split()[0] for value in values("DeviceAllow") if value.split()[1] == "rw"]
    assert any(fnmatch(device, pattern) for pattern in allowed)


def test_no_path_of_a_device_is_a_pattern() -> None:
    """systemd takes patterns for groups of devices alone."""
    assert not [value for value in values("DeviceAllow") if value.startswith("/") and set(value) & set("*?[")]


def test_groups_of_devices_are_there_before_the_agent() -> None:
    """systemd looks a group's number up when the unit starts."""
    assert "modprobe@nvidia_uvm.service" in values("Wants")[-1].split()
    assert any("modprobe@nvidia_uvm.service" in value.split() for value in values("After"))
