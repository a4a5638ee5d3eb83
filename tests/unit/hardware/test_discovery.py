"""What the PCI bus says of NVIDIA's GPUs, without a driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.hardware.discovery import on_the_bus

H200 = "0x2335"
VGA, COMPUTE, AUDIO, SWITCH = "0x030000", "0x030200", "0x040300", "0x068000"


def plug(
    sysfs: Path, address: str, kind: str = COMPUTE, driver: str = "", vendor: str = "0x10de", model: str = H200
) -> Path:
    """A device, as the kernel shows it."""
    device = sysfs / "devices/pci0000:00" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    (device / "device").write_text(f"{model}\n")
    if driver:
        (sysfs / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(sysfs / "bus/pci/drivers" / driver)
    (sysfs / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sysfs / "bus/pci/devices" / address).symlink_to(device)
    return device


@pytest.mark.parametrize(
    ("kind", "driver", "found"),
    [
        (COMPUTE, "", True),
        (COMPUTE, "nvidia", True),
        (COMPUTE, "nouveau", True),
        (COMPUTE, "vfio-pci", False),
        (COMPUTE, "nvgrace_gpu_vfio_pci", False),
        (VGA, "", True),
        (VGA, "nvidia", True),
        (VGA, "nouveau", False),
        (VGA, "vfio-pci", False),
        (AUDIO, "", False),
        (SWITCH, "", False),
    ],
)
def test_a_gpu_counts_unless_another_driver_has_it(tmp_path: Path, kind: str, driver: str, found: bool) -> None:
    plug(tmp_path, "0000:3b:00.0", kind, driver)
    assert on_the_bus(tmp_path) == ({"0000:3b:00": H200} if found else {})


def test_of_many_devices_those_that_are_nvidias_in_order(tmp_path: Path) -> None:
    plug(tmp_path, "0000:00:02.0", VGA, "ast", "0x1a03")
    plug(tmp_path, "0000:03:00.0", COMPUTE, "amdgpu", "0x1002")
    for address in ("0001:17:00.0", "0000:ca:00.0", "0000:3b:00.0"):
        plug(tmp_path, address)
        plug(tmp_path, address[:-1] + "1", AUDIO, "snd_hda_intel")
    slice_of_it = plug(tmp_path, "0000:3b:00.4")
    (slice_of_it / "physfn").symlink_to(tmp_path / "bus/pci/devices/0000:3b:00.0")
    (tmp_path / "bus/pci/devices/0000:ff:00.0").symlink_to(tmp_path / "taken out just now")
    assert list(on_the_bus(tmp_path)) == ["0000:3b:00", "0000:ca:00", "0001:17:00"]


def test_a_machine_without_a_pci_bus(tmp_path: Path) -> None:
    assert on_the_bus(tmp_path) == {}
