"""The page on which a worker tells its progress: what the helper writes, the shim reads; and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.osutil.linux import boottime
from nodeagent.shim.hang.track import MAGIC, PAGE, Page, WorkerProgress
from nodeagent.train import progress as helper


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    one = Page(tmp_path / "progress-3")
    yield one
    one.close()
    assert list(tmp_path.iterdir()) == []


def run(code: str, path: Path | None, check: bool = True) -> str:
    env = {k: v for k, v in os.environ.items() if k != "NODEAGENT_PROGRESS"}
    env |= {"NODEAGENT_PROGRESS": str(path)} if path is not None else {}
    code = f"from nodeagent.train import progress\n{code}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=check)
    return done.stdout


def reported(page: Page) -> WorkerProgress:
    found = page.read(boottime())
    assert found is not None
    return found


def test_nothing_is_reported_at_first(page: Page) -> None:
    assert page.read(boottime()) is None


def test_nothing_is_reported_after_it_was_cleared(page: Page) -> None:
    run("progress(7)", page.path)
    page.clear()
    assert page.read(boottime()) is None
    run("progress(8)", page.path)
    assert reported(page).step == 8


@pytest.mark.parametrize(
    ("calls", "step", "phase", "bound"),
    [
        ("progress(7)", 7, "train", None),
        ("progress()", None, "train", None),
        ("progress(7); progress()", 7, "train", None),
        ("progress(7); progress(8, 'evaluate')", 8, "evaluate", None),
        ("progress(phase='evaluate', bound=60)", None, "evaluate", 60.0),
        ("progress(7, 'checkpoint', 60); progress(8)", 8, "train", None),
        ("progress(7, 'e' * 90)", 7, "e" * 31, None),
        ("progress(0)", 0, "train", None),
    ],
)
def test_what_is_written_is_read(page: Page, calls: str, step: int | None, phase: str, bound: float | None) -> None:
    before = boottime()
    run(calls, page.path)
    found = reported(page)
    assert (found.step, found.phase, found.bound) == (step, phase, bound)
    assert before <= found.at <= boottime()


def test_both_sides_mean_the_same_page() -> None:
    """The helper runs in the job's Python, without the rest of nodeagent: it has its own copy."""
    text = Path(helper.__globals__["__file__"]).read_text()
    assert (helper.__globals__["MAGIC"], helper.__globals__["PAGE"].format) == (MAGIC, PAGE.format)
    text = text.replace("from nodeagent.train.", "")
    assert "from nodeagent" not in text and "import nodeagent" not in text


@pytest.mark.parametrize("path", [None, Path("/nowhere/page"), Path("/proc/self/mem"), Path("/dev/null")])
def test_without_a_page_it_does_nothing(path: Path | None) -> None:
    assert run("print(progress(7), progress(8))", path) == "None None\n"


def test_it_costs_next_to_nothing(page: Page) -> None:
    code = (
        "import time\nprogress(0)\nstart = time.process_time()\nfor step in range(100000): progress(step)\n"
        "print(time.process_time() - start)"
    )
    assert float(run(code, page.path)) < 2.0, "20 microseconds of a processor a call, on the slowest machine"
    assert reported(page).step == 99999


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"x" * PAGE.size,
        PAGE.pack(b"other!!!", 7, 1.0, 0.0, b""),
        PAGE.pack(MAGIC, 7, float("nan"), 0.0, b""),
        PAGE.pack(MAGIC, 7, -1.0, 0.0, b""),
    ],
)
def test_what_is_no_page_tells_nothing(page: Page, content: bytes) -> None:
    page.path.write_bytes(content)
    assert page.read(boottime()) is None


def test_odd_values_are_made_sense_of(page: Page) -> None:
    page.path.write_bytes(PAGE.pack(MAGIC, -7, 9e99, float("inf"), b"\xff\xfe"))
    found = reported(page)
    assert (found.step, found.bound, found.phase) == (None, None, "��")
    assert found.at <= boottime()


def test_a_page_in_the_way_is_replaced_and_a_link_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "progress-0").symlink_to(victim)
    one = Page(tmp_path / "progress-0")
    run(f"progress({time.time_ns() % 1000})", one.path)
    assert one.read(boottime()) is not None
    one.close()
    assert one.read(boottime()) is None
    assert victim.read_text() == "mine"
