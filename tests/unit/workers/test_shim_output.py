"""A shim's own notes, where there is no room for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from nodeagent.workers.shim_output import lossy_stderr
sys.stderr = lossy_stderr()
print("a note", file=sys.stderr, flush=True)
print("goes on")
"""


def test_a_full_disk_costs_notes_and_nothing_else() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=full, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_notes_are_kept_where_there_is_room(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.DEVNULL, stderr=log, timeout=30, check=True)
    assert (tmp_path / "log").read_text() == "a note\n"
