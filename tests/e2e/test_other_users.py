"""Jobs of several users on one node: whose processes they are, who sees what."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import Cluster
from tests.e2e.users import STRANGER, SYSTEM_PYTHON, ctl_as, open_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300), pytest.mark.usefixtures("another_user")]

WHO = "import os, time; print('uid', os.getuid(), os.geteuid(), os.environ['USER'], flush=True); time.sleep({seconds})"


@pytest.fixture(scope="module")
def node() -> Iterator[Cluster]:
    with open_cluster(1) as one:
        yield one


def job(name: str, folder: Path, seconds: float = 0, **more: object) -> str:
    command = [SYSTEM_PYTHON, "-c", WHO.format(seconds=seconds)]
    spec = {"name": name, "command": command, "nodes": 1, "workers_per_node": 1, "working_dir": str(folder)}
    return json.dumps(spec | more)


def test_a_job_of_roots_for_another_user_runs_as_that_user(node: Cluster) -> None:
    other = pwd.getpwnam(STRANGER)
    folder = node.home / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, other.pw_uid, other.pw_gid)
    node.submit(job("for-them", folder, 600, user=STRANGER))
    node.until_running("for-them", 1)
    pod = node.pod("for-them", "n1")
    for pid in (pod["shim_pid"], *node.workers("for-them").values()):
        uids = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("Uid:"))
        assert set(uids.split()[1:]) == {str(other.pw_uid)}
    output = f"[0]<stdout>: uid {other.pw_uid} {other.pw_uid} {STRANGER}\n"
    node.until(lambda: node.ctl("logs", "for-them").stdout == output, 20, "the output is there")
    assert ctl_as(node, "logs", "for-them").stdout == output, "it is his own output"
    assert ctl_as(node, "stop", "for-them").returncode == 6, "the job is root's, who submitted it"
    node.ctl("delete", "for-them")


def test_a_users_own_job_is_theirs(node: Cluster) -> None:
    done = ctl_as(node, "submit", "-", given=job("own", Path("/")))
    assert done.returncode == 0, done.stderr
    assert node.until_phase("own", "succeeded")["owner"] == STRANGER
    assert f" {STRANGER}\n" in ctl_as(node, "logs", "own").stdout
    assert ctl_as(node, "delete", "own").returncode == 0


def test_a_folder_that_the_user_may_not_enter(node: Cluster) -> None:
    folder = node.home / "roots"
    folder.mkdir(mode=0o700)
    node.submit(job("shut-out", folder, user=STRANGER))
    ended = node.until_phase("shut-out", "failed")
    assert f"{folder} may not be entered by user {STRANGER}" in ended["reason"]


def test_a_user_that_does_not_exist(node: Cluster) -> None:
    node.submit(job("nobodys", Path("/"), user="no-such-user"))
    assert "user no-such-user does not exist on n1" in node.until_phase("nobodys", "failed")["reason"]
