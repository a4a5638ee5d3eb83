"""``python -m benchmarks``: run the phases, print the tables, write ``docs/benchmarks.md``, its picture and
``results.json``.

Exit code 1 when a phase could not be measured, or with ``--check`` when a goal is missed. Only a whole run is written.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.goals import Results, judged
from benchmarks.launcher import LaunchError
from benchmarks.phases import PHASES, QUICK, Effort
from benchmarks.plot import svg
from benchmarks.report import markdown, tables, with_soak
from benchmarks.steplog import NotReachedError
from nodeagent.local.layout import LocalError

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
PLOT = DOCUMENT.with_suffix(".svg")
RESULTS = HERE / "results.json"
LEASE_RESULTS = HERE / "lease.json"
"""The lease study's, which is run apart: it takes an hour (``make bench-lease``)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="nodeagent and torchrun, side by side.")
    parser.add_argument("--quick", action="store_true", help="the fewest trials that touch everything; writes nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")
    parser.add_argument(
        "--only", action="append", choices=list(PHASES), metavar="PHASE", help=f"{', '.join(PHASES)}; writes nothing"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing, write the document of what was")
    arguments = parser.parse_args()
    if arguments.render:
        write(json.loads(RESULTS.read_text()))
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that everything is cleared away
    effort = QUICK if arguments.quick else Effort()
    results, failures = run(arguments.only or list(PHASES), effort)
    print("\n" + tables(results))
    for failure in failures:
        print(f"NOT MEASURED: {failure}", file=sys.stderr)
    if not (arguments.quick or arguments.only or failures):
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write(results)
    missed = arguments.check and not all(met for _, _, met in judged(results))
    return 1 if failures or missed else 0


def write(results: Results) -> None:
    lease = json.loads(LEASE_RESULTS.read_text()) if LEASE_RESULTS.exists() else None
    DOCUMENT.write_text(with_soak(markdown(results, lease), DOCUMENT.read_text()))
    PLOT.write_text(svg(results))
    print("written: " + ", ".join(str(file.relative_to(HERE.parent)) for file in (DOCUMENT, PLOT, RESULTS)))


def run(phases: list[str], effort: Effort) -> tuple[Results, list[str]]:
    """The results of all phases that could be measured, and why the others could not."""
    results: Results = {"machine": machine.describe()}
    failures = []
    with tempfile.TemporaryDirectory(prefix="nodeagent-bench-") as scratch:
        for name in phases:
            began = time.monotonic()
            print(f"{name}: {PHASES[name].text}", flush=True)
            try:
                results[name] = PHASES[name].measure(Path(scratch) / name, effort)
            except (NotReachedError, LaunchError, LocalError, subprocess.TimeoutExpired) as error:
                failures.append(f"{name}: {error}")
                print(f"  failed: {error}", flush=True)
            print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return results, failures


if __name__ == "__main__":
    sys.exit(main())
