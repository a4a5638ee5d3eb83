"""What agents tell each other about repairs, and what one remembers of its own. Owns the words; decides nothing."""

from __future__ import annotations

from typing import Literal

from nodeagent.model.base import Record

Kind = Literal["reset_gpu", "reboot", "service"]
"""The repairs that can be a command. ``service`` only asks for a person: it repairs nothing by itself."""

ClaimPhase = Literal["asks", "holds", "runs", "verifies"]
"""``asks``: it would like to, and nothing is different for anybody. ``holds``: it is its turn, so its hardware gets no
more work, and what still uses it goes. ``runs``: the command runs, or the machine is away for it. ``verifies``: it is
checked whether that helped."""

Outcome = Literal["", "done", "failed", "interrupted"]
"""Empty: not known yet. ``interrupted``: its end was not seen, so it counts as done nothing."""


class Claim(Record):
    """One node's repair, as the others see it."""

    kind: Kind
    rule: str
    """Of the verdict that asks for it."""
    device: str = ""
    """UUID of the GPU; empty: the node."""
    whole: bool
    """It needs the node to itself."""
    phase: ClaimPhase
    since: float
    """Unix time that this phase began."""
    why: str = ""
    """What it waits for, for people."""

    @property
    def bars(self) -> bool:
        """No work is to be given to its hardware."""
        return self.phase != "asks"

    def takes(self, device: str) -> bool:
        """It needs this device to itself now."""
        return self.bars and (self.whole or device == self.device)


class Mending(Record):
    """What a node's agent repairs by itself."""

    kinds: tuple[Kind, ...] = ()
    """The repairs that are configured."""
    claim: Claim | None = None
    why: str = ""
    """Why nothing is begun though something is to be repaired; empty otherwise."""


class Attempt(Record):
    """One repair of this node, as it is written down before it begins."""

    kind: Kind
    rule: str
    device: str = ""
    whole: bool
    at: float
    """Unix time that it began."""
    boot: str
    """Boot id in which it began."""
    pid: int = 0
    start: int = 0
    """The command's process: its start time tells it from a later one of that number. 0: it has not been started."""
    outcome: Outcome = ""
    text: str = ""
    """How it ended, for people."""
    over: bool = False
    """Nothing of it is left to be done, verifying included."""


LABEL: dict[Kind, str] = {"reset_gpu": "GPU reset", "reboot": "reboot", "service": "call for service"}
"""As people read it."""
