"""A worker that needs nobody: it makes a step each tenth of a second for ever, and logs it as the digits example does.

It starts at once, and unlike a training it would go on stepping beside a newer generation if nothing ended it.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    who = {
        "rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "pid": os.getpid(), "loss": 0.0,
        "generation": int(os.environ["NODEAGENT_GENERATION"]),
    }  # fmt: skip
    step = 0
    while True:
        step += 1
        now = {"step": step, "mono": time.clock_gettime(time.CLOCK_MONOTONIC)}
        os.write(log, (json.dumps(who | now) + "\n").encode())
        time.sleep(0.1)


if __name__ == "__main__":
    main()
