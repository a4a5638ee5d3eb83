"""A worker that ignores SIGTERM, and how long it lived on."""

from __future__ import annotations

from pathlib import Path

STUBBORN = """
import os, signal, time
file = os.path.join({folder!r}, "rank" + os.environ["RANK"] + "." + os.environ["NODEAGENT_GENERATION"])
def say(what):
    with open(file, "a") as out:
        out.write(f"{{what}} {{os.getpid()}} {{time.monotonic()}}\\n")
signal.signal(signal.SIGTERM, lambda *_: say("term"))
while True:
    say("beat")
    time.sleep(0.05)
"""


def outlived(file: Path) -> float:
    """Seconds between a worker's SIGTERM and its last sign of life."""
    rows = [line.split() for line in file.read_text().splitlines()]
    reported = [float(at) for what, _, at in rows if what == "term"]
    assert reported, "it was asked to end first"
    return float(rows[-1][2]) - reported[0]
