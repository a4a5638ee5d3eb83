"""The end of a worker in itself, in a process of its own: what must not keep it, nor change how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nodeagent.shim.forkserver import ending

SCRIPT = """
import gc, io, sys, threading, types
sys.path.insert(0, sys.argv[1])
import ending
script = types.ModuleType("script")
code = 0
{}
ending.end(script, code, interrupted=False)
"""


def ended(setup: str) -> subprocess.CompletedProcess[str]:
    folder = str(Path(ending.__file__).parent)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup), folder], capture_output=True, text=True, timeout=60
    )


def test_a_finalizer_that_hangs_does_not_keep_it() -> None:
    done = ended(
        "class Hangs:\n    def __del__(self):\n        threading.Event().wait()\n"
        "script.it, code, ending.WRITE_BOUND = Hangs(), 7, 0.1"
    )
    assert done.returncode == 7
    assert done.stderr == "nodeagent: open files were not written within 0.1 s after the script's end\n"


def test_a_file_of_before_the_freeze_is_written(tmp_path: Path) -> None:
    """What a preloaded module has opened is hidden from the garbage collector in every fork."""
    done = ended(f"held = [open({str(tmp_path / 'f')!r}, 'w')]; ending.freeze(); held[0].write('kept')")
    assert (done.returncode, done.stderr, (tmp_path / "f").read_text()) == (0, "", "kept")


def test_a_full_disk_is_reported_and_does_not_change_the_code() -> None:
    done = ended("held = [open('/dev/full', 'w')]; held[0].write('lost'); code = 3")
    assert (done.returncode, "No space left on device" in done.stderr) == (3, True)


def test_a_thread_that_runs_the_script_misses_no_name() -> None:
    """It could end the process with a code of its own when one is gone."""
    done = ended(
        "import os, time\nscript.sleep, script.exit, script.step = time.sleep, os._exit, 0.001\nexec('''\n"
        "def work():\n    while True:\n        try:\n            sleep(step)\n"
        "        except TypeError:\n            exit(9)\n"
        "''', vars(script))\nthreading.Thread(target=script.work, daemon=True).start()\n"
        "class Slow:\n    def __del__(self):\n        time.sleep(0.05)\nscript.last = Slow()"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_fails_in_a_class_of_the_script_does_not_change_the_code() -> None:
    done = ended(
        "class Broken:\n    def flush(self): pass\n    @property\n    def buffer(self): raise KeyError\n"
        "sys.stdout, code = Broken(), 7"
    )
    assert (done.returncode, done.stderr) == (7, "nodeagent: the end of the script was cut short by KeyError\n")


def test_a_lazy_object_is_not_asked_for_its_class() -> None:
    done = ended(
        "class Lazy:\n    @property\n    def __class__(self):\n        raise SystemExit('imported')\n"
        "script.lazy = [Lazy()]; held = script.lazy"
    )
    assert (done.returncode, done.stderr) == (0, "")
