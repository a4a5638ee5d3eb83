"""What the tests of local clusters share: waiting, looking at processes, a place that must be empty afterwards."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from nodeagent.local import registry, session
from nodeagent.local.layout import HOME_VARIABLE
from tests.bounds import Bound
from tests.folders import short


def until(condition: Callable[[], object], what: str, bound: float = 30.0) -> None:
    """Wait for a condition, at most ``bound`` seconds that count."""
    limit = Bound(bound)
    while not condition():
        assert not limit.over, f"not within {bound} s ({limit.passed:.1f} s): {what}"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_empty(home: Path) -> bool:
    """Whether nothing of any cluster is left in its place."""
    left = [Path(at, name) for at, folders, files in os.walk(home) for name in (*folders, *files)]
    return all(path.name == ".turn" or path in (home / "run", home / "data") for path in left)


@contextmanager
def local_home() -> Iterator[Path]:
    """A short folder for local clusters; whatever cluster is left in it afterwards is ended."""
    with (
        tempfile.TemporaryDirectory(prefix="na-", dir=short()) as path,
        mock.patch.dict(os.environ, {HOME_VARIABLE: path, "TMPDIR": path}),
        mock.patch.object(tempfile, "tempdir", None),
    ):
        try:
            yield Path(path)
        finally:
            for place in Path(path).glob("run/*"):
                if left := registry.load(place):
                    for log in (left.layout.supervisor_log, *left.data.glob("n*/agent.log")):
                        print(f"--- {log}\n{log.read_text() if log.exists() else ''}")  # shown if the test failed
                    if registry.alive(left):
                        session.down(left, keep_logs=False)
                    registry.remove(left, keep_data=False)
