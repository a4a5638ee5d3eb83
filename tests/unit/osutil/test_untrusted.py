"""Whatever lies in a user's folder: it is a plain file of his, bounded, or there is nothing. Nothing is waited for."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from nodeagent.osutil import untrusted
from nodeagent.osutil.linux import can_refuse_descriptors
from nodeagent.osutil.untrusted import (
    VALUES_MAX,
    AsideByOwner,
    HungError,
    NotSeenError,
    OneAside,
    PutAsideError,
    UntrustedError,
    UntrustedFolder,
    _naming,
    aside,
    detach,
    is_mounted,
    is_there,
    object_and_text,
    object_of,
    owner_of,
    remove_tree,
)


def _link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


TRAPS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "link": _link,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "folder": Path.mkdir,
    "sparse": _sparse,
    "nothing": lambda path: None,
    "array": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 50_000),
    "deep object": lambda path: path.write_text('{"a":' * 40 + "1" + "}" * 40),
    "surrogate": lambda path: path.write_text('{"a": "\\ud800"}'),
    "not utf-8": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "not a number": lambda path: path.write_text('{"a": NaN}'),
    "long number": lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_what_is_no_json_file_is_refused(tmp_path: Path, trap: str) -> None:
    TRAPS[trap](tmp_path / "x.json")
    with UntrustedFolder(tmp_path) as folder, pytest.raises(UntrustedError):
        folder.read_object("x.json")


def test_without_a_descriptor_nothing_was_seen(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("{}")
    files, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    with UntrustedFolder(tmp_path.parent, tmp_path.name) as folder:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, files[1]))
        try:
            with pytest.raises(NotSeenError, match="Too many open files"):
                folder.read_object("plain")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        assert folder.read_object("plain") == {}


@pytest.mark.parametrize(("number", "kind"), [
    (errno.ESTALE, NotSeenError), (errno.ETIMEDOUT, NotSeenError), (errno.ENOENT, UntrustedError),
])  # fmt: skip
def test_where_the_file_server_is_silent_nothing_was_seen(number: int, kind: type[Exception]) -> None:
    """It would be taken for a file that is not there."""
    with (
        pytest.raises(UntrustedError, match=f"^/shared/x: {os.strerror(number)}$") as found,
        _naming(Path("/shared/x")),
    ):
        raise OSError(number, os.strerror(number))
    assert type(found.value) is kind


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.json").write_text('{"a": [1, "é", {}]}')
    with UntrustedFolder(tmp_path, "in", owner=os.geteuid()) as folder:
        assert folder.read_object("x.json") == {"a": [1, "é", {}]}
        assert folder.end_of("x.json", 3) == b"{}]}"[-3:]
        with pytest.raises(UntrustedError, match="larger than 3 bytes"):
            folder.read("x.json", 3)


def test_no_way_leads_through_a_link_or_into_anothers_folder(tmp_path: Path) -> None:
    (tmp_path / "real" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    for names in (("link",), ("link", "in"), ("real", "nothing")):
        with pytest.raises(UntrustedError):
            UntrustedFolder(tmp_path, *names)
    with pytest.raises(UntrustedError, match="belongs to uid"):
        UntrustedFolder(tmp_path, "real", owner=os.geteuid() + 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's file")
def test_anothers_file_is_refused(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).write_text("{}")
    os.chown(tmp_path / "theirs", 4711, 4711)
    with UntrustedFolder(tmp_path) as folder:
        assert folder.read_object("mine") == {}
        with pytest.raises(UntrustedError, match="belongs to uid 4711"):
            folder.read_object("theirs")
        with pytest.raises(UntrustedError, match="belongs to uid 4711"):
            folder.append("theirs", 0o600, also=0)


@pytest.mark.parametrize("trap", ["fifo", "link", "link to nothing", "link to a device", "socket", "folder"])
def test_only_a_plain_file_is_added_to(tmp_path: Path, trap: str) -> None:
    TRAPS[trap](tmp_path / "log")
    with UntrustedFolder(tmp_path) as folder, pytest.raises(UntrustedError):
        folder.append("log", 0o640, also=os.geteuid())


def test_a_file_with_another_name_is_not_added_to(tmp_path: Path) -> None:
    with UntrustedFolder(tmp_path) as folder:
        for text in (b"a", b"b"):
            with folder.append("log", 0o640, also=os.geteuid()) as file:
                file.write(text)
        assert (tmp_path / "log").read_text() == "ab"
        os.link(tmp_path / "log", tmp_path / "other")
        with pytest.raises(UntrustedError, match="other names"):
            folder.append("log", 0o640, also=os.geteuid())


def test_connecting(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, UntrustedFolder(tmp_path) as folder:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(UntrustedError, match="refused"):
            folder.connect("s")
        listener.listen(0)
        link, pid = folder.connect("s")
        assert pid == os.getpid()
        if can_refuse_descriptors():
            accepted, _ = listener.accept()
            with accepted, pytest.raises(PermissionError):
                socket.send_fds(accepted, [b"x"], [0])
            link.close()
            link, _ = folder.connect("s")
        with pytest.raises(UntrustedError, match="too many wait"):  # nobody accepts: it is not waited for
            for _ in range(3):
                folder.connect("s")[0].close()
        link.close()
        (tmp_path / "link").symlink_to("s")
        (tmp_path / "file").touch()
        os.mkfifo(tmp_path / "fifo")
        for name in ("link", "file", "fifo", "nothing"):
            with pytest.raises(UntrustedError):
                folder.connect(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_another_mount_is_not_even_looked_at(tmp_path: Path) -> None:
    """A user may mount a file system of his own making over what is his: one that never answers."""
    for name in ("over", "file"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    (tmp_path / "tree" / "over" / "x").touch()
    (tmp_path / "file").write_text("{}")
    (tmp_path / "tree" / "f").touch()
    mounts = [("over", tmp_path / "tree" / "file"), ("f", tmp_path / "file")]
    for name, source in mounts:
        subprocess.run(["mount", "--bind", source, tmp_path / "tree" / name], check=True)
    try:
        with UntrustedFolder(tmp_path, "tree") as folder:
            with pytest.raises(UntrustedError, match="another mount"):
                folder.open("f")
            with pytest.raises(UntrustedError, match="another mount"):
                folder.append("f", 0o600, also=0)
        with pytest.raises(UntrustedError, match="another mount"):
            UntrustedFolder(tmp_path, "tree", "over")
        with pytest.raises(UntrustedError, match="another mount"):
            owner_of(tmp_path / "tree", "over")
        assert is_there(tmp_path / "tree", "over")
        assert [is_mounted(tmp_path / "tree", name) for name in ("over", "f", "none")] == [True, True, False]
        detach(tmp_path / "tree", "over")
        detach(tmp_path / "tree", "over")  # nothing there is fine
        assert not is_mounted(tmp_path / "tree", "over")
    finally:
        for name, _ in mounts:
            subprocess.run(["umount", tmp_path / "tree" / name], check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("at", [".", "sub", "sub/deep", "sub/f"])
def test_what_is_mounted_in_a_tree_that_is_removed_is_detached_and_kept(tmp_path: Path, at: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    place, source = tmp_path / "tree" / at, tmp_path / "kept"
    (tmp_path / "tree" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "f").touch()
    if place.is_file():
        source /= "file"
    for _ in range(2):
        subprocess.run(["mount", "--bind", source, place], check=True)
    try:
        remove_tree(tmp_path, "tree")
    finally:
        while place.exists() and subprocess.run(["umount", "-q", place], check=False).returncode == 0:
            pass
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["kept", "kept/file"]


def test_whether_an_entry_is_there_and_whose_it_is(tmp_path: Path) -> None:
    _link(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    assert [is_there(tmp_path, name) for name in ("link", "fifo", "none")] == [True, True, False]
    assert not is_there(tmp_path / "none", "none")
    assert not is_mounted(tmp_path / "none", "none")
    assert owner_of(tmp_path, "link") == os.geteuid()
    with pytest.raises(UntrustedError):
        owner_of(tmp_path, "none")


def test_removing_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    tree = tmp_path / "tree"
    (tree / "sub" / "sub").mkdir(parents=True)
    (tree / "sub" / "link").symlink_to(tmp_path / "kept")
    os.mkfifo(tree / "sub" / "sub" / "fifo")
    (tree / "top").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path, "tree")
    remove_tree(tmp_path, "tree")  # nothing there is fine
    (tmp_path / "tree").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path, "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


OWNER, OTHER, SUBORDINATE = 61_018, 61_019, 8_000_007


def _tree(path: Path) -> None:
    """A user's, into which he has moved folders of another user: he could do that, and could not empty them."""
    for name, uid in (
        ("", OWNER), ("sub", OWNER), ("sub/deep", OWNER), ("sub/data", OTHER), ("sub/data/precious", OTHER),
        ("sub/deep/data", OTHER), ("sub/empty", OTHER), ("roots", 0), ("layer", SUBORDINATE),
        ("layer/bin", SUBORDINATE),
    ):  # fmt: skip
        (path / name).mkdir()
        (path / name / "f").touch()
        os.chown(path / name / "f", OTHER, OTHER)
        os.chown(path / name, uid, uid)
    (path / "sub" / "empty" / "f").unlink()


@pytest.fixture
def subuids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "subuid"
    file.write_text(f"{OWNER}:8000000:65536\n{OTHER}:9000000:65536\n")
    monkeypatch.setattr("nodeagent.osutil.subuids.FILE", file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root removes what is others'")
def test_what_other_users_have_in_a_tree_is_kept_and_put_aside(tmp_path: Path, subuids: None) -> None:
    """Root removed what the tree's owner could move there, and could not remove."""
    place = tmp_path / "pods"
    place.mkdir()
    _tree(place / "tree")
    with pytest.raises(PutAsideError, match=rf"of uid (0|{OTHER}) ") as left:
        remove_tree(place, "tree")
    (aside_,) = place.iterdir()
    assert aside_.name in str(left.value)
    assert aside_.name.startswith("tree.")
    kept = sorted(path.parent.name.split(".")[0] for path in aside_.rglob("f"))
    assert kept == ["data", "data", "precious", "roots"]
    with pytest.raises(PutAsideError):
        remove_tree(place, aside_.name)
    assert [path.name for path in place.iterdir()] == [aside_.name], "its name grows no longer"
    for path in [aside_, *aside_.rglob("*")]:
        os.chown(path, OWNER, OWNER)
    remove_tree(place, aside_.name)
    assert list(place.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root removes what is others'")
def test_of_a_tree_of_roots_all_is_removed(tmp_path: Path) -> None:
    _tree(tmp_path / "tree")
    os.chown(tmp_path / "tree", 0, 0)
    remove_tree(tmp_path, "tree")
    assert list(tmp_path.iterdir()) == []


def test_removing_a_tree_without_bottom(tmp_path: Path) -> None:
    """Deeper than Python recurses, than a path may be long, and than a process may have descriptors."""
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        name = "tree"
        for _ in range(1100):
            os.mkdir(name, dir_fd=here)
            inner = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here, name = inner, "d" * 200
    finally:
        os.close(here)
    remove_tree(tmp_path, "tree")
    assert list(tmp_path.iterdir()) == []


def test_removing_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "REMOVE_MAX", 3)
    (tmp_path / "tree").mkdir()
    for number in range(5):
        (tmp_path / "tree" / str(number)).touch()
    with pytest.raises(UntrustedError, match="more than 3"):
        remove_tree(tmp_path, "tree")


async def test_what_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "ASIDE_MAX", 2)
    gate = threading.Event()
    assert await aside(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await aside(lambda: 1 // 0)
    try:
        for message in ("within 0.01 s", "within 0.01 s", "have not come back"):
            with pytest.raises(NotSeenError, match=message):
                await aside(gate.wait, seconds=0.01)
    finally:
        gate.set()


@pytest.mark.parametrize("gone", ["in time", "cancelled"])
async def test_what_is_opened_for_who_waits_no_more_is_closed(gone: str) -> None:
    gate, closed = threading.Event(), asyncio.Queue[str]()

    def opens() -> str:
        gate.wait(30)
        return "opened"

    look = asyncio.create_task(aside(opens, 0.01 if gone == "in time" else 30, discard=closed.put_nowait))
    await asyncio.sleep(0)
    if gone == "cancelled":
        look.cancel()
    with pytest.raises(NotSeenError if gone == "in time" else asyncio.CancelledError):
        await look
    gate.set()
    async with asyncio.timeout(30):
        assert await closed.get() == "opened"
    assert await aside(lambda: "kept", discard=closed.put_nowait) == "kept"
    assert closed.empty()


async def test_without_a_thread_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(NotSeenError, match="can't start new thread"):
        await aside(lambda: 7)


async def test_what_hangs_is_not_done_again_until_it_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    one, gate, begun = OneAside(), threading.Event(), SimpleQueue[int]()

    def look() -> None:
        begun.put(1)
        gate.wait(30)

    assert await one.run(lambda: 7) == 7
    with monkeypatch.context() as full, pytest.raises(NotSeenError, match="0 looks"):
        full.setattr(untrusted, "ASIDE_MAX", 0)
        await one.run(lambda: 7)
    with pytest.raises(NotSeenError, match="did not come back within"):
        await one.run(look, seconds=0.01)
    for _ in range(10):
        with pytest.raises(NotSeenError, match="an earlier look has not come back"):
            await one.run(look, seconds=0.01)
    assert begun.get(timeout=30) == 1
    gate.set()
    while True:
        try:
            assert await one.run(lambda: 8) == 8
            break
        except NotSeenError:
            await asyncio.sleep(0.01)
    assert begun.empty()


async def test_of_each_user_so_many_looks_are_made_at_a_time_and_nobody_elses_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(untrusted, "OWNER_MAX", 2)
    monkeypatch.setattr(untrusted, "ASIDE_MAX", 0)
    looks, gate = AsideByOwner(), threading.Event()

    def hang() -> str:
        gate.wait(30)
        return "back"

    for name in ("a", "b"):
        with pytest.raises(HungError, match=r"did not come back within 0\.01 s"):
            await looks.run(1001, name, hang, 0.01)
    with pytest.raises(NotSeenError, match="an earlier look has not come back"):
        await looks.run(1001, "a", hang, 0.01)
    with pytest.raises(NotSeenError, match="2 earlier looks for uid 1001 have not come back") as refused:
        await looks.run(1001, "c", hang, 0.01)
    assert not isinstance(refused.value, HungError), "it was never begun"
    assert await looks.run(1002, "d", lambda: "seen") == "seen"
    waits, goes = (asyncio.create_task(looks.run(1001, name, hang, 30)) for name in ("e", "f"))
    await asyncio.sleep(0)
    goes.cancel()
    gate.set()
    assert await waits == "back"
    for name in ("e", "f", "g"):
        assert await looks.run(1001, name, hang, 30) == "back", "each has given its turn back"


def test_objects() -> None:
    assert object_of(b'{"v": 1.5}') == {"v": 1.5}
    assert object_of(json.dumps({"a": "\U0001f600"}).encode()) == {"a": "\U0001f600"}
    halves = {"\ud800": "\udfff and \\ud800", "b": "\U0001f600"}
    whole = {"\ufffd": "\ufffd and \\ud800", "b": "\U0001f600"}
    assert object_and_text(json.dumps(halves).encode(), lossy=True) == (whole, json.dumps(whole, ensure_ascii=False))
    twice = b'{"a\\ud800": 1, "a\\udfff": 2, "b": 1, "b": 2}'
    assert object_and_text(twice, lossy=True) == ({"a\ufffd": 2, "b": 2}, '{"a\ufffd": 2, "b": 2}')
    digits = {"a": "9" * 5000, "b": int("9" * 400)}
    assert object_of(json.dumps(digits).encode()) == digits
    with pytest.raises(UntrustedError, match="a number of 401 digits"):
        object_of(json.dumps({"a": int("9" * 401)}).encode())
    most = {"a": [0] * (VALUES_MAX - 2)}
    assert object_of(json.dumps(most).encode()) == most
    most["a"].append(0)
    with pytest.raises(UntrustedError, match="JSON of more than 65536 values"):
        object_of(json.dumps(most).encode())
