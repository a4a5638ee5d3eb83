"""Reads the agent's configuration: file, environment (``NODEAGENT__REDIS__URL=...``), defaults of this machine.

Values are read as they would be in the file (lists and mappings in brackets too), but for keys that hold text: those
take the variable as it is. Must never know which keys there are.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from nodeagent.spec.agentconfig import AgentConfig, default_config_dir, default_dirs, default_key
from nodeagent.spec.check import annotation_at, validate
from nodeagent.spec.errors import Problem, SpecError
from nodeagent.spec.yamlfile import Document, load, scalar

PREFIX = "NODEAGENT__"


def apply(document: Document, model: type[BaseModel], environ: Mapping[str, str]) -> Document:
    """The document with every override in it; a variable's mistakes are reported under its own name."""
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
    else than a mapping on the way: the file's mistake is reported instead."""
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


_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def default_config_path(uid: int, environ: Mapping[str, str]) -> Path | None:
    """Where the config lies when nobody names it; None without a home."""
    folder = default_config_dir(uid, environ)
    return None if folder is None else folder / "nodeagent.yaml"


def read_text(path: Path) -> str:
    """A file's text. Raises ``SpecError`` when it cannot be read or is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError([Problem(str(path), 0, 0, f"cannot be read: {error.strerror}", "check the path")]) from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        col = error.start - data.rfind(b"\n", 0, error.start)
        raise SpecError([Problem(str(path), line, col, "not UTF-8 text", "save the file as UTF-8")]) from None


def parse_config(
    text: str,
    filename: str,
    environ: Mapping[str, str],
    *,
    uid: int | None = None,
    ephemeral: tuple[int, int] | None = None,
) -> AgentConfig:
    """The configuration in ``text`` with the environment's overrides.

    ``uid`` (default: ours) decides the default folders; ``ephemeral`` is the kernel's port range, if it is to be
    checked. Raises ``SpecError`` with every problem.
    """
    document = load(text, filename)
    if document.value is None:
        document = replace(document, value={}, raw={})
    document = apply(document, AgentConfig, environ)
    document = _machine_defaults(document, os.getuid() if uid is None else uid, environ)
    return validate(document, AgentConfig, {"ephemeral": ephemeral})


def load_config(path: Path | None, environ: Mapping[str, str]) -> AgentConfig:
    """The configuration of the agent on this machine: of ``path``, else of the default place if there is a file, else
    the defaults. Raises ``SpecError`` with every problem."""
    default = default_config_path(os.getuid(), environ)
    if path is None and default is not None and default.exists():
        path = default
    text = "" if path is None else read_text(path)
    return parse_config(text, str(path or "defaults"), environ, ephemeral=ephemeral_ports())


def ephemeral_ports() -> tuple[int, int] | None:
    """The kernel's range for outgoing connections; None where it cannot be read."""
    try:
        low, high = _EPHEMERAL.read_text().split()
    except (OSError, ValueError):
        return None
    return int(low), int(high)


def _machine_defaults(document: Document, uid: int, environ: Mapping[str, str]) -> Document:
    tree = document.value
    if not isinstance(tree, dict):
        return document
    origins = dict(document.origins)
    dirs = tree.get("dirs", {})
    node = tree.get("node", {})
    if isinstance(dirs, dict):
        dirs = default_dirs(uid, environ) | dirs
    if isinstance(node, dict) and environ.get("POD_IP") and node.get("address") is None:
        node = node | {"address": environ["POD_IP"]}
        origins[("node", "address")] = "POD_IP"
    filled = {
        "ports": {},  # checked against the kernel's even if default
        "cluster_key": str(default_key(uid, environ)),
        **tree,
        "dirs": dirs,
        "node": node,
    }
    return replace(document, value=filled, origins=origins)
