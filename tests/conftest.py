"""Settings of all tests. Hypothesis judges no test by wall-clock time: these machines are shared and noisy."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from _pytest._code.code import ExceptionRepr
from hypothesis import HealthCheck, settings

from tests.groups import skip_when_time_is_over, sort_out

settings.register_profile("nodeagent", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("nodeagent")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from a script's & by the tools under test, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # inherited from nohup by what is to notice a lost terminal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if os.getsid(0) == 0:  # begun from outside this PID namespace: a shim knows its workers by their sessions
    os.setsid()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sort_out(items)


def pytest_collection_finish() -> None:
    """What was collected lives to the end: looking at it again and again would be a twentieth of all time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    skip_when_time_is_over(os.environ)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What failed is said when it fails, not at the end of all: by the process that collects the reports."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        where = report.longrepr.reprcrash if isinstance(report.longrepr, ExceptionRepr) else None
        why = where.message if where is not None else ""
        print(f"\n{report.nodeid} failed ({report.when}): {why}"[:600], flush=True)
