"""The ``health`` section of the agent's config: what is looked at beside the GPUs, which rules only warn, and the
commands that repair and verify.

Nothing is repaired that has no command here. Must never run one: ``agent/repaircommands.py`` does.

Must never look at the machine: ``nodeagent/hardware`` does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from nodeagent import hardware_missing
from nodeagent.model.health import Kind
from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, closest, raise_all
from nodeagent.spec.sections import OptionalFile, Section, absolute

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


HealthCommand = Annotated[tuple[str, ...] | None, BeforeValidator(_command), WithJsonSchema(_COMMAND)]


class RepairConfig(Section):
    """What the agent repairs by itself; without a command it asks for it, and does nothing."""

    gpu_reset: HealthCommand = None
    """Resets a GPU. With `{gpu}` (its UUID) in it, that GPU alone; without, all of them, so the node is drained
    first."""
    reboot: HealthCommand = None
    """Reboots the machine, which is drained first."""
    service: HealthCommand = None
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


_CHECK = r"[a-z][a-z0-9_]{0,31}"
_IDS = {"type": "array", "items": {"type": "string"}}


def _rules(value: object) -> frozenset[str]:
    """Ids of rules. Raises ``CheckError`` for one that there is not."""
    if isinstance(value, frozenset):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise CheckError(f"{units.show(value)} is not a list of rules", "write for instance [nvlink.down, xid.79]")
    if value and (missing := hardware_missing()):
        raise CheckError(f"no rule can be named: {missing}", "take it out, or install all of nodeagent")
    if not value:
        return frozenset()
    from nodeagent.hardware.judging.judge import rules

    known = {rule.id for rule in rules()}
    bad = [v for v in value if v not in known and not (v.startswith("xid.") and v[4:].isdecimal())]
    if bad:  # a plug-in declares its rules only when it runs, and checks are named elsewhere
        from nodeagent.hardware.plugins import installed

        named = {"check", *(plugin.name for plugin in installed())}
        bad = [v for v in bad if v.partition(".")[0] not in named]
    raise_all([CheckError(f"there is no rule {v!r}", _nearest(v, known), at=(value.index(v),)) for v in bad])
    return frozenset(value)


def _nearest(rule: str, known: set[str]) -> str:
    near = closest(rule, known)
    return f"did you mean '{near}'?" if near else "see them all: nodeagentctl health rules"


def _folders(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise CheckError(f"{units.show(value)} is not a list of folders", "write for instance [/shared]")
    return tuple(str(absolute(one, "folder")) for one in value)


RuleNames = Annotated[frozenset[str], BeforeValidator(_rules), WithJsonSchema(_IDS)]


_SHARE = {"type": ["string", "number"], "examples": ["80%"]}


def _duration(example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": ["string", "number"], "examples": [example]})


def health_or_off(value: object) -> object:
    """``off`` is no section at all."""
    return None if value == OFF else value


def or_off(schema: dict[str, Any]) -> None:
    """JSON Schema: the word instead of null."""
    for choice in schema["anyOf"]:
        if choice == {"type": "null"}:
            choice.clear()
            choice["const"] = OFF


class DiagConfig(Section):
    """Checks of the hardware by work: `nodeagentctl diag`."""

    python: OptionalFile = None
    """The Python that does the checks, with torch in it. Default: the agent's own."""
    bound: Annotated[float, BeforeValidator(units.duration), _duration("30s"), Field(ge=1, le=600)] = 30.0
    """Longest time of one check; the start may take four times, the collective twice as long."""
    slower: Annotated[float, BeforeValidator(units.share), WithJsonSchema(_SHARE), Field(ge=0, le=1)] = 0.8
    """A GPU fails whose speed is below this share of the usual one; 0: speeds are not judged."""


class PreflightConfig(Section):
    """Checks by work before a node takes part in a gang."""

    reuse: Annotated[float, BeforeValidator(units.duration), _duration("1d"), Field(ge=60, le=30 * 86_400)] = 86_400.0
    """How long a run that passed counts."""
    bound: Annotated[float, BeforeValidator(units.duration), _duration("5m"), Field(ge=1, le=3600)] = 300.0
    """Longest time of a whole run: a node that takes longer does not take part."""


def _checks(value: object) -> object:
    """Names of checks: each becomes the rule ``check.NAME``. Raises ``CheckError``."""
    bad = [name for name in value if not re.fullmatch(_CHECK, str(name))] if isinstance(value, dict) else []
    right = "use 1 to 32 of a-z, 0-9 and '_', starting with a letter"
    raise_all([CheckError(f"{units.show(name)} is not a name of a check", right, at=(str(name),)) for name in bad])
    return value


def _argv(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
        raise CheckError(f"{units.show(value)} is not a command", "write its words as a list: [/usr/local/sbin/check]")
    return tuple(value)


class CheckConfig(Section):
    """A site's own check of the node."""

    command: Annotated[tuple[str, ...], BeforeValidator(_argv), WithJsonSchema(_IDS | {"minItems": 1})]
    """Its words. Exit code 0: passed. 3: the node is fit for no work. 4: it is used last. Anything else, and none in
    time: nobody knows, and its GPUs get no new work."""
    every: Annotated[float, BeforeValidator(units.duration), _duration("5m"), Field(ge=10, le=86_400)] = 300.0
    """From one run's end to the next one's start."""
    bound: Annotated[float, BeforeValidator(units.duration), _duration("30s"), Field(ge=1, le=3600)] = 30.0
    """Longest time of a run; one that takes longer is killed."""


class HealthConfig(Section):
    """Looking after the node and its GPUs."""

    probation: Annotated[
        float,
        BeforeValidator(units.duration),
        WithJsonSchema({"type": ["string", "number"], "examples": ["10m"]}),
        Field(ge=1, le=7 * 86_400),
    ] = 600.0
    """How long a repaired device is watched before it is trusted with work again."""
    dry_run: RuleNames = frozenset()
    """Rules that are shown and counted, and never acted upon."""
    ignore: RuleNames = frozenset()
    """Rules that are not looked at."""
    folders: Annotated[tuple[str, ...], BeforeValidator(_folders), WithJsonSchema(_IDS)] = ()
    """Folders that jobs need: the node is used last while one is full, read-only or missing, or does not answer."""
    checks: Annotated[dict[str, CheckConfig], BeforeValidator(_checks)] = {}
    """The site's own checks, by name."""
    diag: DiagConfig = DiagConfig()
    repair: RepairConfig = RepairConfig()
    """What the agent repairs by itself, with which commands: nothing, without any."""
    preflight: Annotated[PreflightConfig | None, BeforeValidator(health_or_off), Field(json_schema_extra=or_off)] = None
    """Check by work before a node takes part in a gang; `off`: nobody does."""
