"""Where output goes: what torchrun promises of --redirects, --tee, --local-ranks-filter and --log-dir."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from nodeagent.ctl.logs import PlainPrinter, Printer
from nodeagent.ctl.outputs import LogFiles, Outputs, Regular, Rules, Streams, local_ranks, log_base, words_of

BOTH = ("stdout", "stderr")


def line(rank: int, text: str, stream: str = "stdout", generation: int = 1, **more: Any) -> dict[str, Any]:
    known = {"node": f"n{rank // 2 + 1}", "generation": generation, "rank": rank, "stream": stream, "text": text}
    return known | {"time": "", "partial": False} | more


def printed(rules: Rules, *lines: dict[str, Any], role: str = "", template: str | None = None) -> tuple[str, str]:
    """What the console has (stdout, stderr), with two workers on each node; ``role``: as torchrun shows it."""
    out, err = io.StringIO(), io.StringIO()
    outputs = Outputs(rules, Regular(2).local)
    printer = PlainPrinter(role, template, out, err, outputs) if role else Printer(out, err, outputs)
    for each in lines:
        printer.put(each)
    printer.close()
    return out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", {}),
        ("1", {0: ["stdout"], 1: ["stdout"]}),
        ("2", {0: ["stderr"], 1: ["stderr"]}),
        ("3", {0: [*BOTH], 1: [*BOTH]}),
        ("0:1,1:2", {0: ["stdout"], 1: ["stderr"]}),
        ("1:3", {1: [*BOTH]}),
        ("0:0,10:3", {10: [*BOTH]}),
    ],
)
def test_streams(text: str, streams: dict[int, list[str]]) -> None:
    read = Streams.read(text)
    found = {rank: [s for s in BOTH if read.has(rank, s)] for rank in (0, 1, 10)}
    wanted: dict[int, list[str]] = {0: [], 1: [], 10: []} | streams
    if read.by_rank is None:  # every local rank, however many
        wanted[10] = wanted[0]
    assert found == wanted
    assert read.any == bool(streams)


@pytest.mark.parametrize("text", ["", "4", "01", "a", "0:4", "0:1,", "0:1;1:2", "-1:1"])
def test_what_torchrun_refuses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="0:1,1:2"):
        Streams.read(text)


@pytest.mark.torch
@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:1,1:2", "1:3", "0:0,1:1", "", "4", "0:4", "0:1,", "x"])
def test_streams_are_torchs(text: str) -> None:
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")
    try:
        theirs = api.to_map(api.Std.from_str(text), 3)
    except ValueError:
        with pytest.raises(ValueError, match="neither"):
            Streams.read(text)
        return
    ours = Streams.read(text)
    assert {rank: sum(bit for bit, s in ((1, "stdout"), (2, "stderr")) if ours.has(rank, s)) for rank in theirs} == {
        rank: int(bits) for rank, bits in theirs.items()
    }


def test_redirected_streams_are_not_shown_and_teed_ones_are() -> None:
    rules = Rules(redirects=Streams.read("3"), tee=Streams.read("1:1"))
    reported = [line(rank, f"{s}{rank}", s) for rank in (0, 1, 2, 3) for s in BOTH]
    assert printed(rules, *reported) == ("[1]<stdout>: stdout1\n[3]<stdout>: stdout3\n", "")


def test_the_filter_is_by_local_rank_on_every_node_and_of_teed_lines_too() -> None:
    rules = Rules(tee=Streams.read("1"), local_ranks=local_ranks("1"))
    reported = [line(rank, f"{s}{rank}", s) for rank in (0, 1, 2, 3) for s in BOTH]
    assert printed(rules, *reported) == (
        "[1]<stdout>: stdout1\n[3]<stdout>: stdout3\n",
        "[1]<stderr>: stderr1\n[3]<stderr>: stderr3\n",
    )


@pytest.mark.parametrize("text", ["a", "0;1", "0,", "-1", " "])
def test_a_filter_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="such as 0,2"):
        local_ranks(text)


def test_a_place_is_named_instead_of_the_rank() -> None:
    out = io.StringIO()
    printer = Printer(out, out)
    line = {
        "node": "n1",
        "generation": 1,
        "rank": 2,
        "stream": "stdout",
        "time": "1",
        "text": "hello",
        "partial": False,
    }
    printer.put(line | {"place": "trainer.0"})
    printer.put(line | {"generation": 2})  # whose members nobody knows any more
    assert out.getvalue() == "[trainer.0]<stdout>: hello\n[2]<stdout>: hello\n"


def test_as_under_torchrun_only_teed_lines_have_a_prefix() -> None:
    rules = Rules(tee=Streams.read("1:1"))
    reported = (line(0, "plain"), line(1, "teed"), line(1, "error", "stderr"))
    assert printed(rules, *reported, role="trainer") == ("plain\n[trainer1]:teed\n", "error\n")
    named = printed(rules, *reported, role="t", template="${role_name}/${local_rank}/${rank} ")
    assert named[0] == "plain\nt/1/1 teed\n"


def test_pieces_of_a_line_are_put_together_again() -> None:
    pieces = (line(1, "50%", partial=True), line(1, "\r60%", partial=True), line(1, ""), line(1, "end"))
    assert printed(Rules(), *pieces, role="w") == ("50%\r60%\nend\n", "")
    assert printed(Rules(tee=Streams.read("1")), *pieces, role="w") == ("[w1]:50%\r60%\n[w1]:end\n", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(*lines: dict[str, Any]) -> str:
    """What the one terminal gets that both streams lead to."""
    terminal = Terminal()
    printer = Printer(terminal, terminal)
    for each in lines:
        printer.put(each)
    printer.close()
    return terminal.getvalue()


def test_a_progress_bar_moves_in_its_own_line() -> None:
    bar = (line(1, " 10%", partial=True), line(1, "\r 20%", partial=True), line(1, "\r 30%"))
    assert on_a_terminal(*bar) == "[1]<stdout>:  10%\r[1]<stdout>:  20%\r[1]<stdout>:  30%\n"
    assert printed(Rules(), *bar) == ("[1]<stdout>:  10%\r 20%\r 30%\n", "")


def test_another_workers_line_ends_an_open_one() -> None:
    reported = (
        line(0, "a", partial=True), line(1, "b", "stderr"), line(0, "c", partial=True), line(0, "d"),
        line(1, "e", partial=True),
    )  # fmt: skip
    assert on_a_terminal(*reported) == ("[0]<stdout>: a\n[1]<stderr>: b\n[0]<stdout>: cd\n[1]<stdout>: e\n")
    assert printed(Rules(), *reported) == ("[0]<stdout>: acd\n[1]<stdout>: e\n", "[1]<stderr>: b\n")


def test_a_worker_cannot_write_over_the_name_of_its_line() -> None:
    shown = on_a_terminal(line(1, "x\r[0]<stdout>: all is well\x1b[2J"))
    assert shown == "[1]<stdout>: x\r[1]<stdout>: [0]<stdout>: all is well\\u001b[2J\x1b[0m\n"


def test_files_are_laid_out_as_torchruns(tmp_path: Path) -> None:
    rules = Rules(
        redirects=Streams.read("3"),
        tee=Streams.read("0:1"),
        duplicates={"stdout": words_of("loss,a,,b"), "stderr": words_of("")},
    )
    with LogFiles(tmp_path / "logs", "job") as files:
        printer = Printer(io.StringIO(), io.StringIO(), Outputs(rules, Regular(2).local, files))
        for each in (
            line(0, "loss 1"), line(0, "has a,b"), line(0, "has a"), line(1, "loss 2"), line(1, "bad", "stderr"),
            line(2, "other node", partial=True), line(0, "again", generation=2),
        ):  # fmt: skip
            printer.put(each)
        found = {str(p.relative_to(tmp_path / "logs")): p.read_text() for p in tmp_path.rglob("*.log")}
    named = {path.replace(path.partition("/")[0], path.partition("/")[0][:7]): text for path, text in found.items()}
    assert named == {
        "job_n1_/attempt_0/0/stdout.log": "loss 1\nhas a,b\nhas a\n",
        "job_n1_/attempt_0/1/stdout.log": "loss 2\n",
        "job_n1_/attempt_0/1/stderr.log": "bad\n",
        "job_n1_/attempt_0/filtered_stdout.log": "[0]<stdout>: loss 1\n[0]<stdout>: has a,b\n",
        "job_n2_/attempt_0/0/stdout.log": "other node",
        "job_n1_/attempt_1/0/stdout.log": "again\n",
    }


def test_a_second_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = set()
    for _ in range(2):
        with LogFiles(tmp_path, "job") as files:
            folders.add(files.attempt("n1", 1).parent)
            assert files.attempt("n1", 2).parent in folders
    assert len(folders) == 2


def test_a_disk_that_fails_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with LogFiles(tmp_path / "file", "job") as files:
        out = io.StringIO()
        printer = Printer(out, io.StringIO(), Outputs(Rules(tee=Streams.read("3")), Regular(1).local, files))
        printer.put(line(0, "one"))
        printer.put(line(0, "two"))
    assert out.getvalue() == "[0]<stdout>: one\n[0]<stdout>: two\n"
    assert capsys.readouterr().err.count("not written any more") == 1


def test_the_folder_for_log_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert log_base(os.devnull) is None
    assert log_base(str(tmp_path / "not/yet")) == tmp_path / "not/yet"
    made = log_base(None)
    assert made is not None and made.parent == tmp_path and made.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        log_base(str(tmp_path / "file"))


@pytest.mark.parametrize("plain", [False, True])
def test_the_tools_own_line_is_never_appended_to_a_workers_unfinished_one(plain: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = PlainPrinter("trainer", None, out, err) if plain else Printer(out, err)
    printer.announce("generation 1 active")
    printer.put(line(0, "50 %", "stderr", partial=True))
    printer.announce("job a succeeded")
    printer.put(line(1, "a notice", "notice"))
    printer.put(line(0, "100 %", "stderr"))
    printer.close()
    begin = "" if plain else "[0]<stderr>: "
    assert err.getvalue().splitlines() == [
        "nodeagentctl: generation 1 active", f"{begin}50 %", "nodeagentctl: job a succeeded", "nodeagentctl: a notice",
        f"{begin}100 %",
    ]  # fmt: skip
