"""What the kernel is asked for: files that are replaced whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.osutil.linux import write_atomic

LIMITED = """
import resource, sys
from pathlib import Path
from nodeagent.osutil.linux import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5))
try:
    write_atomic(Path(sys.argv[1]), "0123456789", durable=True)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_for_its_owner_only(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "promise"
    for content in ("first", b"second"):
        write_atomic(file, content, durable)
        assert file.read_bytes() in (b"first", b"second")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("second", 0o600)
    assert list(tmp_path.iterdir()) == [file], "no draft is left"


def test_what_takes_only_a_part_is_an_error_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "promise"
    write_atomic(file, "before", durable=True)
    done = subprocess.run([sys.executable, "-c", LIMITED, str(file)], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("OSError", "")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file], "no draft takes what room is left"


LOGS = """
import sys
from nodeagent.osutil.linux import lossy_stderr
sys.stderr = lossy_stderr()
print("a note", file=sys.stderr, flush=True)
print("goes on")
"""


def test_a_full_disk_costs_notes_and_nothing_else() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", LOGS], stdout=subprocess.PIPE, stderr=full, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_notes_are_kept_where_there_is_room(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", LOGS], stdout=subprocess.DEVNULL, stderr=log, timeout=30, check=True)
    assert (tmp_path / "log").read_text() == "a note\n"
