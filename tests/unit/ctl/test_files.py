"""A file that is none of the right kind is refused for what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from nodeagent.ctl.files import read_file
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import CtlError


@pytest.mark.parametrize("words", [("queue", "apply", "-f"), ("validate",)])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("é".encode() * 70_000, "is larger than 128 KiB"),
        (b"\n" + "é".encode() * 70_000, "is larger than 128 KiB"),
        (b"name: x\nb: \xff\n", ":2: byte 0xff is not UTF-8 text"),
        (b"nothing: 1\n", "mistake"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, words: tuple[str, ...], data: bytes, says: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(data)
    result = CliRunner().invoke(cli, [*words, str(file)])
    assert result.exit_code == 2
    assert f"{file}" in result.stderr
    assert says in result.stderr


def test_a_closed_stdin_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as of `submit - <&-`
    with pytest.raises(CtlError, match="cannot read <stdin>: it is closed"):
        read_file("-", "job file", "nothing was submitted", parse=lambda text, _name: text)


@pytest.mark.parametrize(("words", "kind"), [(("queue", "apply", "-f"), "queue file"), (("validate",), "job file")])
def test_a_file_that_is_not_there(tmp_path: Path, words: tuple[str, ...], kind: str) -> None:
    result = CliRunner().invoke(cli, [*words, str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert f"give the path of a {kind}" in result.stderr
