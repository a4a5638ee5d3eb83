"""The copy on the disk: what comes back, and what damage costs."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodeagent.agent import savedview
from nodeagent.agent.recovery import Known
from nodeagent.agent.savedview import MOST_ENDED, FileDisk, Writing
from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Queue, Queues, QueuesRecord
from nodeagent.model.usage import UsageDay, UsageRow
from nodeagent.model.window import Windows, WindowsRecord
from nodeagent.osutil.untrusted import NotSeenError
from nodeagent.pods.folder import promised_number
from nodeagent.trust.key import ClusterKey
from tests.descriptors import few_files
from tests.unit.ctl.samples import job as sample
from tests.unit.ctl.samples import node

KEY = ClusterKey(bytes(32))


def job(uid: str, **more: Any) -> JobRecord:
    return sample(uid=uid, name=uid, **more)


USAGE = UsageDay(day=20_000, rows={"1000 default": UsageRow(gpu_ms=5, jobs=1)}, rev=4)


def view(*jobs: JobRecord, rev: int = 9, usage: tuple[UsageDay, ...] = ()) -> Known:
    return Known(
        cluster_uid="c1", era="e1", rev=rev, served=700, nodes=(node("n1"), node("n2")), jobs=jobs,
        lapsed=frozenset({"n2"}), usage=usage,
    )  # fmt: skip


def writing(key: ClusterKey = KEY, cluster: str = "default") -> Writing:
    return Writing(key, cluster)


def test_what_was_written_comes_back() -> None:
    known, wrong = writing().unpack(writing().pack(view(job("a"), job("b"))))
    assert wrong == []
    assert known == view(job("a"), job("b"))
    assert known is not None
    assert (known.whole, known.live) == (True, ("n1",))


def test_use_is_kept_and_goes_when_it_is_too_old() -> None:
    one = writing()
    data = one.pack(view(job("a"), usage=(USAGE,)))
    assert writing().unpack(data) == (view(job("a"), usage=(USAGE,)), [])
    newer = USAGE.model_copy(update={"rev": 10})
    data += one.news(view(job("a"), usage=(newer,))) or b""
    assert writing().unpack(data) == (view(job("a"), usage=(newer,)), [])
    data += one.news(view(job("a"))) or b""
    assert writing().unpack(data) == (view(job("a")), [])


def test_a_record_is_written_anew_when_its_revision_changed() -> None:
    one = writing()
    first = one.pack(view(job("a")))
    again = job("a").model_copy(update={"reason": "nobody raised its revision"})
    assert one.pack(view(again)) == first
    newer = job("a").model_copy(update={"reason": "newer", "rev": job("a").rev + 1})
    known, _ = writing().unpack(one.pack(view(newer)))
    assert known is not None
    assert known.jobs == (newer,)


def test_the_queues_come_back_and_are_written_anew_when_they_changed() -> None:
    one, tree = writing(), Queues(rev=1, queues=(Queue(name="a"),))
    known = replace(view(job("a")), queues=QueuesRecord(tree=tree, rev=8))
    data = one.pack(known)
    assert writing().unpack(data) == (known, [])
    nothing = one.news(known)
    assert nothing is not None
    assert nothing.count(b"\n") == 1, "nothing but a header"
    later = replace(known, queues=QueuesRecord(tree=Queues(rev=2), rev=9))
    added = one.news(later)
    assert added is not None
    assert writing().unpack(data + added) == (later, [])


def test_the_windows_come_back_and_are_written_anew_when_they_changed() -> None:
    one = writing()
    known = replace(view(job("a")), windows=WindowsRecord(windows=Windows(rev=1), rev=8))
    data = one.pack(known)
    assert writing().unpack(data) == (known, [])
    later = replace(known, windows=WindowsRecord(windows=Windows(rev=2), rev=9))
    added = one.news(later)
    assert added is not None
    assert writing().unpack(data + added) == (later, [])


@pytest.mark.parametrize("line", [1, 2, 3, 4])
def test_a_damaged_record_costs_itself_and_the_claim_to_be_whole(line: int) -> None:
    lines = writing().pack(view(job("a"), job("b"))).split(b"\n")
    lines[line] = lines[line].replace(b'"', b"'", 1)
    known, wrong = writing().unpack(b"\n".join(lines))
    assert known is not None
    assert (len(known.nodes) + len(known.jobs), known.whole) == (3, False)
    assert wrong == [f"line {line + 1}: it is damaged, or was written with another cluster key"]


def test_a_file_that_ends_too_early_is_not_whole() -> None:
    data = writing().pack(view(job("a"), job("b")))
    known, wrong = writing().unpack(data[: data.rstrip(b"\n").rindex(b"\n") + 1])
    assert known is not None
    assert [j.uid for j in known.jobs] == [job("a").uid]
    assert (known.whole, wrong) == (False, ["1 records are missing"])


@pytest.mark.parametrize("other", [writing(ClusterKey(bytes(31) + b"1")), writing(cluster="other")])
def test_another_clusters_file_is_not_believed(other: Writing) -> None:
    known, wrong = writing().unpack(other.pack(view(job("a"))))
    assert known is None
    assert wrong == ["line 1: it is damaged, or was written with another cluster key"]


@pytest.mark.parametrize("data", [b"", b"\0" * 500, b"{}", b"\xff\xfe\n\n"])
def test_rubbish_is_reported_and_not_believed(data: bytes) -> None:
    known, wrong = writing().unpack(data)
    assert known is None
    assert len(wrong) == 1


def test_of_the_ended_jobs_only_the_newest_are_kept() -> None:
    ended = [job(f"e{n}").model_copy(update={"phase": "stopped", "ended": float(n)}) for n in range(MOST_ENDED + 3)]
    live = job("live")
    known, _ = writing().unpack(writing().pack(view(*ended, live)))
    assert known is not None
    assert {j.uid for j in known.jobs} == {"live"} | {f"e{n}" for n in range(3, MOST_ENDED + 3)}


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savedview, "MOST_BYTES", 1000)
    with pytest.raises(OSError, match=r"larger than 1000 bytes, and 2 jobs take [0-9]+ of it: stop and delete"):
        writing().pack(view(job("a"), job("b")))


# --- what changed is added


def later(known: Known, *jobs: JobRecord, gone: str = "", rev: int) -> Known:
    """The next view: these jobs are new, or have a new revision; that one is removed."""
    records = {j.uid: j for j in known.jobs} | {j.uid: j for j in jobs}
    left = tuple(job for uid, job in records.items() if uid != gone)
    return replace(known, jobs=left, rev=rev, served=known.served + 10, lapsed=frozenset())


def changed(name: str, rev: int) -> JobRecord:
    return job(name).model_copy(update={"rev": rev, "reason": f"as of {rev}"})


def history() -> tuple[list[Known], list[bytes]]:
    """Views one after the other, and what was written of each: the first whole."""
    one = writing()
    views = [view(job("a"), job("b"))]
    views.append(later(views[-1], changed("a", 2001), rev=2001))
    views.append(later(views[-1], changed("c", 2002), gone="b", rev=2003))
    views.append(later(views[-1], rev=2004))
    views.append(later(views[-1], changed("b", 2005), rev=2005))
    texts = [one.pack(views[0])]
    for known in views[1:]:
        news = one.news(known)
        assert news is not None
        texts.append(news)
    return views, texts


def same(found: Known | None, wanted: Known) -> bool:
    assert found is not None
    by_uid = {j.uid: j for j in found.jobs}, {j.uid: j for j in wanted.jobs}
    return by_uid[0] == by_uid[1] and replace(found, jobs=()) == replace(wanted, jobs=())


def test_additions_are_what_changed_and_give_the_newest_view() -> None:
    views, texts = history()
    for i, known in enumerate(views):
        found, wrong = writing().unpack(b"".join(texts[: i + 1]))
        assert wrong == []
        assert same(found, known)
    assert b'"name":"b"' in texts[0]
    assert all(b'"name":"b"' not in text for text in texts[1:4])
    assert len(texts[3]) < 400


def test_an_addition_that_was_cut_short_counts_as_none() -> None:
    views, texts = history()
    data = b"".join(texts)
    ends = [sum(map(len, texts[: i + 1])) for i in range(len(texts))]
    for cut in range(ends[0], ends[-1] + 1):
        found, wrong = writing().unpack(data[:cut])
        assert wrong == []
        assert same(found, views[max(i for i, end in enumerate(ends) if end <= cut)])


def test_damage_in_an_addition_costs_a_record_and_the_claim_to_be_whole() -> None:
    views, texts = history()
    lines = b"".join(texts).split(b"\n")
    for number in range(len(texts[0].split(b"\n")) - 1, len(lines) - 1):
        bad = list(lines)
        bad[number] = bad[number].replace(b'"', b"'", 1) if b'"' in bad[number] else bad[number][:-1]
        found, wrong = writing().unpack(b"\n".join(bad))
        assert found is not None
        assert (found.whole, len(wrong)) == (False, 1)
        assert found.rev <= views[-1].rev


def test_the_whole_is_written_again_when_as_much_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savedview, "LEAST_ROOM", 1)
    one, known = writing(), view(job("a"), job("b"))
    room = len(one.pack(known))
    for rev in range(2001, 2100):
        known = later(known, changed("a", rev), rev=rev)
        news = one.news(known)
        if news is None:
            break
        room -= len(news)
    assert 0 <= room < 2 * len(writing().pack(known))
    assert news is None
    found, _ = writing().unpack(one.pack(known))
    assert same(found, known)


def test_after_a_doubt_the_whole_is_written() -> None:
    one, known = writing(), view(job("a"))
    assert one.news(known) is None
    one.pack(known)
    assert one.news(later(known, rev=2001)) is not None
    one.doubt()
    assert one.news(later(known, rev=2002)) is None


async def test_the_file_is_replaced_whole_and_is_private(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path / "state" / "view.saved")
    assert disk.read() is None
    await disk.write(b"one")
    await disk.write(b"two")
    assert disk.read() == b"two"
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["view.saved"]
    assert stat.S_IMODE((tmp_path / "state" / "view.saved").stat().st_mode) == 0o600


async def test_it_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def replaced(draft: Path, to: Path) -> Path:
        done.append("name")
        return replace(draft, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    await FileDisk(tmp_path / "view.saved").write(b"one")
    assert done == ["file", "name", "folder"]


async def test_what_is_added_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        fsync(fd)

    disk = FileDisk(tmp_path / "view.saved")
    await disk.write(b"one")
    monkeypatch.setattr(os, "fsync", sync)
    await disk.append(b" two")
    await disk.append(b" three")
    assert disk.read() == b"one two three"
    assert synced == [7, 13]


@pytest.mark.parametrize("change", ["written", "replaced", "removed", "linked"])
async def test_nothing_is_added_to_what_somebody_else_wrote(tmp_path: Path, change: str) -> None:
    path = tmp_path / "view.saved"
    disk = FileDisk(path)
    with pytest.raises(OSError, match="No such file"):
        await disk.append(b"x")
    await disk.write(b"one")
    match change:
        case "written":
            path.write_bytes(b"other")
        case "replaced":
            (tmp_path / "new").write_bytes(b"two")
            (tmp_path / "new").replace(path)
        case "removed":
            path.unlink()
        case "linked":
            path.rename(tmp_path / "there")
            path.symlink_to(tmp_path / "there")
    with pytest.raises(OSError, match=r"somebody else|No such file|symbolic links"):
        await disk.append(b"more")
    with pytest.raises(OSError, match=r"somebody else|No such file|symbolic links"):
        await disk.append(b"more")
    await disk.write(b"three")
    await disk.append(b" four")
    assert path.read_bytes() == b"three four"


async def test_what_cannot_be_written_is_an_error_and_leaves_the_old(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path / "view.saved")
    await disk.write(b"one")
    (tmp_path / "view.saved.new").mkdir()
    with pytest.raises(OSError, match="directory"):
        await disk.write(b"two")
    assert disk.read() == b"one"


def test_nobody_waits_for_who_writes_to_a_pipe_in_its_place(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "view.saved")
    with pytest.raises(OSError, match=f"it is no regular file: replace it: '{file}'"):
        FileDisk(file).read()


async def test_a_disk_that_hangs_holds_up_one_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(savedview, "WRITE_LIMIT", 0.05)
    monkeypatch.setattr(FileDisk, "_put", lambda disk, data: release.wait(10))
    disk = FileDisk(tmp_path / "view.saved")
    try:
        with pytest.raises(OSError, match="has not answered"):
            await disk.write(b"one")
        with pytest.raises(OSError, match="has not ended yet"):
            await disk.write(b"two")
        assert len(set(threading.enumerate()) - before) == 1
    finally:
        release.set()


def test_a_promise_is_read_and_nothing_else_is_believed(tmp_path: Path) -> None:
    file = tmp_path / "pods" / "u" / "highest.json"
    file.parent.mkdir(parents=True)
    assert promised_number(tmp_path, "u") == 0
    for text, number in (
        ('{"number": 7, "id": "x"}', 7),
        ("[]", 0),
        ('{"number": "7"}', 0),
        ("{", 0),
        ("", 0),
        ("[" * 4000, 0),
    ):
        file.write_text(text)
        assert promised_number(tmp_path, "u") == number
    file.unlink()
    os.mkfifo(file)
    assert promised_number(tmp_path, "u") == 0, "nobody waits for a writer"
    file.unlink()
    (tmp_path / "other").write_text('{"number": 7}')
    file.symlink_to(tmp_path / "other")
    assert promised_number(tmp_path, "u") == 0
    file.unlink()
    file.write_text('{"number": 7}')
    with few_files(0), pytest.raises(NotSeenError):
        promised_number(tmp_path, "u")
