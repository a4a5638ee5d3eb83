"""The job file's ``placement``: which nodes a job or one of its roles may have, which it would rather have, and how
they lie to each other. Must never know which nodes there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from nodeagent.model.constraints import (
    MOST_RANGES,
    MOST_TERMS,
    MOST_TEXT,
    MOST_VALUES,
    NODE,
    Constraints,
    Match,
    has_ranges,
    is_pattern,
)
from nodeagent.model.jobspec import MOST_NODES, JobSpec, Nodes, Role, Together
from nodeagent.spec import units
from nodeagent.spec.consistency import Mistake
from nodeagent.spec.errors import CheckError, raise_all

_RIGHT = "write for instance {gpu: h100}, {gpu: [h100, h200]}, {node: 'n[1-8]'} or [nvlink]"
_VALUE: dict[str, Any] = {
    "anyOf": [
        {"const": True},
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ]
}
_TERMS: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": {"type": "string", "minLength": 1}},
        {"type": "object", "additionalProperties": _VALUE},
    ]
}


def label(value: object) -> str:
    """A label's name."""
    if not isinstance(value, str) or not value or len(value) > MOST_TEXT or not value.isprintable():
        right = f"write the name of a label: 1 to {MOST_TEXT} characters, such as rack"
        raise CheckError(f"{units.show(value)} is not a label", right)
    return value


def terms(value: object) -> tuple[Match, ...]:
    """Labels with the values that count, or a list of labels of which any value does."""
    if isinstance(value, list | tuple):
        value = dict.fromkeys((label(one) for one in value), True)
    if not isinstance(value, dict):
        raise CheckError(f"{units.show(value)} does not name labels", _RIGHT)
    if len(value) > MOST_TERMS:
        raise CheckError(f"{len(value)} labels", f"give {MOST_TERMS} at most")
    found, wrong = [], list[CheckError]()
    for name, given in value.items():
        try:
            found.append(Match(label=label(name), values=_values(name, given)))
        except CheckError as error:
            wrong.append(CheckError(error.what, error.right, at=(name,)))
    raise_all(wrong)
    return tuple(found)


def _values(name: object, given: object) -> tuple[str, ...]:
    if given is True:
        if name == NODE:
            raise CheckError("every node has a name", "write {node: 'n[1-8]'}, or {node: [n1, n2]}")
        return ()
    values: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for one in values:
        if not isinstance(one, str) or not one or len(one) > MOST_TEXT:
            quoted = f"'{str(one).lower() if isinstance(one, bool) else one}'"
            raise CheckError(f"{units.show(one)} is not a label's value", f"values are text: write {quoted} or true")
        if name == NODE and not is_pattern(one):
            raise CheckError(f"{units.show(one)} names no nodes", "write n7, n[1-8] or n[01-16,20]")
    if name == NODE and sum(map(has_ranges, values)) > MOST_RANGES:
        raise CheckError(f"more than {MOST_RANGES} values with ranges", "join them: n[1-8,12,20-30]")
    if not 1 <= len(values) <= MOST_VALUES:
        raise CheckError(f"{len(values)} values", f"give 1 to {MOST_VALUES}, or true for any")
    return tuple(values)


_Terms = Annotated[tuple[Match, ...], BeforeValidator(terms), WithJsonSchema(_TERMS)]
_Label = Annotated[str, BeforeValidator(label), WithJsonSchema({"type": "string", "minLength": 1})]


class RolePlacementFile(BaseModel):
    """What a role asks of its nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    require: _Terms = Field(default=(), examples=["{gpu: h100}"])
    """Labels a node must have: LABEL: VALUE, LABEL: [VALUES] (one of them), LABEL: true (any), or a list of labels.
    `node` is the node's name, with ranges: {node: 'n[1-8]'}."""
    exclude: _Terms = Field(default=(), examples=["{node: n7}"])
    """Nodes with one of these are never used."""
    prefer: _Terms = Field(default=(), examples=["[nvlink]"])
    """Nodes with more of these are taken first."""
    avoid: _Terms = Field(default=(), examples=["{class: spot}"])
    """Nodes with more of these are taken last."""
    spread: _Label | None = Field(default=None, examples=["rack"])
    """Places go to as many different values of this label as there are; `node` is the node itself."""
    pack: _Label | None = Field(default=None, examples=["rack"])
    """Places go to as few different values of this label as will do."""

    @model_validator(mode="after")
    def _one_way(self) -> RolePlacementFile:
        if self.spread is not None and self.pack is not None:
            raise CheckError("spread stands beside pack", "keep one of them")
        return self


class PlacementFile(RolePlacementFile):
    """Which nodes a job may have, which it would rather have, and how they lie to each other."""

    within: _Label | None = Field(default=None, examples=["rack"])
    """All nodes of the gang have one value of this label: one rack, one zone."""
    segments: int | None = Field(default=None, ge=1, le=MOST_NODES, examples=[4])
    """The gang consists of groups of so many nodes, each within one of the topology's smallest domains."""

    @model_validator(mode="after")
    def _segments_alone(self) -> PlacementFile:
        if self.segments is not None and (way := "spread" * bool(self.spread) or "pack" * bool(self.pack)):
            raise CheckError(f"segments stand beside {way}", "keep one of them")
        return self


def constraints(own: RolePlacementFile | None, jobs: PlacementFile | None) -> Constraints | None:
    """What one role asks, the job's terms first; None if that is nothing."""
    given = [one for one in (jobs, own) if one is not None]
    ways = [one for one in reversed(given) if one.spread is not None or one.pack is not None][:1]
    found = Constraints(
        require=tuple(term for one in given for term in one.require),
        exclude=tuple(term for one in given for term in one.exclude),
        prefer=tuple(term for one in given for term in one.prefer),
        avoid=tuple(term for one in given for term in one.avoid),
        spread=next((one.spread for one in ways if one.spread is not None), ""),
        pack=next((one.pack for one in ways if one.pack is not None), ""),
    )
    return found if found != Constraints() else None


def together(written: PlacementFile | None) -> Together | None:
    """How the gang's nodes must lie to each other; None: anyhow."""
    if written is None or (written.within is None and written.segments is None):
        return None
    return Together(within=written.within or "", segments=written.segments or 0)


def uneven_segments(size: int, nodes: Nodes | None, *, several: bool) -> tuple[str, str] | None:
    """What is wrong with segments of this size, and what would be right; None if nothing is."""
    if several:
        return "segments are for jobs of one role", "remove it"
    wrong = [n for n in (nodes.min, nodes.max, nodes.target) if n % size] if nodes is not None else []
    if not wrong:
        return None
    what = f"{wrong[0]} nodes cannot be divided into segments of {size}"
    return what, f"make min, max and target multiples of {size}"


def placement_mistakes(spec: JobSpec) -> Iterator[Mistake]:
    """What does not fit together in a whole job, by file or by command."""
    if spec.segments and (mistake := uneven_segments(spec.segments, spec.nodes, several=spec.several)):
        yield Mistake(("placement", "segments"), *mistake)
    for role in spec.roles:
        yield from _role_mistakes(role, spec.segments)


def _role_mistakes(role: Role, segments: int) -> Iterator[Mistake]:
    asked = role.placement
    if asked is None:
        return
    at = ("roles", role.name, "placement")
    if asked.spread and asked.pack:
        yield Mistake(at, "spread stands beside pack", "keep one of them")
    if segments and (asked.spread or asked.pack):
        yield Mistake(at, f"segments stand beside {'spread' if asked.spread else 'pack'}", "keep one of them")
    every = (*asked.require, *asked.exclude, *asked.prefer, *asked.avoid)
    if sum(has_ranges(value) for term in every for value in term.values) > 2 * MOST_RANGES:
        yield Mistake(at, f"more than {2 * MOST_RANGES} values with ranges", "join them: n[1-8,12,20-30]")
    for key in ("require", "exclude", "prefer", "avoid"):
        for term in getattr(asked, key):
            try:
                terms({term.label: term.values or True})
            except CheckError as error:
                yield Mistake((*at, key), error.what, error.right)
