"""Small parts of a simulated cluster: the store that tells of its steps, a ledger, a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nodeagent.agent.undecided import Guarded, Undecided
from nodeagent.model.jobspec import JobSpec, Nodes, RestartLimits, Role, Submitter
from nodeagent.store.keys import prefix
from nodeagent.store.scripts import Script
from nodeagent.trust.ledger import Remembered
from tests.inprocess.data import CommandError, Value
from tests.inprocess.server import CLUSTER, Server


class SimLedger:
    """What an agent remembers of signed jobs: outlives its process and its machine's boots."""

    def __init__(self) -> None:
        self.kept = Remembered()

    def load(self) -> Remembered:
        return replace(self.kept, jobs=dict(self.kept.jobs))

    async def save(self, remembered: Remembered) -> None:
        self.kept = remembered


class WatchedServer(Server):
    """Tells after each step. A script that fails ends the simulation: a broken rule has to show in what it breaks. Only
    while something that somebody has written over by hand is there may a step meet what it cannot read."""

    def __init__(self, clock: Callable[[], float], stepped: Callable[[], None]) -> None:
        super().__init__(clock)
        self._stepped = stepped
        self._by_hand: dict[str, Value | None] = {}
        self._copied: list[tuple[str, Value]] = []
        """What was written by hand in data that were kept, which may be put back."""

    def overwrite(self, key: str, value: Value) -> None:
        super().overwrite(key, value)
        self._by_hand[key] = self._held(key)

    def spoil(self, key: str, field: str = "", text: str = "x") -> None:
        super().spoil(key, field, text)
        self._by_hand[key] = self._held(key)

    def kept(self) -> dict[str, Value]:
        found = super().kept()
        for key, value in self._by_hand.items():
            if value is not None and value is self._held(key):
                self._copied.append((key, found[prefix(CLUSTER) + key]))
        return found

    def _load(self, keys: dict[str, Value]) -> None:
        super()._load(keys)
        for key, value in self._copied:
            if keys.get(prefix(CLUSTER) + key) is value:
                self._by_hand[key] = self._held(key)

    def _held(self, key: str) -> Value | None:
        return self.data.keys.get(prefix(CLUSTER) + key)

    def stepped(self) -> None:
        self._stepped()

    def failed(self, script: Script, error: CommandError) -> None:
        if not any(value is self._held(key) for key, value in self._by_hand.items()):
            raise RuntimeError(f"{script.name}.lua failed: {error}")


class LoudUndecided(Undecided):
    """A decision that fails ends its agent, and with it the simulation: production would go on with the others."""

    def failed(self, kind: Guarded, uid: str, error: Exception) -> None:
        raise error


def sim_spec(name: str, minimum: int, maximum: int, target: int, **more: object) -> JobSpec:
    """A small job of two workers a node; it borrows nodes if ``auto``."""
    nodes = Nodes(min=minimum, max=maximum, target=target, auto=bool(more.pop("auto", False)))
    role = Role(command=("train",), nodes=nodes, workers_per_node=2)
    submitter = Submitter(user="u", uid=1000, gid=1000, host="login", cwd="/")
    fields: dict[str, object] = {
        "name": name, "roles": (role,), "working_dir": "/", "user": "u", "submitter": submitter, "grace": 5.0,
        "restarts": RestartLimits(max=60, window=5.0, backoff_max=0.0),
    }  # fmt: skip
    return JobSpec.model_validate(fields | more)
