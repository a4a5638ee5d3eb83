"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import compileall
import fcntl
import json
import os
from collections.abc import Generator, Iterator

import pytest

import nodeagent
from tests.e2e import users
from tests.e2e.support import Cluster, cluster, reference_losses

REFERENCE_STEPS = 600
"""No test trains longer."""
FAILED = pytest.StashKey[bool]()
"""On a test's item: its body failed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def as_installed() -> None:
    """An installation has its modules compiled. Where PYTHONDONTWRITEBYTECODE is set a tree of sources has not: then
    each start of an agent compiles them anew, and one that was killed has little time to come back."""
    compileall.compile_dir(nodeagent.__path__[0], quiet=2)


@pytest.fixture(scope="session")
def another_user() -> None:
    """The test is skipped where nobody can become another user who runs the tool."""
    if problem := users.why_not():
        pytest.skip(problem)


@pytest.fixture
def three() -> Iterator[Cluster]:
    """A cluster of three nodes."""
    with cluster(3) as one:
        yield one


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One cluster for all tests of a module, with the module's ``NODES`` nodes."""
    with cluster(request.module.NODES) as one:
        yield one


@pytest.fixture
def calm(shared: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The module's cluster, all nodes ready, no job alive. Tells its state if the test fails."""
    shared.at_rest()
    yield shared
    if request.node.stash.get(FAILED, False):
        print(shared.state())


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss of each step of an undisturbed digits run, made once for all processes that run tests together."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = tmp_path_factory.getbasetemp() if alone else tmp_path_factory.getbasetemp().parent
    made = folder / "reference.json"
    with (folder / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder is bounded by the call's limit
        if not made.exists():
            losses = reference_losses(REFERENCE_STEPS, tmp_path_factory.mktemp("reference"))
            made.write_text(json.dumps(losses))
    return {int(step): loss for step, loss in json.loads(made.read_text()).items()}
