"""torchrun's own parser, of the torch that is installed, against what is known of it here: a newer one's new option
fails a test until it has a meaning or is in the table of those not needed."""

from __future__ import annotations

import argparse

import click
import pytest

from nodeagent.ctl.run import TORCHRUNS, as_torchrun, run
from nodeagent.ctl.torchline import FLAGS

distributed = pytest.importorskip("torch.distributed.run")
utilities = pytest.importorskip("torch.distributed.argparse_util")
pytestmark = pytest.mark.torch

BY_NAME = {flag.name: flag for flag in FLAGS}


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    for flag in FLAGS:
        monkeypatch.delenv(flag.variable, raising=False)
    made: argparse.ArgumentParser = distributed.get_args_parser()
    return made


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


def unknown(parser: argparse.ArgumentParser) -> set[str]:
    """Spellings of torchrun's that the table, or one of the commands, has not."""
    shown = {spelling.replace("_", "-") for action in options(parser) for spelling in action.option_strings}
    table = {word for flag in FLAGS for word in (flag.name, flag.short)}
    taken = [{word for p in command.params for word in p.opts} for command in (run, as_torchrun)]
    return {word for word in shown if not all(word in known for known in (table, *taken))}


def test_every_option_of_torchruns_is_known(parser: argparse.ArgumentParser) -> None:
    assert len(options(parser)) > 20
    assert unknown(parser) == set()


def test_a_new_option_would_be_noticed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--brand-new", "--brand_new", action=utilities.env)
    assert unknown(parser) == {"--brand-new"}


def test_it_takes_a_value_and_reads_the_environment_where_torchruns_does(parser: argparse.ArgumentParser) -> None:
    for action in options(parser):
        flag = BY_NAME[max(action.option_strings, key=len).replace("_", "-")]
        assert bool(flag.value) == (action.nargs != 0), flag
        assert flag.environ == isinstance(action, (utilities.env, utilities.check_env)), flag
        assert flag.variable == f"PET_{action.dest.upper()}"


def test_what_is_not_given_is_as_torchruns(parser: argparse.ArgumentParser) -> None:
    theirs = parser.parse_args(["train.py"])
    assert (theirs.nproc_per_node, theirs.max_restarts, theirs.role, theirs.nnodes) == (
        TORCHRUNS.nproc,
        TORCHRUNS.max_restarts,
        TORCHRUNS.role,
        "1:1",
    )


LINES = [
    ["--nproc_per_node=2", "train.py", "--nproc_per_node", "9"],
    ["--stand", "--nnod", "1:2", "--rol", "a", "train.py"],
    ["-m", "package.module", "-m", "--tee", "3"],
    ["-r3", "-t", "0:1,1:2", "--log_dir", "logs", "train.py", "-r", "1", "--", "x"],
    ["--standalone", "--nnodes", "1", "--", "train.py", "-x"],
    ["--rdzv-backend=c10d", "--rdzv-endpoint", "host:29400", "--no_python", "bash", "-c", "true"],
    ["--shutdown-timeout", "7", "--local-ranks-filter", "0,1", "--role", "trainer", "train.py"],
    ["--virtual-local-rank", "--run-path", "/a/train.py"],
]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_line_is_read_as_torchrun_reads_it(parser: argparse.ArgumentParser, words: list[str]) -> None:
    theirs = parser.parse_args(words)
    ctx = as_torchrun.make_context("nodeagent-run", list(words))
    ours = ctx.params
    assert ours["command"] == (theirs.training_script, *theirs.training_script_args)
    names = {"nnodes": "nodes", "nproc_per_node": "nproc"}
    for action in options(parser):
        name = names.get(action.dest, action.dest)
        value, default = getattr(theirs, action.dest), parser.get_default(action.dest)
        if name in ours and value != default:
            assert ours[name] == value, name
        elif name in ours:
            assert ours[name] in (None, False, default), name


def test_the_environment_is_read_and_the_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    monkeypatch.setenv("PET_STANDALONE", "1")
    monkeypatch.setenv("PET_MODULE", "0")
    theirs = distributed.get_args_parser().parse_args(["--max-restarts", "2", "train.py"])
    ours = as_torchrun.make_context("nodeagent-run", ["--max-restarts", "2", "train.py"]).params
    assert (theirs.nproc_per_node, theirs.max_restarts, theirs.standalone, theirs.module) == ("5", 2, True, False)
    assert (ours["nproc"], ours["max_restarts"], ours["standalone"], ours["module"]) == ("5", 2, True, False)


@pytest.mark.parametrize("command", [run, as_torchrun])
def test_what_torchrun_refuses_is_refused_with_the_nearest(command: click.Command) -> None:
    with pytest.raises(click.NoSuchOption) as refused:
        command.make_context("x", ["--nproc-per-nude", "2", "train.py"])
    assert (refused.value.exit_code, "--nproc-per-node" in refused.value.format_message()) == (2, True)
