"""The ``health.repair`` section of the agent's config: the commands that repair and verify, and their bounds.

Nothing is repaired that has no command here. Must never run one: ``agent/hands.py`` does.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from nodeagent.model.repair import Kind
from nodeagent.spec import units
from nodeagent.spec.errors import CheckError
from nodeagent.spec.section import Section

PLACES = ("gpu", "node", "rule")
"""What may stand in braces in a command."""
OFF = "off"
_COMMAND = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_DURATION = {"type": ["string", "number"], "examples": ["10m"]}


def _command(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
        raise CheckError(f"{units.show(value)} is not a command", "write its words as a list: [systemctl, reboot]")
    for word in value:
        for name in re.findall(r"(?<!\$)\{([a-z_]+)\}", word):
            if name not in PLACES:
                raise CheckError(f"{{{name}}} stands for nothing in a command", "use {gpu}, {node} or {rule}")
    return tuple(value)


def _verify(value: object) -> tuple[str, ...] | None:
    return None if value == OFF else _command(value)


Command = Annotated[tuple[str, ...] | None, BeforeValidator(_command), WithJsonSchema(_COMMAND)]


class RepairConfig(Section):
    """What the agent repairs by itself; without a command it asks for it, and does nothing."""

    gpu_reset: Command = None
    """Resets a GPU. With `{gpu}` (its UUID) in it, that GPU alone; without, all of them, so the node is drained
    first."""
    reboot: Command = None
    """Reboots the machine, which is drained first."""
    service: Command = None
    """Calls for a person: run once for each verdict that only service heals."""
    verify: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_verify),
        WithJsonSchema({"anyOf": [_COMMAND, {"const": OFF}]}),
    ] = ("nodeagent", "diag", "--verify", "--json", "--gpu={gpu}")
    """Run after a repair, before probation: exit code 0 is passed, 3 the hardware is broken, anything else (a traceback
    ends with 1) that the run itself is. `off`: readings alone are trusted."""
    deadline: Annotated[float, BeforeValidator(units.duration), WithJsonSchema(_DURATION), Field(ge=1, le=86_400)] = (
        900.0
    )
    """Longest time for a repair; a reboot has to be under way, and the machine down, by then."""
    verify_deadline: Annotated[
        float, BeforeValidator(units.duration), WithJsonSchema(_DURATION), Field(ge=1, le=86_400)
    ] = 600.0
    """Longest time for a verify run; one that takes longer has failed."""
    per_day: Annotated[int, Field(ge=0, le=100)] = 3
    """Most repairs of this node in 24 hours, by whatever came of them; beyond it a person has to look."""

    def commands(self) -> dict[Kind, tuple[str, ...]]:
        """The repairs that there is a command for."""
        every: dict[Kind, tuple[str, ...] | None] = {
            "reset_gpu": self.gpu_reset, "reboot": self.reboot, "service": self.service,
        }  # fmt: skip
        return {kind: command for kind, command in every.items() if command is not None}

    def whole(self) -> dict[Kind, bool]:
        """Of those, whether each needs the node to itself."""
        one_gpu = any("{gpu}" in word for word in self.gpu_reset or ())
        return {k: k == "reboot" or (k == "reset_gpu" and not one_gpu) for k in self.commands()}
