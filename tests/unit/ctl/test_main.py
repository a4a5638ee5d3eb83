"""The list of commands: that it answers at once, says what the commands say, and is wholly documented."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nodeagent.ctl.logs import Printer
from nodeagent.ctl.main import COMMANDS, cli, end_as, run_main
from nodeagent.ctl.output import Column, show
from nodeagent.ctl.waiting import ProgressLine

EVERYWHERE = ("--agent", "--token-file", "--cacert", "--fingerprint", "--output")
"""Options that are told of once."""
OF_THE_CLIENT = {"http.client", "ssl"}
"""What every command but the list of commands loads."""
REFERENCE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
HEAVY = ("asyncio", "aiohttp", "pydantic", "redis", "rich", "yaml", "prometheus_client", "torch", "http.client", "ssl")


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups' own too."""
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                assert found is not None
                yield f"{name} {inner}", found


def test_help_imports_nothing_heavy() -> None:
    """It has to answer in 0.2 s; which modules it loads decides that, on any machine."""
    code = (
        "import sys\nfrom nodeagent.ctl.main import cli\n"
        "try:\n    cli(['--help'], prog_name='nodeagentctl')\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "Commands:" in result.stdout
    assert result.stderr == "[]\n"


def test_help_in_torchruns_place_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom nodeagent.ctl.main import run_main\n"
        "sys.argv[1:] = ['--help']\ntry:\n    run_main()\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {set(HEAVY) - OF_THE_CLIENT!r} if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.stdout.startswith("Usage: nodeagent-run")
    assert result.stderr == "[]\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--nproc-per-nude", "2", "t.py"], 2, "--nproc-per-node"),
        (["--tee", "9", "t.py"], 2, "--tee"),
        (["--agent", "/nowhere.sock", "t.py"], 125, "/nowhere.sock"),
        ([], 2, "SCRIPT"),
    ],
)
def test_exit_codes_in_torchruns_place(
    words: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nodeagent-run", *words])
    with pytest.raises(SystemExit) as ended:
        run_main()
    assert (ended.value.code, says in capsys.readouterr().err) == (code, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_is_the_commands_own(name: str) -> None:
    command = dict(commands())[name]
    first = (command.short_help or command.help or "").partition("\n")[0]
    assert COMMANDS[name][1].rstrip(".") == first.rstrip(".") or isinstance(command, click.Group)


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_help_of_every_command(name: str) -> None:
    result = CliRunner().invoke(cli, [*name.split(), "-h"])
    assert result.exit_code == 0
    assert result.output.startswith("Usage:")


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_command_and_option_is_in_the_reference(name: str) -> None:
    section = re.search(rf"^### {name.partition(' ')[0]}\n(.*?)(?=^##|\Z)", REFERENCE, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/cli.md has no section {name}"
    if " " in name:
        assert re.search(rf"\b{name.split()[1]}\b", section[1])
    for option in dict(commands())[name].params:
        if isinstance(option, click.Option) and option.name != "help":
            missing = [o for o in option.opts if o not in section[1] and o not in EVERYWHERE]
            assert not missing, f"docs/cli.md does not tell of {missing} of {name}"


def test_the_contracts_commands_are_all_there() -> None:
    wanted = (
        "run submit validate get describe logs events top usage scale scaleout scalein pause resume restart stop "
        "delete nodes cordon uncordon drain forget reserve queue health diag hosts doctor completion local"
    )
    assert set(COMMANDS) == set(wanted.split())


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_script(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert "_NODEAGENTCTL_COMPLETE" in result.output


def test_version() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output.startswith("nodeagentctl ")


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(cli), "get_command", lambda *_: interrupted)
    result = CliRunner().invoke(cli, ["get"])
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_a_second_interrupt_while_the_first_is_reported_is_130_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback was shown."""

    class Pressed(io.StringIO):
        def write(self, _text: str) -> int:
            raise KeyboardInterrupt

    def call() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Pressed())
    with pytest.raises(SystemExit) as ended:
        end_as(call)
    assert ended.value.code == 130


NO_ROOM = "No space left on device\n"


@pytest.mark.parametrize("gone", ["disk full", "reader gone"])
@pytest.mark.parametrize(
    ("console", "words", "code", "text"),
    [
        ("main", ["--version"], 1, f"its output cannot be written: {NO_ROOM}"),
        ("main", ["get", "--help"], 1, f"[Errno 28] {NO_ROOM}"),
        ("main", ["run", "--help"], 121, f"[Errno 28] {NO_ROOM}"),
        ("run_main", ["--help"], 121, f"[Errno 28] {NO_ROOM}"),
    ],
)
def test_output_that_cannot_be_written_is_a_failure_of_the_tool(
    console: str, words: list[str], code: int, text: str, gone: str
) -> None:
    """Of ``run`` too: 1 would be the job's. What click prints by itself has its own words."""
    script = f"from nodeagent.ctl.main import {console}; {console}()"
    reader, pipe = os.pipe()
    os.close(reader)
    with os.fdopen(pipe, "w") as broken, Path("/dev/full").open("w") as full:
        out = full if gone == "disk full" else broken
        result = subprocess.run(
            [sys.executable, "-c", script, *words], stdout=out, stderr=subprocess.PIPE, text=True, timeout=30
        )
    assert (result.returncode, result.stderr) == (code, f"nodeagentctl: {text}" if gone == "disk full" else "")


@pytest.mark.parametrize("streams", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_closed_streams_are_written_to_in_vain(streams: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in cron, or with ``>&-``: no word about what was done is lost by an error."""

    def call() -> int:
        with ProgressLine() as progress:
            progress.show("forming")
        Printer().announce("running")
        show({"items": [{"name": "a"}]}, "table", "job", (Column("NAME", lambda row: row["name"]),))
        return 7

    for name in streams:
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        end_as(call)
    assert ended.value.code == 7
    for name in streams:
        getattr(sys, name).close()


def test_text_that_the_locale_has_no_letters_for_is_written_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    line = {"stream": "stdout", "text": "100 \N{EURO SIGN}", "partial": False, "generation": 1, "rank": 0, "node": "n1",
            "time": "1"}  # fmt: skip
    with pytest.raises(SystemExit):
        end_as(lambda: Printer().put(line))
    assert raw.getvalue() == b"[0]<stdout>: 100 \\u20ac\n"
