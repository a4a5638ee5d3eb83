"""What a torchrun line becomes: the command of its script, the number of workers, and what is said of the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from nodeagent.ctl.run import TORCHRUNS, _local, _restarts, _rules, _signals, as_torchrun, default_name, run
from nodeagent.ctl.terminal import CtlError
from nodeagent.ctl.torchline import FLAGS, command_of, interpreter, unneeded_line, workers
from nodeagent.model.jobspec import RestartLimits


@pytest.fixture(autouse=True)
def pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs, which is the PATH, and an interpreter that is named."""
    for name in ("tool.py", "tool", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHON_EXEC", "/env/python")
    return tmp_path


PYTHON = ("/env/python", "-u")
NONE = {"module": False, "no_python": False, "run_path": False}
COMMANDS: list[tuple[dict[str, bool], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    ({}, ("train.py", "-m"), (*PYTHON, "train.py", "-m"), (*PYTHON, "train.py", "-m")),
    ({}, ("tool", "x"), (*PYTHON, "tool", "x"), ("tool", "x")),
    ({}, ("tool.py", "x"), (*PYTHON, "tool.py", "x"), ("tool.py", "x")),
    ({}, ("python train.py",), (*PYTHON, "python train.py"), ("python train.py",)),
    ({"module": True}, ("a.b", "x"), (*PYTHON, "-m", "a.b", "x"), (*PYTHON, "-m", "a.b", "x")),
    ({"no_python": True}, ("train.py",), ("train.py",), ("train.py",)),
    ({"run_path": True, "no_python": True}, ("/t.py",), (*PYTHON, "/t.py"), (*PYTHON, "/t.py")),
]


@pytest.mark.parametrize(("flags", "words", "as_torchruns", "as_ours"), COMMANDS)
def test_the_command_of_a_script(
    flags: dict[str, bool], words: tuple[str, ...], as_torchruns: tuple[str, ...], as_ours: tuple[str, ...]
) -> None:
    assert command_of(words, always_script=True, **NONE | flags) == as_torchruns
    assert command_of(words, always_script=False, **NONE | flags) == as_ours


def test_a_module_without_python_is_refused_as_torchrun_does() -> None:
    with pytest.raises(CtlError, match="exclude"):
        command_of(("a",), always_script=True, module=True, no_python=True, run_path=False)


def test_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreter({"PYTHON_EXEC": "/a/python3"}) == "/a/python3"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert interpreter({}) == sys.executable
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert interpreter({}) == "python"
    monkeypatch.setenv("PATH", "")
    assert interpreter({}) == sys.executable


def test_how_many_workers() -> None:
    cores = str(len(os.sched_getaffinity(0)))
    assert [workers(text, lambda: False) for text in ("3", "gpu", "cpu", "auto")] == ["3", "gpu", cores, cores]
    assert workers("auto", lambda: True) == "gpu"
    with pytest.raises(CtlError, match="xpu"):
        workers("xpu", lambda: False)


def asked(*words: str) -> dict[str, Any]:
    params: dict[str, Any] = as_torchrun.make_context("nodeagent-run", [*words, "train.py"]).params
    return params


@pytest.mark.parametrize(
    ("words", "local"),
    [
        ((), None),
        (("--nnodes", "2"), None),
        (("--standalone",), 1),
        (("--standalone", "--nnodes", "1:3"), 3),
        (("--standalone", "--local", "2"), 2),
    ],
)
def test_nodes_brought_up_for_the_command(words: tuple[str, ...], local: int | None) -> None:
    assert _local(asked(*words)) == local


def test_what_is_not_needed_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_RDZV_ID", "42")
    words = ["--node_rank", "0", "--rdzv-backend=c10d", "--nnodes", "1", "train.py", "--master-port", "1"]
    with as_torchrun.make_context("nodeagent-run", words) as ctx:
        message = unneeded_line(ctx)
        assert message.startswith("not needed here: --rdzv-backend, --rdzv-id, --node-rank (")
        assert "\n" not in message and "--master-port" not in message and "--nnodes" not in message
    with as_torchrun.make_context("nodeagent-run", ["--nnodes", "1", "--", "train.py"]) as ctx:
        monkeypatch.delenv("PET_RDZV_ID")
    with as_torchrun.make_context("nodeagent-run", ["--nnodes", "1", "train.py"]) as ctx:
        assert unneeded_line(ctx) == ""


def test_wrong_values_name_their_option() -> None:
    for words, option in (
        (("--tee", "4"), "--tee: '4'"),
        (("-r", "0:9"), "--redirects: '0:9'"),
        (("--local-ranks-filter", "a"), "--local-ranks-filter: 'a'"),
    ):
        with pytest.raises(CtlError, match=option):
            _rules(asked(*words))
    with pytest.raises(click.BadParameter):
        asked("--max-restarts", "many")


def test_signals() -> None:
    assert {int(number) for number in _signals("SIGTERM, SIGUSR1")} == {15, 10}
    for bad in ("SIGKILL", "TERM", "", "SIG_IGN"):
        with pytest.raises(CtlError, match="signals-to-handle"):
            _signals(bad)


def test_a_budget_that_is_too_large_is_cut_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert [_restarts(number) for number in (None, 0, 60, 100)] == [None, 0, 60, 60]
    assert capsys.readouterr().err == "nodeagentctl: --max-restarts 100: 60 within an hour is the most here\n"


def test_a_modules_file_gives_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack" / "main").mkdir(parents=True)
    (tmp_path / "pack" / "train.py").write_text("import torch")
    (tmp_path / "pack" / "main" / "__main__.py").write_text("import torch")
    script, package = (("python", "-u", "-m", f"pack.{name}", "-m") for name in ("train", "main"))
    assert default_name(script).startswith("train-")
    assert default_name(package).startswith("main-")


@pytest.mark.parametrize("command", [run, as_torchrun])
def test_the_help_says_what_an_option_does_here(command: click.Command) -> None:
    helps = {name: p.help or "" for p in command.params if isinstance(p, click.Option) for name in p.opts}
    for flag in FLAGS:
        if flag.needed:
            assert "torchrun " not in helps[flag.name], flag.name
            if not flag.here.startswith("the same"):
                assert helps[flag.name].lower()[:-1] != flag.there.replace("`", ""), flag.name
    assert f"nodeagent-run: {TORCHRUNS.nproc}]" in helps["--nproc-per-node"]
    assert f"[default: {RestartLimits().max}; nodeagent-run: {TORCHRUNS.max_restarts}]" in helps["--max-restarts"]
