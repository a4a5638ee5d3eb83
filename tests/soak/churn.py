"""Small jobs beside the training: submitted, finished, failed, stopped, deleted, each checked for how it ended."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter

from nodeagent.ctl.terminal import CtlError
from tests.e2e.support import ENDED, Cluster

ENDS = {"finish": "succeeded", "fail": "failed", "stop": "stopped", "flood": "succeeded"}
"""What they do, and how they have to end whatever faults hit them."""
CODE = {
    "finish": "import time; time.sleep(1)",
    "fail": "import sys; sys.exit(3)",
    "stop": "import time; time.sleep(600)",
    "flood": "for _ in range(20 * 1024): print('x' * 1023)",
}
PATIENCE = 180.0
"""Seconds in which a small job has to end, and to be gone once deleted, whatever happens meanwhile."""


class Churn:
    """In a thread of its own, between ``begin`` and ``finish``."""

    def __init__(self, one: Cluster, seed: int) -> None:
        self._one, self._chance, self._over = one, random.Random(f"churn {seed}"), threading.Event()
        self._thread: threading.Thread | None = None
        self._count = 0
        self.ended = Counter[str]()
        self.wrong: list[str] = []

    def begin(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="churn")
        self._thread.start()

    def finish(self) -> None:
        """No new one; the last has ended and is deleted."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            kind = self._chance.choice(sorted(ENDS))
            self._count += 1
            try:
                self._live(f"small-{self._count}", kind)
            except Exception as error:  # noqa: BLE001 - the finding, which the round reports
                self.wrong.append(f"small-{self._count} ({kind}): {error!r}")
                return
            self._over.wait(self._chance.uniform(1, 5))

    def _live(self, name: str, kind: str) -> None:
        job = {
            "name": name, "command": [sys.executable, "-c", CODE[kind]], "nodes": 1, "grace": "1s",
            "fork_server": "off", "restarts": {"max": 60, "window": "10m", "backoff": "0s"},
            "policies": [{"on": "WorkerFailed", "exit_code": 3, "do": "FailJob"}],
        }  # fmt: skip
        file = self._one.work / "small.json"
        file.write_text(json.dumps(job))
        # As a person does: again, until it was taken. The name makes a second one of what was taken a refusal.
        self._until(
            lambda: self._one.ctl("submit", str(file), check=None).returncode == 0 or self._there(name, False), name
        )
        if kind == "stop":
            time.sleep(1)
            # One whose answer was lost was done all the same: asked again, it is refused, since the job has ended.
            self._until(lambda: self._asked("stop", name) or self._phase(name) in ENDED, name)
        self._until(lambda: self._phase(name) in ENDED, name)
        phase = self._phase(name)
        if phase != ENDS[kind]:
            raise AssertionError(f"ended as {phase}: {self._one.job(name)['reason']}")
        self.ended[kind] += 1
        self._until(lambda: self._asked("delete", name) or not self._there(name, True), name)
        self._until(lambda: not self._there(name, True), name)

    def _asked(self, verb: str, name: str) -> bool:
        return self._one.ctl(verb, name, "--no-wait", check=None).returncode == 0

    def _phase(self, name: str) -> str:
        try:
            return str(self._one.job(name)["phase"])
        except CtlError:  # nobody answers just now
            return ""

    def _there(self, name: str, unknown: bool) -> bool:
        try:
            return any(job["name"] == name for job in self._one.ask("/v1/jobs")["items"])
        except CtlError:
            return unknown

    def _until(self, condition: object, name: str) -> None:
        assert callable(condition)
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"{name} got no further within {PATIENCE:g} s: {self._one.state()}")
            time.sleep(0.5)
