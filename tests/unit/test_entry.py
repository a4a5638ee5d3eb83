"""Ctrl-C while a program is loaded, and as it ends: quietly, with 130."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nodeagent import entry

INTERRUPTED_AT = """
import importlib.abc, os, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

if {ignored!r}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Interrupts())
from nodeagent import entry
sys.argv = ["program", "--help"]
entry.{program}()
"""
AT_THE_END = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.SIGINT)
from nodeagent import entry
sys.argv = ["program", "--version"]
entry.{program}()
"""
PROGRAMS = ("tool", "run_tool", "daemon")


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("tool", "nodeagent.ctl.main"),
        ("tool", "click"),
        ("tool", "nodeagent.ctl.where"),
        ("run_tool", "nodeagent.ctl"),
        ("daemon", "click"),
        ("daemon", "nodeagent.agent"),
    ],
)
def test_an_interrupt_while_a_program_is_loaded_ends_it_without_a_word(program: str, module: str) -> None:
    done = ended(INTERRUPTED_AT.format(program=program, module=module, ignored=False))
    assert (done.returncode, done.stdout, done.stderr) == (entry.INTERRUPTED, "", "")


def test_an_interrupt_that_a_shell_has_ignored_stays_so() -> None:
    """As in ``nodeagentctl logs job -f > file &`` of a script."""
    done = ended(INTERRUPTED_AT.format(program="tool", module="click", ignored=True))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Commands:" in done.stdout


@pytest.mark.parametrize("program", ["tool", "daemon"])
def test_an_interrupt_as_it_ends_says_nothing(program: str) -> None:
    done = ended(AT_THE_END.format(program=program))
    assert (done.returncode, done.stderr) == (entry.INTERRUPTED, "")


def test_every_console_script_begins_here() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert sorted(project["scripts"].values()) == sorted(f"nodeagent.entry:{name}" for name in PROGRAMS)
