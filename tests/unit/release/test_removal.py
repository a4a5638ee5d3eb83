"""What the collection's role removes of an agent, with a real mount in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

TASKS = Path(__file__).parents[3] / "ansible/roles/nodeagent/tasks/remove.yml"
FOLDERS = ("/etc/nodeagent", "/var/lib/nodeagent", "/var/log/nodeagent", "/run/nodeagent")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_what_is_mounted_in_a_folder_of_the_agent_is_not_emptied(tmp_path: Path) -> None:
    """A part of the same file system as well, which `rm --one-file-system` would walk into."""
    (task,) = (task for task in yaml.safe_load(TASKS.read_text()) if task["name"].startswith("Config, keys, state"))
    script = task["ansible.builtin.shell"]
    for folder in FOLDERS:
        (tmp_path / folder[1:] / "pods/u1").mkdir(parents=True)
        script = script.replace(folder, str(tmp_path / folder[1:]))
    users = tmp_path / "home"
    users.mkdir()
    (users / "thesis").touch()
    state, pods = tmp_path / "var/lib/nodeagent", tmp_path / "run/nodeagent/pods"
    mounts = f"mount --bind {users} {state / 'pods/u1'}; mount -t tmpfs pods {pods}; mkdir {pods / 'u2'}; "
    mounts += f"mount --bind {users} {pods / 'u2'}; "

    def removed(before: str) -> subprocess.CompletedProcess[str]:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", before + script]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    first = removed(mounts)
    assert (users / "thesis").exists()
    assert first.returncode == 1
    assert f"something is mounted in {state} (above), so that is left: detach it (umount -l), then: rm -rf {state}" in (
        first.stderr
    )
    assert [folder for folder in FOLDERS if (tmp_path / folder[1:]).exists()] == ["/var/lib/nodeagent"]
    again = removed("")
    assert (again.returncode, again.stdout) == (0, f"removed {state}\n")
    assert not state.exists()
    assert (removed("").stdout, (users / "thesis").exists()) == ("", True)
