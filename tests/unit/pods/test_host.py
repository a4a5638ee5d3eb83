"""What an agent that starts makes of the shims that are there: only what is found to be dead is swept."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from nodeagent.lease.grants import grants_folder, make_grant
from nodeagent.osutil import threads
from nodeagent.osutil.linux import boot_id, start_time
from nodeagent.osutil.untrusted import ASIDE_MAX, OWNER_MAX, NotSeenError, UntrustedError, aside
from nodeagent.pods import cgroup, host, pod
from nodeagent.pods.cgroup import PodCgroup
from nodeagent.pods.folder import PodRecord, PodRecords, folder_name, own_folder, promised_number, run_folder
from nodeagent.pods.host import ShimHost, ShimStart
from nodeagent.pods.login import find_login
from nodeagent.pods.pod import FoundShim
from nodeagent.spec.agentconfig import DirsConfig, JobsConfig
from tests.descriptors import few_files
from tests.integration.shim_support import make_spec
from tests.processes import marked_sleep

BOUND = 20.0


class Node:
    """A node with shims that do nothing; who connects to one of them speaks to nobody."""

    def __init__(self, folder: Path, count: int, how: ShimStart) -> None:
        dirs = DirsConfig(run=folder / "run", state=folder / "state", logs=folder / "logs")
        self.host = ShimHost("n1", dirs, JobsConfig(allow_root=True), "127.0.0.1", (29400, 29899), how, find_login)
        self.shims: dict[str, subprocess.Popen[bytes]] = {}
        self._ends: list[socket.socket] = []
        for number in range(count):
            uid = f"{number:032x}"
            mark = f"{uid}-mark"
            self.shims[uid] = shim = marked_sleep(mark)
            run = run_folder(dirs.run, uid)
            run.mkdir(parents=True)
            plain = {"pid": shim.pid, "start": start_time(shim.pid), "boot": boot_id()}
            (run / "shim.json").write_text(json.dumps(plain))
            PodRecords(dirs.run).write(PodRecord(uid, os.getuid(), mark, folder / "logs" / uid))
            make_grant(grants_folder(dirs.run), folder_name(uid), os.getuid(), os.getgid())

    def connect(self, *_: object) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._ends.append(theirs)
        return ours

    def alive(self) -> int:
        return sum(shim.poll() is None for shim in self.shims.values())

    def close(self) -> None:
        for shim in self.shims.values():
            shim.kill()
            shim.wait()
        for end in self._ends:
            end.close()


@asynccontextmanager
async def node(
    folder: Path, count: int, monkeypatch: pytest.MonkeyPatch, how: ShimStart | None = None
) -> AsyncIterator[Node]:
    made = Node(folder, count, how or ShimStart())
    monkeypatch.setattr(pod, "socket_of", made.connect)
    try:
        yield made
    finally:
        await made.host.close()
        made.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - not all of it wakes somebody
            await asyncio.sleep(0.01)


async def test_more_pods_than_can_be_looked_at_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path, ASIDE_MAX + 4, monkeypatch) as here:
        await here.host.adopt()
        await until(lambda: all(map(here.host.connected, here.shims)))
        assert here.alive() == len(here.shims)


class Gate:
    """Looks for shims of these pods wait until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, uids: Container[str]) -> None:
        self.opened, self.begun = threading.Event(), SimpleQueue[str]()
        self._uids, self._find = uids, host._find_shim
        monkeypatch.setattr(host, "_find_shim", self._look)

    def _look(self, folder: Path, record: PodRecord) -> FoundShim:
        self.begun.put(record.uid)
        if record.uid in self._uids:
            self.opened.wait(BOUND)
        return self._find(folder, record)


async def test_a_pod_that_could_not_be_looked_at_in_time_is_unknown_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "ADOPT_LIMIT", 0.02)
    async with node(tmp_path, 1, monkeypatch) as here:
        gate = Gate(monkeypatch, here.shims)
        await here.host.adopt()
        assert "1 shims are not found yet" in caplog.text
        assert [status.phase for status in here.host.status().values()] == ["unknown"]
        gate.opened.set()
        await until(lambda: all(map(here.host.connected, here.shims)))
        assert here.alive() == gate.begun.qsize() == 1


async def test_a_pod_whose_look_never_comes_back_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LOOK_LIMIT", 0.02)
    async with node(tmp_path, 1, monkeypatch) as here:
        gate = Gate(monkeypatch, here.shims)
        await here.host.adopt()
        await until(lambda: [status.phase for status in here.host.status().values()] == ["gone"])
        await until(lambda: not here.alive())
        gate.opened.set()


async def test_one_users_pods_that_hang_hold_up_no_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They came first, and are more than there are threads for the agent's own looks."""
    monkeypatch.setattr(host, "ADOPT_LIMIT", 0.02)
    async with node(tmp_path, ASIDE_MAX + 4, monkeypatch) as here:
        *theirs, other = sorted(here.shims, key=folder_name)
        records = PodRecords(tmp_path / "run")
        for record in records.all().values():
            if record.uid != other:
                records.write(replace(record, owner=os.getuid() + 1))
        gate = Gate(monkeypatch, theirs)
        await here.host.adopt()
        await until(lambda: here.host.connected(other))
        assert gate.begun.qsize() == OWNER_MAX + 1
        assert here.alive() == len(here.shims), "nobody has seen that one is dead"
        assert {here.host.status()[uid].phase for uid in theirs} == {"unknown"}
        assert await aside(lambda: "another look") == "another look"
        gate.opened.set()
        await until(lambda: gate.begun.qsize() == len(here.shims))


async def test_a_look_that_could_not_be_made_is_made_again_and_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no thread for it, or no descriptor, however often."""
    monkeypatch.setattr(host, "ADOPT_LIMIT", 0.001)
    refused, find = list[str](), host._find_shim

    def short_of_files(folder: Path, record: PodRecord) -> FoundShim:
        refused.append("no descriptor")
        if len(refused) < 100:
            raise NotSeenError("no descriptor")
        return find(folder, record)

    def short_of_threads(*asked: object) -> object:
        refused.append("no thread")
        if len(refused) < 50:
            raise OSError("no thread")
        return in_daemon(*asked)  # type: ignore[arg-type]

    in_daemon = threads.in_daemon
    monkeypatch.setattr(threads, "in_daemon", short_of_threads)
    monkeypatch.setattr(host, "_find_shim", short_of_files)
    async with node(tmp_path, 1, monkeypatch) as here:
        await here.host.adopt()
        await until(lambda: all(map(here.host.connected, here.shims)))
        assert here.alive() == 1
        assert len(refused) >= 100


def test_a_shim_in_its_pods_cgroup_is_known_without_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a user can make hang; in another pod's cgroup it is not."""
    looked = list[int]()

    def has_mark(pid: int, *_: object) -> bool:
        looked.append(pid)
        return False

    monkeypatch.setattr(host, "has_mark", has_mark)
    with marked_sleep("m") as shim:
        try:
            (tmp_path / "shim.json").write_text(
                json.dumps({"pid": shim.pid, "start": start_time(shim.pid), "boot": boot_id()})
            )
            record = PodRecord("u", os.getuid(), "m", tmp_path, tmp_path / "nodeagent-pod-u")
            monkeypatch.setattr(PodCgroup, "of", lambda _: PodCgroup(tmp_path / "nodeagent-pod-u"))
            found = host._find_shim(tmp_path, record)
            os.close(found.pidfd)
            assert (found.pid, looked) == (shim.pid, [])
            monkeypatch.setattr(PodCgroup, "of", lambda _: PodCgroup(tmp_path / "nodeagent-pod-v"))
            with pytest.raises(UntrustedError, match="is not its shim"):
                host._find_shim(tmp_path, record)
            assert looked == [shim.pid]
        finally:
            shim.kill()


async def test_a_shim_that_many_others_connect_to_is_connected_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()

    async with node(tmp_path, 1, monkeypatch) as here:

        def full(*asked: object) -> socket.socket:
            if not refused:
                refused.append("once")
                raise NotSeenError("too many wait at s")
            return here.connect(*asked)

        monkeypatch.setattr(pod, "socket_of", full)
        await here.host.adopt()
        await until(lambda: all(map(here.host.connected, here.shims)))
        assert here.alive() == 1


async def test_a_shim_in_whose_place_something_else_listens_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, 1, monkeypatch) as here:

        def taken(*_: object) -> socket.socket:
            raise UntrustedError("process 7 listens there, not the shim")

        monkeypatch.setattr(pod, "socket_of", taken)
        await here.host.adopt()
        await until(lambda: not here.alive())
        why = "its shim is not reached: process 7 listens there, not the shim"
        await until(lambda: [status.reason for status in here.host.status().values()] == [why])


@pytest.mark.parametrize("dead", ["process", "start", "mark"])
async def test_what_is_found_to_be_dead_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str) -> None:
    async with node(tmp_path, 2, monkeypatch) as here:
        uid, shim = next(iter(here.shims.items()))
        named = run_folder(tmp_path / "run", uid) / "shim.json"
        if dead == "process":
            shim.kill()
            shim.wait()
        elif dead == "start":
            named.write_text(json.dumps(json.loads(named.read_text()) | {"start": 1}))
        else:
            named.write_text(json.dumps({"pid": os.getpid(), "start": start_time(os.getpid()), "boot": boot_id()}))
        await here.host.adopt()
        await until(lambda: here.host.status()[uid].phase == "gone")
        await until(lambda: shim.poll() is not None)
        assert here.alive() == 1


class Disk:
    """On which folders are made once it answers."""

    def __init__(self) -> None:
        self.asked = list[Path]()
        self.answers = threading.Event()

    def make_folder(self, path: Path, uid: int, gid: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.asked.append(path)
        self.answers.wait(BOUND)
        own_folder(path, uid, gid)

    def starts(self, folder: Path) -> ShimStart:
        """Shims that end at once, with these words in their log."""
        program = folder / "python"
        program.write_text("#!/bin/sh\necho this is no shim >&2\n")
        program.chmod(0o755)
        return ShimStart(str(program), make_folder=self.make_folder)


SPEC = make_spec(("true",), Path("/"))
UID = "0" * 32


async def test_folders_that_hang_hold_up_only_their_pod_and_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "FOLDERS_LIMIT", 0.02)
    monkeypatch.setattr(host, "LOOK_AGAIN", 0.02)
    disk = Disk()
    async with node(tmp_path, 0, monkeypatch, disk.starts(tmp_path)) as here:

        def prepared(*words: str) -> bool:
            here.host.prepare(UID, SPEC)  # as each round of the agent
            now = here.host.status().get(UID)
            return now is not None and any(word in now.reason for word in words)

        await until(lambda: prepared("within 0.02 s"))
        state, logs = tmp_path / "state" / "pods" / UID, tmp_path / "logs" / f"train-{UID[:8]}"
        now = here.host.status()[UID]
        assert (now.phase, now.passing) == ("unfit", True)
        assert now.reason == (
            f"the shim could not be started: its folders {state} and {logs} could not be looked at: it did not come "
            "back within 0.02 s; see that their disks answer, it is tried again"
        )
        rounds = 0

        def tenth() -> bool:
            nonlocal rounds
            rounds += 1
            assert prepared("within 0.02 s", "has not come back"), "it is said as long as it is so"
            return rounds > 10

        await until(tenth)
        here.host.retire(UID)
        assert dict(here.host.status()) == {}
        for _ in range(OWNER_MAX + 1):
            here.host.prepare(UID, SPEC)
            await asyncio.sleep(0)
            here.host.retire(UID)
        await until(lambda: prepared("could not be looked at: an earlier look has not come back"))
        assert disk.asked == [state], "what hangs keeps one thread"
        disk.answers.set()
        await until(lambda: prepared("the shim could not start: this is no shim"))
        assert sorted(disk.asked) == sorted([state, logs] * 2), "those that came too late, and those that were used"
        assert open_files(logs / "shim.log") == 0


async def test_more_pods_than_may_be_looked_at_at_once_are_prepared_on_a_new_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit in ((host, "FOLDERS_LIMIT"), (pod, "LEFT_LIMIT")):
        monkeypatch.setattr(module, limit, BOUND)  # each has its turn, however slow the machine is
    disk = Disk()
    disk.answers.set()
    async with node(tmp_path, 0, monkeypatch, disk.starts(tmp_path)) as here:
        uids = [f"{number:032x}" for number in range(ASIDE_MAX + 4)]
        for uid in uids:
            here.host.prepare(uid, SPEC)
        await until(lambda: len(here.host.status()) == len(uids))
        await until(lambda: all(status.phase == "unfit" for status in here.host.status().values()))
        assert {status.reason for status in here.host.status().values()} == {
            "the shim could not start: this is no shim"
        }


async def test_many_folders_that_hang_leave_threads_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "FOLDERS_LIMIT", 0.02)
    disk = Disk()
    async with node(tmp_path, 0, monkeypatch, disk.starts(tmp_path)) as here:
        uids = [f"{number:032x}" for number in range(ASIDE_MAX)]
        for uid in uids:
            here.host.prepare(uid, SPEC)
        await until(lambda: len(here.host.status()) == len(uids))
        assert len(disk.asked) == OWNER_MAX
        reasons = [status.reason for status in here.host.status().values()]
        hang = f"{OWNER_MAX} earlier looks for uid {os.getuid()} have not come back"
        assert sum(hang in reason for reason in reasons) == len(uids) - OWNER_MAX
        assert await here.host._looks.run(os.getuid() + 1, "another", lambda: "look") == "look"
        assert await aside(lambda: "another look") == "another look"
        disk.answers.set()
        await until(lambda: all(thread.name != "untrusted" for thread in threading.enumerate()))
        await until(lambda: not open_files(tmp_path / "logs" / "train-00000000" / "shim.log"))


def test_folders_of_many_pods_are_made_at_once(tmp_path: Path) -> None:
    def make(number: int) -> None:
        together.wait(BOUND)
        for at in range(50):
            own_folder(tmp_path / str(at) / "pods" / str(number), os.getuid(), os.getgid())

    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, range(4)))


@pytest.mark.parametrize("how", ["retired", "closed"])
async def test_a_start_that_is_given_up_while_its_folders_hang_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    disk = Disk()
    async with node(tmp_path, 0, monkeypatch, disk.starts(tmp_path)) as here:
        here.host.prepare(UID, SPEC)
        await until(lambda: disk.asked)
        if how == "retired":
            here.host.retire(UID)
        else:
            await here.host.close()
        disk.answers.set()
        log = tmp_path / "logs" / f"train-{UID[:8]}" / "shim.log"
        await until(log.exists)
        await until(lambda: not open_files(log))
        assert dict(here.host.status()) == {}
        assert not (tmp_path / "run" / "pods").exists()


def open_files(file: Path) -> int:
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += fd.readlink() == file
    return count


async def test_what_was_promised_on_a_disk_that_hangs_counts_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROMISED_LIMIT", 0.02)
    gate, looks = threading.Event(), list[str]()

    def slow(state: Path, uid: str) -> int:
        looks.append(uid)
        gate.wait(BOUND)
        return promised_number(state, uid)

    monkeypatch.setattr(host, "promised_number", slow)
    async with node(tmp_path, 0, monkeypatch) as here:
        for uid, number in ((UID, 7), ("other", 0)):
            folder = tmp_path / "state" / "pods" / uid
            folder.mkdir(parents=True)
            (folder / "highest.json").write_text(json.dumps({"number": number, "id": "x"}))
        for _ in range(3):
            assert await here.host.promised([UID, "other"]) == {}
        assert looks == [UID], "what hangs keeps one thread"
        gate.set()
        monkeypatch.setattr(host, "PROMISED_LIMIT", BOUND)
        async with asyncio.timeout(BOUND):
            while await here.host.promised([UID, "other"]) != {UID: 7}:  # noqa: ASYNC110 - a thread ends
                await asyncio.sleep(0.01)


async def test_one_promise_that_cannot_be_looked_at_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def number_of(_state: Path, uid: str) -> int:
        if uid == UID:
            raise NotSeenError("no descriptor")
        return 7

    monkeypatch.setattr(host, "promised_number", number_of)
    async with node(tmp_path, 0, monkeypatch) as here:
        assert await here.host.promised([UID, "other"]) == {"other": 7}


async def test_a_unit_is_looked_for_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, used = host._find_shim, set[threading.Thread]()

    def watched(folder: Path, record: PodRecord) -> FoundShim:
        used.add(threading.current_thread())
        return find(folder, record)

    monkeypatch.setattr(host, "_find_shim", watched)
    async with node(tmp_path, 1, monkeypatch) as here:
        ((uid, shim),) = here.shims.items()
        record = PodRecords(tmp_path / "run").all()[folder_name(uid)]
        found = await here.host._started_as("u.service", ["true"], run_folder(tmp_path / "run", uid), record)
        os.close(found.pidfd)
        assert found.pid == shim.pid
        assert used and threading.main_thread() not in used


def all_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_with_too_few_descriptors_a_shim_is_not_seen_and_never_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for one without a cgroup, by which all of it is ended."""
    monkeypatch.setattr(cgroup, "PREFIX", "")  # this process is in one
    monkeypatch.setattr(cgroup, "MOUNTS", (tmp_path,))
    (tmp_path / "cgroup.procs").touch()
    with marked_sleep("m") as shim:
        try:
            facts = {"pid": shim.pid, "start": start_time(shim.pid), "boot": boot_id()}
            (tmp_path / "shim.json").write_text(json.dumps(facts))
            record, seen, own = PodRecord("u", os.getuid(), "m", tmp_path), list[bool](), PodCgroup.of(shim.pid)
            for count in range(12):
                before = all_open()
                with few_files(count):
                    try:
                        found = host._find_shim(tmp_path, record)
                    except NotSeenError:
                        seen.append(False)
                    else:
                        os.close(found.pidfd)
                        seen.append((found.cgroup is None) == (own is None))
                assert all_open() == before, count
        finally:
            shim.kill()
    assert seen[0] is False and seen[-1] is True
    assert seen == sorted(seen)
