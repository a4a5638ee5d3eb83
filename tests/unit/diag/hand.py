#!/usr/bin/env python3
"""Stands in for a Python with torch: what each GPU does is read from the file $HAND, JSON of UUID to check to value.

A number is the check's figure, a string what is wrong, null hangs; "start" may be a string (a problem), null, an exit
code or, below 0, a signal; "wrong" is what the device cannot do; "die" is the check at which the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    given = json.loads(sys.argv[-1])
    plan = json.loads(Path(os.environ["HAND"]).read_text()).get(given["gpu"], {})
    start = plan.get("start", "")
    if start is None:
        time.sleep(600)
    if isinstance(start, int):
        print("OSError: libcudart.so.12: cannot open shared object file", file=sys.stderr, flush=True)
        if start < 0:
            os.kill(os.getpid(), -start)
        sys.exit(start)
    first = {"problem": start} if start else {"kind": plan.get("kind", "NVIDIA H200"), "torch": "2.9"}
    if "wrong" in plan:
        first = {"wrong": plan["wrong"]}
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        check = line.strip()
        if plan.get("die") == check:
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
            sys.exit(7)
        value = plan.get(check, 100.0)
        if value is None:
            time.sleep(600)
        wrong = value if isinstance(value, str) else ""
        print(json.dumps({"value": 0.0 if wrong else value, "unit": "TFLOP/s", "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
