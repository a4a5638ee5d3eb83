"""Redis hashes to records and back. Strict: a hash that does not fit raises ValueError, nothing is guessed.

A record is a flat hash of texts. A value that no script reads is stored as the model's JSON; each entry of a job's maps
has a field of its own (``member:n1``). So the scripts never have to encode a list or a float.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeGuard, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from nodeagent.model.base import Record, first_error
from nodeagent.model.job import JobEvent, JobRecord
from nodeagent.model.jobspec import MOST_NODES, JobSpec, Nodes
from nodeagent.model.node import NodeFacts, NodeRecord, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.queue import QueuesRecord
from nodeagent.model.timing import millis
from nodeagent.model.usage import ROWS_KEPT, UsageDay, UsageRow
from nodeagent.model.window import WindowsRecord
from nodeagent.model.world import BRIEF, Generation, Member, PodReport
from nodeagent.store.messages import NewJob, Saved

JOB_RAW = (
    "version", "owner", "spec", "admission", "control", "submitted", "ended", "since", "order", "first_active",
    "running_since", "stands_since", "started", "ran", "restart_done", "not_before", "last_number", "restarts",
    "outcome", "checkpoint", "setbacks",
    "held", "rev",
)  # fmt: skip
"""Fields of a job whose text is JSON already: numbers and opaque records."""
JOB_TEXT = ("uid", "name", "phase", "reason")
GENERATION_RAW = ("number", "cause", "grace", "since", "deadline", "control_rev", "outside", "stopped", "ready")
GENERATION_TEXT = ("id", "state", "address", "seal")
GENERATION_FLAG = ("planned", "store_hosted", "released")
GENERATION_MAPS = {
    "member": "members", "holder": "holders", "missing": "missing", "host": "hosts", "ports": "ports",
    "report": "reports",
    "generation_failsafe_member": "failsafe_members",
}  # fmt: skip
JOB_MAPS = {
    "spend": "budget",
    "last": "last_reports",
    "failsafe_member": "failsafe_members",
    "silent": "silent",
    "used": "used",
}
MOST_PARTS = 20_000
"""Commas outside of strings in one text. pydantic notes every value that is wrong, at some microseconds each, before it
says that one is."""
MOST_OF_ENTRY = 32_768
"""The same of one entry of a map: a member may have 4096 devices, in as many places."""
MOST_TOGETHER = 32_768
"""The same of all texts of a record that are no entries."""
MOST_CHARACTERS = 4 << 20
"""Of one text."""
MOST_OF_RECORD = 20 << 20
"""Characters of one record, and bytes of one that a beat brings (``beat.lua``). A job over 4,096 nodes, all of which
have failed twice with eight workers each, has some 14 MB."""
MOST_OF_LINE = 512 << 10
"""Characters of an event, and of what is published of a pod."""
MOST_ENTRIES = 8192
"""Entries of one kind: twice as many as a job may have nodes."""
MOST_FIELDS = 64
"""Fields of a record that are no entries of maps."""
MOST_DIGITS = 16
"""Of a number: more than Lua counts exactly."""
_PART = re.compile(r'"(?:[^"\\]++|\\.)*+"?|,', re.DOTALL)
"""A string, or a comma outside of strings."""
NAMES = 8192
"""Quoted names that stay cached: of fields, nodes and jobs."""
ROW = "row:"
"""Prefix of the fields of a day's use."""
BY_SPEC = ("min", "max", "array", "at_once")
"""Fields of a job, for the scripts, that follow from its spec."""
SCRIPTS_OWN = {*BY_SPEC, "active_number", "active_id"}
NODE_FIELDS = {
    "id", "life", "start", "lost", "left", "joined", "facts", "readiness", "rev", "seq", "dead", "address", "pid",
    "mute",
}  # fmt: skip


def _entries_of(model: type[Record], maps: Mapping[str, str]) -> dict[str, TypeAdapter[object]]:
    return {kind: TypeAdapter(get_args(model.model_fields[name].annotation)[1]) for kind, name in maps.items()}


_ENTRIES = _entries_of(Generation, GENERATION_MAPS) | _entries_of(JobRecord, JOB_MAPS)
_USAGE_ROW = TypeAdapter[object](UsageRow)


class _Fields(dict[str, str]):
    """The fields of a hash. A missing field raises the ValueError of an unreadable record."""

    def __missing__(self, name: str) -> str:
        raise ValueError(f"it has no {name}")


def pairs(flat: Sequence[str]) -> dict[str, str]:
    """A hash from Redis' reply. In the result, ``[]`` raises ValueError for a missing field."""
    return _Fields(zip(flat[::2], flat[1::2], strict=True))


def own_record(key: str, flat: Sequence[str]) -> Sequence[str]:
    """The hash that was read at this key. Raises ValueError if it is another record's: somebody wrote it there."""
    kind, _, name = key.partition(":")
    found = pairs(flat)["uid" if kind == "job" else "id"]
    if found != name:
        raise ValueError(f"the record of {kind} {found} is there")
    return flat


Decoded = TypeVar("Decoded", bound=Record)


def from_json(model: type[Decoded], text: str) -> Decoded:
    """The record that a text of bounded size is. Raises ValueError, in one line."""
    try:
        return model.from_json(text)
    except ValidationError as error:
        raise ValueError(f"{error.title}: {first_error(error)}") from None


def is_number(text: object) -> TypeGuard[str]:
    """A whole number of no more digits than a step comes to. Python makes none of thousands, but raises an error."""
    return isinstance(text, str) and text.isdecimal() and len(text) <= MOST_DIGITS


def bounded(text: str, characters: int = MOST_CHARACTERS, values: int = MOST_PARTS) -> str:
    """The same text. Raises ValueError if nodeagent cannot have written it, as long as it is."""
    if len(text) > characters:
        raise ValueError(f"a text of {len(text)} characters is there, and {characters} are the most")
    if _parts(text, values) > values:
        raise ValueError(f"a text of more than {values} values is there")
    return text


def _parts(text: str, most: int) -> int:
    """The commas outside of strings, if they are not more than ``most``; else a larger number."""
    if (found := text.count(",")) <= most:
        return found
    found = 0
    for part in _PART.finditer(text):
        found += part[0] == ","
        if found > most:
            break
    return found


def _bounded_fields(fields: Mapping[str, str], most: int) -> None:
    """Raises ValueError for a record that is too long, or has too many fields."""
    if sum(map(len, fields)) + sum(map(len, fields.values())) > most:
        raise ValueError(f"it has more than {most} characters")
    counted: dict[str, int] = {}
    values = 0
    for field, text in fields.items():
        kind, colon, _ = field.partition(":")
        counted[kind if colon else ""] = counted.get(kind if colon else "", 0) + 1
        bounded(text, min(most, MOST_CHARACTERS), MOST_OF_ENTRY if colon else MOST_PARTS)
        values += 0 if colon else _parts(text, MOST_PARTS)
    if (
        counted.pop("", 0) > MOST_FIELDS
        or max(counted.values(), default=0) > MOST_ENTRIES
        or len(counted) > MOST_FIELDS
    ):
        raise ValueError("it has too many fields")
    if values > MOST_TOGETHER:
        raise ValueError(f"it has more than {MOST_TOGETHER} values")


def _one_by_one(model: TypeAdapter[object], texts: Iterable[str]) -> None:
    """Raises ValueError for the first of many entries that does not fit. Together all of them would be noted."""
    for text in texts:
        try:
            model.validate_json(text, strict=True)
        except ValidationError as error:
            raise ValueError(f"{error.title}: {first_error(error)}") from None


def _are_many(texts: Iterable[str]) -> bool:
    return sum(text.count(",") + 1 for text in texts) > MOST_PARTS


def encode(arguments: Mapping[str, object]) -> str:
    """A step's arguments as JSON, without those that are None."""
    return json.dumps({key: value for key, value in arguments.items() if value is not None}, ensure_ascii=False)


def encode_facts(facts: NodeFacts) -> str:
    """The same facts always give the same text: the store compares texts. Every node reads every node's, so values that
    are the default are left out."""
    return _compact(facts.model_dump(mode="json", exclude_defaults=True))


def encode_readiness(readiness: Mapping[str, Readiness]) -> str:
    """The same readiness always gives the same text, as with ``encode_facts``."""
    return _compact({uid: entry.model_dump(mode="json", exclude_defaults=True) for uid, entry in readiness.items()})


def _compact(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def encode_report(report: PodReport) -> dict[str, str]:
    """A report without its seq, which the store sets, and without values that are the default: a gang has thousands of
    workers."""
    return {"state": report.state, "body": report.model_dump_json(exclude={"seq"}, exclude_defaults=True)}


def report_arguments(report: PodReport) -> dict[str, str]:
    """A report as a step takes it. If it is long, ``brief`` holds it once more with shorter texts."""
    reported = encode_report(report)
    exits = tuple(e.model_copy(update={"error": e.error[-BRIEF:]}) if len(e.error) > BRIEF else e for e in report.exits)
    brief = report.model_copy(update={"exits": exits, "error": report.error[-BRIEF:]})
    return reported if brief == report else reported | {"brief": encode_report(brief)["body"]}


def encode_texts(texts: Mapping[str, str]) -> dict[str, str]:
    """Each value as JSON, the form in which a record's map stores an entry."""
    return {key: json.dumps(text) for key, text in texts.items()}


def encode_optional(record: Record | None) -> str | None:
    return record.to_json() if record is not None else None


def encode_optional_list(records: Iterable[Record] | None) -> str | None:
    return None if records is None else json.dumps([record.model_dump(mode="json") for record in records])


def _bounds(spec: JobSpec) -> Nodes:
    """How many nodes a generation may have as long as the job lives: roles beside others are scaled at will."""
    return Nodes(min=1, max=MOST_NODES, target=1) if spec.several else spec.nodes


def new_job(new: NewJob, wall: float) -> dict[str, object]:
    """A job as it is submitted at this Unix time."""
    spec, size, array = new.spec, _bounds(new.spec), new.spec.array
    delay = max(0, millis((spec.begin or wall) - wall))
    found: dict[str, object] = {
        "uid": new.uid,
        "name": spec.name,
        "spec": spec.to_json(),
        "min": size.min,
        "max": size.max,
        "control": new.control.to_json(),
        "delay_ms": delay,
        "reason": f"submitted, begins at {_utc(spec.begin)}" if delay else "submitted, waits for nodes",
    }
    if new.admission is not None:
        found["admission"] = new.admission.to_json()
    if array is not None:
        found |= {"array": array.id, "at_once": array.at_once}
    return found


def _utc(at: float | None) -> str:
    return f"{datetime.fromtimestamp(at or 0.0, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _by_spec(spec: JobSpec) -> dict[str, str]:
    """The fields for the scripts that follow from the spec."""
    size = _bounds(spec)
    flat = {"min": str(size.min), "max": str(size.max)}
    if spec.array is not None:
        flat |= {"array": spec.array.id, "at_once": str(spec.array.at_once)}
    return flat


def encode_job(job: JobRecord) -> dict[str, str]:
    """The flat hash of a job, as ``decode_job`` reads it."""
    flat = _by_spec(job.spec)
    flat |= _flatten(job, JOB_TEXT, (), JOB_MAPS, {"generation", "active"})
    if job.generation is not None:
        flat |= _flatten(job.generation, GENERATION_TEXT, GENERATION_FLAG, GENERATION_MAPS, set(), "generation_")
    if job.active is not None:
        flat |= {"active_number": str(job.active.number), "active_id": job.active.id}
    return flat


def _flatten(
    record: Record, texts: Sequence[str], flags: Sequence[str], maps: Mapping[str, str], others: set[str],
    prefix: str = "",
) -> dict[str, str]:  # fmt: skip
    """Every field of a record except ``others``. A field that no table names is JSON. A job's field without a value is
    left out; a generation's is null."""
    kinds = {name: kind for kind, name in maps.items()}
    flat: dict[str, str] = {}
    for name, value in record.model_dump(mode="json").items():
        if name in others or (value is None and not prefix):
            continue
        if name in kinds:
            entries = getattr(record, name)
            flat |= {f"{kinds[name]}:{key}": _entry(entry) for key, entry in entries.items()}
        elif name in texts:
            flat[prefix + name] = value
        else:
            flat[prefix + name] = str(int(value)) if name in flags else json.dumps(value, ensure_ascii=False)
    return flat


def _entry(record: Record | str | tuple[int, ...]) -> str:
    if not isinstance(record, Record):
        return json.dumps(record)
    if not isinstance(record, PodReport):
        return record.to_json()
    report = encode_report(record)
    return f"{record.seq} {report['state']} {report['body']}"


def encode_node(node: NodeRecord) -> dict[str, str]:
    """The flat hash of a node, without the fields that only the store sets (``seq``, ``dead``)."""
    flat = {
        "id": node.id, "life": node.incarnation.life, "start": str(node.incarnation.start),
        "lost": str(int(node.lost)), "left": str(int(node.left)), "joined": str(node.joined), "rev": str(node.rev),
        "facts": encode_facts(node.facts), "address": node.facts.address, "pid": str(node.facts.agent_pid),
        "readiness": encode_readiness(node.readiness),
    }  # fmt: skip
    return flat | {"mute": "1"} if node.mute else flat


def decode_job(flat: Sequence[str]) -> JobRecord:
    """Raises ValueError (pydantic's is one)."""
    return whole(decode_part(flat))


def whole(job: JobRecord) -> JobRecord:
    """The same job. Raises ValueError if it has a generation without members: no part shows that by itself."""
    if job.generation is not None and not job.generation.members:
        raise ValueError(f"a job's record has generation {job.generation.number} without members")
    return job


def decode_part(flat: Sequence[str]) -> JobRecord:
    """A record of which entries may be left out. Raises ValueError."""
    fields = pairs(flat)
    _bounded_fields(fields, MOST_OF_RECORD)
    job = {name: fields[name] for name in JOB_RAW if name in fields}
    job |= {name: json.dumps(fields[name]) for name in JOB_TEXT}
    maps: dict[str, dict[str, str]] = {kind: {} for kind in (*GENERATION_MAPS, *JOB_MAPS)}
    known = {*JOB_RAW, *JOB_TEXT, *SCRIPTS_OWN}
    for field, text in fields.items():
        kind, colon, key = field.partition(":")
        if colon and kind in maps:
            maps[kind][key] = _report(text) if kind in ("report", "last") else text
        elif field not in known and not field.startswith("generation_"):
            raise ValueError(f"a job's record has the unknown field {field}")
    if _are_many(text for entries in maps.values() for text in entries.values()):
        for kind, entries in maps.items():
            _one_by_one(_ENTRIES[kind], entries.values())
    job |= {name: _object(maps[kind]) for kind, name in JOB_MAPS.items()}
    if "generation_id" in fields:
        generation = {name: fields[f"generation_{name}"] for name in GENERATION_RAW}
        generation |= {name: json.dumps(fields[f"generation_{name}"]) for name in GENERATION_TEXT}
        generation |= {name: _flag(fields[f"generation_{name}"]) for name in GENERATION_FLAG}
        generation |= {name: _object(maps[kind]) for kind, name in GENERATION_MAPS.items()}
        job["generation"] = _object(generation)
    if "active_id" in fields:
        job["active"] = _object({"number": fields["active_number"], "id": json.dumps(fields["active_id"])})
    record = from_json(JobRecord, _object(job))
    if {name: fields[name] for name in BY_SPEC if name in fields} != _by_spec(record.spec):
        raise ValueError("its least or most nodes, or its array, are not those of its spec")
    if record.name != record.spec.name:  # names become folders, and only the spec's name was checked
        raise ValueError(f"a job's record has the name {record.name!r}, its spec {record.spec.name!r}")
    _share_all_names(record)
    return record


def decode_node(flat: Sequence[str], cordon: str) -> NodeRecord:
    """Raises ValueError."""
    fields = pairs(flat)
    _bounded_fields(fields, MOST_CHARACTERS)
    if unknown := set(fields) - NODE_FIELDS:
        raise ValueError(f"a node's record has the unknown field {min(unknown)}")
    node = {name: fields[name] for name in ("joined", "facts", "readiness", "rev")}
    node |= {"id": json.dumps(fields["id"]), "lost": _flag(fields["lost"]), "left": _flag(fields["left"])}
    node["incarnation"] = _object({"life": json.dumps(fields["life"]), "start": fields["start"]})
    node["mute"] = _flag(fields.get("mute") or "0")
    node["cordon"] = cordon or "null"
    bounded(cordon, MOST_OF_LINE)
    found = from_json(NodeRecord, _object(node))
    for part in (found, found.incarnation, found.facts, *found.facts.gpus):
        _share_names(part)
    return found


_names_of: dict[type[Record], set[str]] = {}


def _share_names(record: Record) -> None:
    """Of each record pydantic keeps the names of the fields that its text had: a third of what a node with eight GPUs
    takes. Most records of a kind have the same: they share one set."""
    names = _names_of.setdefault(type(record), record.model_fields_set)
    if names == record.model_fields_set:
        object.__setattr__(record, "__pydantic_fields_set__", names)
    else:
        _names_of[type(record)] = record.model_fields_set


def _share_all_names(record: Record) -> None:
    """Of this record and those in it, without the entries of its lists and maps: half of what a waiting job takes."""
    _share_names(record)
    for part in vars(record).values():
        if isinstance(part, Record):
            _share_all_names(part)


def encode_queues(record: QueuesRecord) -> dict[str, str]:
    """The flat hash of the queues."""
    return {"tree": record.tree.to_json(), "rev": str(record.rev)}


def decode_queues(flat: Sequence[str]) -> QueuesRecord:
    """Raises ValueError."""
    fields = pairs(flat)
    _bounded_fields(fields, MOST_OF_RECORD)
    return from_json(QueuesRecord, _object({"tree": fields["tree"], "rev": fields["rev"]}))


def encode_windows(record: WindowsRecord) -> dict[str, str]:
    """The flat hash of the maintenance windows."""
    return {"windows": record.windows.to_json(), "rev": str(record.rev)}


def decode_windows(flat: Sequence[str]) -> WindowsRecord:
    """Raises ValueError."""
    fields = pairs(flat)
    _bounded_fields(fields, MOST_OF_RECORD)
    return from_json(WindowsRecord, _object({"windows": fields["windows"], "rev": fields["rev"]}))


def encode_usage(usage: UsageDay) -> dict[str, str]:
    """The flat hash of a day, and which day it is."""
    rows = {f"{ROW}{key}": row.to_json() for key, row in usage.rows.items()}
    return {"day": str(usage.day), "rev": str(usage.rev)} | rows


def decode_usage(day: str, flat: Sequence[str]) -> UsageDay:
    """Raises ValueError."""
    fields = pairs(flat)
    _bounded_fields(fields, MOST_OF_RECORD)
    rows = {field.removeprefix(ROW): text for field, text in fields.items() if field.startswith(ROW)}
    if unknown := set(fields) - {"rev", *(ROW + key for key in rows)}:
        raise ValueError(f"a day's use has the unknown field {min(unknown)}")
    if len(rows) > ROWS_KEPT:
        raise ValueError(f"a day's use has more than {ROWS_KEPT} rows")
    if _are_many(rows.values()):
        _one_by_one(_USAGE_ROW, rows.values())
    return from_json(UsageDay, _object({"day": str(int(day)), "rev": fields["rev"], "rows": _object(rows)}))


def decode_saved(text: str) -> Saved:
    """Raises ValueError."""
    rev, _, era = text.partition(" ")
    return Saved(era=era, rev=int(rev))


def decode_event(entry: tuple[str, Sequence[str]]) -> JobEvent:
    """Raises ValueError."""
    event_id, flat = entry
    fields = pairs(flat)
    _bounded_fields(fields, MOST_OF_LINE)
    raw: dict[str, str] = {name: json.dumps(text) for name, text in fields.items() if name != "generation"}
    return from_json(JobEvent, _object(raw | {"id": json.dumps(event_id), "generation": fields["generation"]}))


def decode_pod(text: str) -> PodState:
    """Raises ValueError."""
    return from_json(PodState, bounded(text, MOST_OF_LINE))


def decode_member(text: str) -> Member:
    """Raises ValueError."""
    return from_json(Member, bounded(text, values=MOST_OF_ENTRY))


def event_order(event_id: str) -> tuple[int, int]:
    """The order of an event's id, for comparison."""
    ms, _, seq = event_id.partition("-")
    return int(ms), int(seq)


def _object(members: Mapping[str, str]) -> str:
    """A JSON object whose values are JSON already."""
    return "{" + ",".join(f"{_quoted(key)}:{text}" for key, text in members.items()) + "}"


@lru_cache(NAMES)
def _quoted(key: str) -> str:
    return json.dumps(key)


def _flag(text: str) -> str:
    if text not in ("0", "1"):
        raise ValueError(f"it has {text[:20]!r} where 0 or 1 belongs")
    return "true" if text == "1" else "false"


def _report(text: str) -> str:
    seq, _, body = text.split(" ", 2)
    return f'{body[:-1]},"seq":{seq}}}'
