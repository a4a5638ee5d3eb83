"""What the node adds to an environment, and who wins."""

from __future__ import annotations

import os
import pwd
import tracemalloc
from pathlib import Path

import pytest

from nodeagent.shim.environment import MOST_FOUND, base_environment, compose, parse_env_file, read_env_file


def test_login_variables_are_the_nodes() -> None:
    me = pwd.getpwuid(os.getuid())
    recorded = {"PATH": "/opt/bin", "HOME": "/elsewhere", "USER": "x", "SHELL": "/bin/y", "CONDA_PREFIX": "/c"}
    env = base_environment(os.getuid(), recorded, own_user=False)
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == (me.pw_dir, me.pw_name, me.pw_name)
    assert (env["PATH"], env["CONDA_PREFIX"]) == ("/opt/bin", "/c")
    assert base_environment(os.getuid(), recorded, own_user=True)["HOME"] == "/elsewhere"


def test_a_user_without_an_entry() -> None:
    assert base_environment(3999999999, {}, True) == {
        "HOME": "/",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }


def test_precedence() -> None:
    base = {"A": "base", "B": "base", "C": "base"}
    file = {"B": "file", "C": "file", "RANK": "file", "OMP_NUM_THREADS": "file", "RES_OPTIONS": "file"}
    job = {"C": "job", "RES_OPTIONS": "job"}
    ours = {"C": "job", "RES_OPTIONS": "job", "RANK": "0", "OMP_NUM_THREADS": "1"}
    assert compose(base, file, job, ours) == {
        "A": "base", "B": "file", "C": "job", "RANK": "0", "OMP_NUM_THREADS": "file", "RES_OPTIONS": "job",
    }  # fmt: skip


def test_env_file() -> None:
    text = "# secret\n\nexport A=1\nB = two words\nC='q \"x\"'\nD=\nE=a=b\n"
    assert parse_env_file(text, "f") == {"A": "1", "B": "two words", "C": 'q "x"', "D": "", "E": "a=b"}


@pytest.mark.parametrize("line", ["A", "=1", "A B=1"])
def test_bad_env_file_names_the_line(line: str) -> None:
    with pytest.raises(ValueError, match="f:2: not KEY=VALUE"):
        parse_env_file("A=1\n" + line, "f")


def test_env_file_with_a_byte_order_mark_and_one_that_is_no_text(tmp_path: Path) -> None:
    marked, odd = tmp_path / "marked.env", tmp_path / "odd.env"
    marked.write_bytes(b"\xef\xbb\xbfA=1\r\nB=2\r\n")
    assert read_env_file(str(marked)) == {"A": "1", "B": "2"}
    odd.write_bytes(b"A=1\nB=2\nC=\xff\n")
    with pytest.raises(ValueError, match=rf"^{odd}:3: not UTF-8 text$"):
        read_env_file(str(odd))


def test_an_env_file_that_is_too_large_is_refused_and_not_read_to_its_end(tmp_path: Path) -> None:
    whole, huge = tmp_path / "whole.env", tmp_path / "huge.env"
    whole.write_bytes(b"A=1\n#".ljust(MOST_FOUND, b"x"))
    assert read_env_file(str(whole)) == {"A": "1"}
    huge.write_bytes(b"A=1\n#".ljust(MOST_FOUND + 1, b"x"))
    with pytest.raises(ValueError, match=rf"^{huge}: larger than 8 MiB; name a file that holds only NAME=VALUE lines$"):
        read_env_file(str(huge))
    with huge.open("wb") as file:
        file.truncate(16 * MOST_FOUND)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="larger than 8 MiB"):
            read_env_file(str(huge))
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST_FOUND
    finally:
        tracemalloc.stop()
