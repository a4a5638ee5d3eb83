"""What the host probe makes of what it reads: full file systems, pressure, open files, and files that say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.hardware.probes.host import (
    FEW_FILES,
    FULL,
    LATE,
    FolderProbe,
    Ports,
    clock_synchronised,
    fabric_manager,
    handles,
    imex,
    no_room,
    nvswitches,
    pressure,
)
from tests.descriptors import few_files


@pytest.mark.parametrize(
    ("read_only", "free", "files", "free_files", "wrong"),
    [
        (False, FULL, 10**6, FEW_FILES, ""),
        (True, FULL, 10**6, FEW_FILES, "read-only"),
        (False, FULL - 1, 10**6, 0, "255 MiB free"),
        (False, FULL, 10**6, FEW_FILES - 1, "room for 999 more files"),
        (False, FULL, 0, 0, ""),
    ],
)
def test_when_a_file_system_is_full(read_only: bool, free: int, files: int, free_files: int, wrong: str) -> None:
    """Of files, too: bytes are left, and nothing can be written. Some (btrfs) have no such bound, and tell 0 of 0."""
    assert no_room(read_only, free, files, free_files) == wrong


def test_a_folder_may_answer_while_it_is_looked_at_which_are_late(tmp_path: Path) -> None:
    folders = FolderProbe([str(tmp_path / name) for name in "abc"])
    folders._asked = dict.fromkeys(folders._paths, 0.0)

    class Now(float):
        """As soon as it is compared with the first folder's time, all answer."""

        def __sub__(self, asked: float) -> float:
            for path in list(folders._asked):
                folders._ask(path)
            return float(self) - asked

    assert len(folders.look(Now(LATE + 1))) == 3
    assert folders._asked == {}


def write(proc: Path, **texts: str) -> None:
    for name, text in texts.items():
        file = proc / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_pressure_and_handles_of_this_kernel_and_of_one_that_tells_nothing(tmp_path: Path) -> None:
    assert pressure(str(tmp_path), "memory") is None
    assert handles(str(tmp_path)) == {"files_used": None, "processes_used": None}
    write(
        tmp_path, pressure__memory="some avg10=1.00 avg60=99.00\nfull avg10=0.00 avg60=25.00 avg300=1.00 total=9\n",
        pressure__io="some avg10=1.00\n", sys__fs__file_max="x",
    )  # fmt: skip
    assert pressure(str(tmp_path), "memory") == 0.25
    assert pressure(str(tmp_path), "io") is None
    (tmp_path / "sys/fs/file-nr").write_text("900 0 1000\n")
    assert handles(str(tmp_path)) == {"files_used": 0.9, "processes_used": None}
    write(tmp_path, loadavg="1 2 3 7/950 99\n", sys__kernel__pid_max="1000\n")
    (tmp_path / "sys/kernel/threads-max").write_text("100000\n")
    assert handles(str(tmp_path)) == {"files_used": 0.9, "processes_used": 0.95}
    found = handles("/proc")
    assert found["files_used"] is None or 0 <= found["files_used"] <= 1
    assert clock_synchronised() in (True, False, None)


@pytest.mark.parametrize("text", ["", "full", "full avg60=", "full avg60=x total=1", "\x00"])
def test_pressure_that_is_not_written_as_expected_is_no_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, pressure__memory=text)
    assert pressure(str(tmp_path), "memory") in (None, 0.0)


def test_imex_counts_only_where_it_is_to_run_beside_other_machines(tmp_path: Path) -> None:
    """On a single machine with NVSwitches, and between jobs that start it themselves, others called that a fault of
    NVLink (NVSentinel 1471, aicr 2641)."""
    unit, events = "nvidia-imex.service", tmp_path / "fs/cgroup/system.slice/nvidia-imex.service/cgroup.events"
    wanted = tmp_path / "systemd/system/multi-user.target.wants" / unit
    domain = tmp_path / "nvidia-imex/nodes_config.cfg"

    def seen() -> bool | None:
        return imex(str(tmp_path), str(tmp_path))

    events.parent.parent.mkdir(parents=True)
    domain.parent.mkdir()
    domain.write_text("10.0.0.1\n10.0.0.2\n")
    assert seen() is None, "not enabled: jobs start it"
    wanted.parent.mkdir(parents=True)
    wanted.symlink_to(f"/lib/systemd/system/{unit}")
    assert seen() is False
    for alone in ("", "# the nodes of the domain\n# 10.0.0.2\n", "10.0.0.1\n", "10.0.0.1\n10.0.0.1\n"):
        domain.write_text(alone)
        assert seen() is None, "a single machine"
    domain.unlink()
    assert seen() is None, "not configured"
    domain.write_text("10.0.0.1\n10.0.0.2\n")
    events.parent.mkdir()
    events.write_text("populated 0\n")
    assert seen() is False
    events.write_text("populated 1\n")
    assert seen() is True


UNIT = "nvidia-fabricmanager.service"


@pytest.mark.parametrize(
    ("root", "file", "rests", "runs"),
    [("", "cgroup.events", "populated 0\n", "populated 1\n"), ("systemd", "cgroup.procs", "", "4711\n")],
    ids=["v2", "v1"],
)
def test_whether_a_service_runs_on_either_kind_of_control_groups(
    tmp_path: Path, root: str, file: str, rests: str, runs: str
) -> None:
    """On every host with the older kind the fabric manager counted as dead."""
    (tmp_path / UNIT).touch()

    def seen() -> bool | None:
        return fabric_manager(str(tmp_path), str(tmp_path))

    assert seen() is None, "where systemd's groups are not to be seen nothing is known"
    group = tmp_path / "fs/cgroup" / root / "system.slice"
    group.mkdir(parents=True)
    assert seen() is False
    (group / UNIT).mkdir()
    (group / UNIT / file).write_text(rests)
    assert seen() is False
    (group / UNIT / file).write_text(runs)
    assert seen() is True
    (tmp_path / UNIT).unlink()
    assert seen() is None, "not installed"


def test_without_a_descriptor_no_service_counts_as_dead_and_no_port_as_down(tmp_path: Path) -> None:
    """A fabric manager that does not run is a reason to reboot."""
    state = tmp_path / "class/infiniband/mlx5/ports/1/state"
    carrier = tmp_path / "class/net/eth0/carrier"
    events = tmp_path / "fs/cgroup/system.slice" / UNIT / "cgroup.events"
    for file, text in ((state, "4: ACTIVE\n"), (carrier, "1\n"), (events, "populated 1\n"), (tmp_path / UNIT, "")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    ports = Ports(str(tmp_path), ["eth0"])
    assert ports.look(1.0) == {"ports_down": [], "port_flaps": [], "ports": ["eth0", "mlx5/1"]}
    runs = []
    for now in range(3):
        with few_files(now):
            runs.append(fabric_manager(str(tmp_path), str(tmp_path)))
            seen = ports.look(2.0 + now)
        assert seen == {"ports_down": [], "port_flaps": [], "ports": ["eth0", "mlx5/1"]}
    assert runs == [None, True, True]
    state.write_text("1: DOWN\n")
    assert ports.look(9.0)["ports_down"] == [["mlx5/1", 0.0]]
    with few_files(0):
        assert ports.look(11.0)["ports_down"] == [["mlx5/1", 2.0]]


def test_whether_the_machine_has_nvswitches(tmp_path: Path) -> None:
    assert nvswitches(str(tmp_path)) is False
    devices = tmp_path / "driver/nvidia-nvswitch/devices"
    devices.mkdir(parents=True)
    assert nvswitches(str(tmp_path)) is False
    (devices / "0000:06:00.0").touch()
    assert nvswitches(str(tmp_path)) is True
