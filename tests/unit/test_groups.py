"""The groups of tests: what is named exists, what was not reached is counted, what is left behind is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.groups import E2E, LATER, STOP_AT, TESTS, WAYS
from tests.run import ROOT, outcomes, sound

PASSES = "def test_it():\n    pass\n"
LEAVES = """
import subprocess
import time
def test_it():
    subprocess.Popen(["setsid", "sh", "-c", "sleep {name} & sleep {name}; :"])
    while len(subprocess.run(["pgrep", "-xf", "sleep {name}"], capture_output=True).stdout.split()) < 2:
        time.sleep(0.01)
"""


def run(folder: Path, source: str, *options: str) -> tuple[int, str, Path]:
    """The runner's exit code and output for one file of tests, and the report."""
    file, report = folder / "test_one.py", folder / "report.xml"
    file.write_text(source)
    environ = {k: v for k, v in os.environ.items() if k != STOP_AT and not k.startswith("PYTEST_")}
    command = [
        *(sys.executable, "-m", "tests.run", "test", "--workers", "1", *options, str(file)),
        *("--report", str(report), "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(folder)),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, report


def test_each_test_that_is_named_exists() -> None:
    missing = []
    for name in [*(E2E + name for names in WAYS.values() for name in names), *(TESTS + name for name in LATER)]:
        file, _, function = name.partition("::")
        path = ROOT / file
        text = path.read_text() if path.exists() else ""
        function = function.partition("[")[0]
        if not text or (function and not re.search(rf"^(async )?def {function}\(", text, re.MULTILINE)):
            missing.append(name)
    assert not missing


def test_what_is_left_to_the_rest_for_its_length_comes_first_there(tmp_path: Path) -> None:
    file, _, function = (TESTS + LATER[-1]).partition("::")
    (tmp_path / "conftest.py").write_text(
        "from tests.groups import sort_out\ndef pytest_collection_modifyitems(items): sort_out(items)\n"
    )
    for name in (E2E + "test_new.py", file, "tests/unit/test_short.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"def {function}(): pass\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow", "-p", "no:cacheprovider"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    listed = [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]
    assert listed == [file, E2E + "test_new.py"], done.stdout + done.stderr


def test_what_no_time_was_left_for_is_counted_and_is_no_failure(tmp_path: Path) -> None:
    code, _, report = run(tmp_path, PASSES, "--seconds", "0")
    assert (code, outcomes(report)) == (0, {"skipped": 1, "not reached": 1})


def test_a_process_that_a_test_leaves_is_killed_and_named(tmp_path: Path) -> None:
    name = f"{os.getpid()}1234"
    code, output, report = run(tmp_path, LEAVES.format(name=name))
    assert (code, outcomes(report)) == (0, {"passed": 1})
    assert output.count(f"a process was left and killed: sleep {name}") == 2
    done = subprocess.run(["pgrep", "-f", f"sleep {name}"], capture_output=True, timeout=20)
    assert done.returncode == 1, "none is left"


def test_tests_that_could_not_be_collected_are_a_failure(tmp_path: Path) -> None:
    """xdist ends with 0 where its processes break as they collect."""
    report = tmp_path / "report.xml"
    assert not sound(0, report), "there is none"
    for case, agrees in (("", False), ("<testcase><error/></testcase>", False), ("<testcase/>", True)):
        report.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
        assert (sound(0, report), sound(2, report)) == (agrees, True)
