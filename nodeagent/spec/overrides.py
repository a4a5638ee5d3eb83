"""Environment variables that override the agent's config: ``NODEAGENT__REDIS__URL=...`` is ``redis: {url: ...}``.

Values are read as they would be in the file (lists and mappings in brackets too), but for keys that hold text: those
take the variable as it is. Must never know which keys there are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from pydantic import BaseModel

from nodeagent.spec.check import annotation_at
from nodeagent.spec.errors import Problem, SpecError
from nodeagent.spec.yamlfile import Document, load, scalar

PREFIX = "NODEAGENT__"


def apply(document: Document, model: type[BaseModel], environ: Mapping[str, str]) -> Document:
    """The document with every override in it; a variable's mistakes will be told under its own name."""
    names = sorted(name for name in environ if name.startswith(PREFIX))
    if not names or not isinstance(document.value, dict):
        return document
    tree = copy.deepcopy(document.value)
    origins = dict(document.origins)
    problems = list(document.problems)
    for name in names:
        path = tuple(name[len(PREFIX) :].lower().split("__"))
        if "" in path:
            problems.append(
                Problem(name, 0, 0, "a section or key without a name", f"write for instance {PREFIX}REDIS__URL")
            )
            continue
        try:
            value = _value(environ[name], name, annotation_at(model, path) is str)
        except SpecError as error:
            problems += error.problems
            continue
        if new := _put(tree, path, value):
            origins[new] = origins[path] = name
    return replace(document, value=tree, origins=origins, problems=problems)


def _value(text: str, name: str, is_text: bool) -> object:
    if is_text:
        return text
    if not text.lstrip().startswith(("[", "{", '"', "'")):
        return scalar(text.strip())
    inner = load(text, name)
    if inner.problems:
        raise SpecError(inner.problems)
    return inner.value


def _put(tree: dict[str, object], path: tuple[str, ...], value: object) -> tuple[str, ...]:
    """The path of what is new: the value, or the outermost section made for it. Empty where the file has something
    else than a mapping on the way: the file's mistake is told instead."""
    new = path
    for depth, part in enumerate(path[:-1], 1):
        if part not in tree:
            tree[part] = {}
            new = min(new, path[:depth], key=len)
        inner = tree[part]
        if not isinstance(inner, dict):
            return ()
        tree = inner
    tree[path[-1]] = value
    return new
