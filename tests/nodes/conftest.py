"""Fixtures of the tests on nodes."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.support import reference_losses
from tests.nodes.lab import why_not
from tests.nodes.support import Site, site
from tests.nodes.times import load, write

REFERENCE_STEPS = 600
"""No test trains longer."""
FAILED = pytest.StashKey[bool]()
"""On a test's item: its body failed."""
BEGUN = pytest.StashKey[tuple[float, float]]()
"""When the session began, and the machine's load then."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, help="write what was measured there, if all tests passed")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[BEGUN] = (time.monotonic(), load())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    file = session.config.getoption("--times", None)
    if file is not None and exitstatus == pytest.ExitCode.OK:
        start, before = session.stash[BEGUN]
        minutes = round((time.monotonic() - start) / 60, 1)
        write(file, tests=session.testscollected, minutes=minutes, load=(before, load()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> Iterator[Site]:
    """One site for all tests of a module, with the module's ``NODES`` nodes."""
    if problem := why_not():
        pytest.skip(problem)
    with site(request.module.NODES) as one:
        yield one


@pytest.fixture
def calm(whole: Site, request: pytest.FixtureRequest) -> Iterator[Site]:
    """The module's site, all nodes ready, no job alive. Tells its state if the test fails."""
    whole.at_rest()
    yield whole
    if request.node.stash.get(FAILED, False):
        print(whole.story())


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss of each step of an undisturbed digits run."""
    return reference_losses(REFERENCE_STEPS, tmp_path_factory.mktemp("reference"))
