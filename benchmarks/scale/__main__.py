"""``python -m benchmarks.scale``: measure, print the table, and write it into docs/scale.md.

Only a run of at least ``WRITTEN`` is written. CPU times are the processes' own, yet a machine that is busy makes them
longer. All of it runs on one core: who wakes another core of a virtual machine is billed for that (a plain ``SET``
takes 6 us of Redis so, and 6 to 30 on two cores).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import time
from pathlib import Path

import structlog

from benchmarks import machine
from benchmarks.scale.report import DOCUMENT, render, table
from benchmarks.scale.rows import Figures, measure

WRITTEN = (10, 100, 300, 1000)
SIZES = (*WRITTEN, 2000, 5000)
RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--nodes", type=_sizes, default=SIZES, help="default: " + ",".join(map(str, SIZES)))
    parser.add_argument("--render", action="store_true", help="measure nothing, write the table of what was")
    arguments = parser.parse_args()
    if arguments.render:
        _write(json.loads(RESULTS.read_text()))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    about, results = machine.describe(), dict[str, Figures]()
    for nodes in arguments.nodes:
        began = time.monotonic()
        results[str(nodes)] = asyncio.run(measure(nodes))
        print(f"{nodes} nodes: {time.monotonic() - began:.0f} s", flush=True)
    print("\n" + table(results))
    if {*arguments.nodes} >= {*WRITTEN}:
        rounded = {size: {name: round(figure, 3) for name, figure in row.items()} for size, row in results.items()}
        RESULTS.write_text(json.dumps({"machine": about, "nodes": rounded}, indent=1) + "\n")
        _write(json.loads(RESULTS.read_text()))


def _write(results: dict[str, dict[str, Figures]]) -> None:
    about = results["machine"]
    text = f"Measured {about['date']}: {about['machine']}; {about['system']}; load {about['load']}."
    DOCUMENT.write_text(render(DOCUMENT.read_text(), results["nodes"], text))
    print(f"written: {DOCUMENT.name}, {RESULTS.name}")


def _sizes(words: str) -> tuple[int, ...]:
    """Numbers of nodes, at least ten each: below, a job of eight is not a part."""
    sizes = tuple(int(word) for word in words.split(","))
    if min(sizes) < 10:
        raise argparse.ArgumentTypeError("at least 10 nodes")
    return sizes


if __name__ == "__main__":
    main()
