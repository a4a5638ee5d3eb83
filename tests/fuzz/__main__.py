"""``make fuzz MINUTES=n``: every target in turn, with new inputs each time, until the time is over.

Failures are shrunk by hypothesis and kept in ``.hypothesis``, which the next run (and the tests) try first. Exit code 1
with the input if one was found.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

import structlog
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.mutate import inputs
from tests.fuzz.targets import API, TARGETS, Target

BATCH = 400
"""Inputs for one target before the next one has its turn."""


def batch(target: Target) -> None:
    """Raises what the target raised, with the smallest input that was found."""

    @settings(
        max_examples=BATCH, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True,
        phases=(Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
    )  # fmt: skip
    @given(inputs(target))
    def take(data: bytes) -> None:
        target.take(data)

    take.__name__ = take.__qualname__ = target.name.replace(" ", "_")
    take()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Give every door of a stranger arbitrary input.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", action="append", choices=[t.name for t in TARGETS], help="may be repeated")
    arguments = parser.parse_args()
    chosen = [t for t in TARGETS if not arguments.only or t.name in arguments.only]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # refusals are many
    logging.disable(logging.CRITICAL)
    end, rounds, broken = time.monotonic() + arguments.minutes * 60, 0, set[str]()
    given_to = Counter[str]()
    begin = time.monotonic()
    while time.monotonic() < end and len(broken) < len(chosen):
        for target in chosen:
            if target.name in broken or (rounds and time.monotonic() >= end):
                continue
            given_to[target.name] += BATCH
            try:
                batch(target)
            except Exception:  # noqa: BLE001 - whatever it is, it is the finding
                broken.add(target.name)
                print(f"--- {target.name}", file=sys.stderr)
                traceback.print_exc()
        rounds += 1
    API.close()
    took, rate = f"{given_to.total()} inputs for {len(chosen)} targets", given_to.total() / (time.monotonic() - begin)
    print(
        f"{took} in {rounds} rounds, {rate:.0f}/s: {', '.join(sorted(broken)) + ' failed' if broken else 'no failure'}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
