"""Validates what a file holds against a model, and tells every mistake with its place in words for people.

Knows pydantic's errors and the file's places; must never know what a job or an agent is.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, NotTextError, Path, Problem, SpecError, closest, did_you_mean
from nodeagent.spec.yamlfile import Document

M = TypeVar("M", bound=BaseModel)

_YES = {"yes", "y", "on", "true", "1"}
_NO = {"no", "n", "off", "false", "0"}


def dotted(path: Path) -> str:
    """``roles.worker.nodes``, ``policies[0].on``."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def validate(document: Document, model: type[M], context: Mapping[str, Any], extra: Iterable[Problem] = ()) -> M:
    """The document as ``model``.

    Raises ``SpecError`` with every problem: the YAML's, pydantic's, each key left without a value, and ``extra``
    (what the caller found by itself).
    """
    problems = [*document.problems, *extra]
    empty = {path for path, raw in document.raw.items() if raw == "" and path in document.keys}
    for path in empty:
        problems.append(
            document.problem(path, f"'{dotted(path)}' has no value", "write one, or remove the key", key=True)
        )
    if not isinstance(document.value, dict):
        what = "the file is empty" if document.value is None else "the file does not hold 'key: value' lines"
        fields = model.model_fields
        names = ", ".join([k for k, f in fields.items() if f.examples] or list(fields)[:4])
        raise SpecError([*document.problems, document.problem((), what, f"write keys such as {names}")])
    try:
        result = model.model_validate(document.value, context=dict(context))
    except ValidationError as error:
        problems += [p for e in error.errors() if _path(e["loc"]) not in empty for p in _problems(e, document, model)]
    if problems:
        raise SpecError(problems)
    return result


def _path(loc: tuple[int | str, ...]) -> Path:
    return loc[:-1] if loc and loc[-1] == "[key]" else loc


def _problems(details: ErrorDetails, document: Document, model: type[BaseModel]) -> list[Problem]:
    """One of pydantic's errors in our words, at its place; several if the check found several."""
    loc, path = details["loc"], _path(details["loc"])
    kind, key = details["type"], loc != path
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, CheckError):
        return [_problem(one, path, document, key=key) for one in (cause, *cause.also)]
    if kind == "missing":
        where = f" in {dotted(path[:-1])}" if len(path) > 1 else ""
        field = _fields_at(model, path[:-1]).get(str(path[-1]))
        example = f"add {path[-1]}: {field.examples[0]}" if field and field.examples else "add it"
        return [document.problem(path, f"the key '{path[-1]}' is missing{where}", example)]
    if kind == "extra_forbidden":
        key = True
        known, word = _fields_at(model, path[:-1]), str(path[-1])
        where = f" in {dotted(path[:-1])}" if len(path) > 1 else ""
        elsewhere: Mapping[str, str] = getattr(annotation_at(model, path[:-1]), "elsewhere", {})
        what, right = f"unknown key '{word}'{where}", elsewhere.get(word)
        right = right or did_you_mean(word, known, intro="known here are")
    else:
        what, right = _words(kind, details, document.raw.get(path))
        what = f"{dotted(path)}: {what}"
    return [document.problem(path, what, right, key=key)]


def _problem(error: CheckError, path: Path, document: Document, *, key: bool) -> Problem:
    path = (*path, *error.at)
    what, right = error.what, error.right
    if isinstance(error, NotTextError) and (raw := document.raw.get(path)):
        what, right = f"{raw} is not text", f'write "{raw}" in quotes'
    key = key or (path in document.keys and what.startswith("unknown key"))
    return document.problem(path, f"{dotted(path)}: {what}", right, key=key)


def _words(kind: str, details: ErrorDetails, raw: str | None) -> tuple[str, str]:
    value, ctx = details["input"], details.get("ctx", {})
    shown = units.show(value) if raw is None or isinstance(value, str) else raw
    match kind:
        case "string_type" if raw and value is not None:
            return f"{shown} is {_kind(value)}, not text", f'write "{raw}" in quotes'
        case "string_type":
            return f"{shown} is not text", "write text, in quotes if in doubt"
        case "int_type":
            try:
                units.whole(value, 1, 2**63)
            except CheckError as error:
                return error.what, error.right
        case "bool_type":
            word = str(value).lower()
            hint = "true" if word in _YES else "false" if word in _NO else "true or false"
            return f"{shown} is neither true nor false", f"write {hint}"
        case "literal_error":
            expected = "true" if ctx["expected"] == "True" else ctx["expected"]
            best = closest(str(value), expected.replace("'", "").replace(" or ", ", ").split(", "))
            return f"{shown} is not known here", f"did you mean {best}?" if best else f"write {expected}"
        case "greater_than_equal":
            return f"{shown} is too small", f"it must be at least {ctx['ge']}"
        case "greater_than":
            return f"{shown} is too small", f"it must be above {ctx['gt']:g}"
        case "less_than_equal":
            return f"{shown} is too large", f"it must be at most {ctx['le']}"
        case "string_too_short":
            return "an empty text", "write one, or remove the key"
        case "too_short":
            return "an empty list", "write at least one entry"
        case "string_pattern_mismatch":
            return f"{shown} does not fit", f"it must match {ctx['pattern']}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"{shown} is not a mapping", "write 'key: value' lines below it, or {key: value}"
        case "list_type" | "tuple_type":
            return f"{shown} is not a list", "write [one, two], or lines that start with '- '"
        case _:
            pass
    return f"{shown}: {details['msg']}", ""


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number"


def annotation_at(model: type[BaseModel], path: Path) -> Any:
    """The type of the value at ``path``, without ``Annotated`` and ``None``; None for an unknown path."""
    found: Any = model
    for part in path:
        if isinstance(found, type) and issubclass(found, BaseModel):
            field = found.model_fields.get(str(part))
            found = field.annotation if field else None
        else:
            arguments = get_args(found)
            found = arguments[-1 if get_origin(found) is dict else 0] if arguments else None
        found = _inner(found)
    return found


def _fields_at(model: type[BaseModel], path: Path) -> dict[str, FieldInfo]:
    """The keys known inside of the value at ``path``; empty if it holds no model."""
    found = annotation_at(model, path)
    return dict(found.model_fields) if isinstance(found, type) and issubclass(found, BaseModel) else {}


def _inner(annotation: Any) -> Any:
    """Without Annotated, and of ``X | None`` the X."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            annotation = next((a for a in get_args(annotation) if a is not type(None)), None)
        else:
            return annotation
