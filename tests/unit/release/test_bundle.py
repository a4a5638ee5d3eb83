"""The archive of a bundle."""

from __future__ import annotations

import tarfile
from pathlib import Path

from release.bundle import pack


def test_setup_is_unpacked_last_so_that_where_it_is_all_is(tmp_path: Path) -> None:
    """An unpacking that was cut off left setup.sh without wheels, and the Ansible role took that for the bundle."""
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    for name in ("setup.sh", "nodeagent.yaml", "wheels/one.whl"):
        (folder / name).touch()
    pack(folder, tmp_path / "bundle.tar.gz")
    with tarfile.open(tmp_path / "bundle.tar.gz") as tar:
        names = [Path(name) for name in tar.getnames()]
        owners = {(entry.uid, entry.gid, entry.uname, entry.gname) for entry in tar.getmembers()}
    assert sorted(names) == sorted(path.relative_to(tmp_path) for path in (folder, *folder.rglob("*")))
    assert names[-1] == Path("bundle/setup.sh")
    assert owners == {(0, 0, "root", "root")}
