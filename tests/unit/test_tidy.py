"""The house rules, checked: what may import what, and that every module says what it owns."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nodeagent"
FILES = sorted(PACKAGE.rglob("*.py"))
IMPURE = frozenset({
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "redis", "secrets", "select",
    "shutil", "socket", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
})  # fmt: skip
"""What a decision must not touch: clocks, randomness, files, processes, the network, logs."""
OF_PLAN = frozenset({"nodeagent.model", "nodeagent.plan", "nodeagent.workers.base"})
"""What ``plan/`` may use of nodeagent: records, and the states of pods it decides on."""
ON_ITS_OWN = sorted([*PACKAGE.glob("workers/shim*.py"), *PACKAGE.glob("workers/standby*.py")])
"""Run by the job's own Python, or small enough to outlive everything: the standard library only."""
TEXT = frozenset(
    {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".lua", ".sh", ".service", ".j2", ".cfg", ".txt", ""}
)
SKIPPED = frozenset({".git", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"})
MACHINE_PATH = re.compile(r"(?<![\w./-])/work" + r"/(?:main|shared)\b")


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imports(node: ast.AST, *, nested: bool = True) -> Iterator[str]:
    """Full names of modules imported anywhere in the node; without ``nested`` only when the module is loaded, and
    not for type checkers only."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom():
                yield "."
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not nested:
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if not nested:
                continue
            case _:
                yield from imports(child, nested=nested)


def top(name: str) -> str:
    return name.partition(".")[0]


def within(name: str, packages: frozenset[str]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


PLAN = [f for f in FILES if f.parent.name == "plan"]


@pytest.mark.parametrize("file", PLAN, ids=named)
def test_decisions_are_pure(file: Path) -> None:
    found = set(imports(tree(file)))
    assert not {n for n in found if top(n) in IMPURE}
    foreign = {n for n in found if top(n) not in sys.stdlib_module_names and not within(n, OF_PLAN)}
    assert not foreign, "plan/ uses records and itself, nothing else"
    kinds = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.Global)
    assert not [n for n in ast.walk(tree(file)) if isinstance(n, kinds)]
    calls = {n.func.id for n in ast.walk(tree(file)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & {"open", "print", "input", "__import__", "hash", "id"}


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name == "model"], ids=named)
def test_records_know_only_records(file: Path) -> None:
    found = set(imports(tree(file)))
    assert not {n for n in found if top(n) in IMPURE}
    assert not {n for n in found if top(n) == "nodeagent" and not within(n, frozenset({"nodeagent.model"}))}


@pytest.mark.parametrize("file", FILES, ids=named)
def test_each_module_says_what_it_owns(file: Path) -> None:
    assert ast.get_docstring(tree(file)), "a module's docstring says what it owns"


@pytest.mark.parametrize("file", [f for f in FILES if "train" not in f.parts], ids=named)
def test_nothing_loads_torch(file: Path) -> None:
    heavy = {"torch", "numpy", "sklearn"}
    assert not {n for n in imports(tree(file), nested=False) if top(n) in heavy}
    assert not {n for n in imports(tree(file)) if within(n, frozenset({"nodeagent.train"}))}, "for worker scripts only"


@pytest.mark.parametrize("file", [f for f in FILES if "train" in f.parts], ids=named)
def test_the_helper_of_worker_scripts_needs_nothing_else_of_nodeagent(file: Path) -> None:
    found = set(imports(tree(file)))
    assert not {n for n in found if top(n) == "nodeagent" and not within(n, frozenset({"nodeagent.train"}))}
    foreign = {top(n) for n in found} - sys.stdlib_module_names - {"nodeagent", "torch"}
    assert not foreign, "the job's Python need have nothing but torch"


@pytest.mark.parametrize("file", ON_ITS_OWN, ids=named)
def test_shim_and_standby_need_nothing_but_the_standard_library(file: Path) -> None:
    helpers = {"nodeagent.workers." + f.stem for f in ON_ITS_OWN} | {"nodeagent.workers.linux"}
    for name in imports(tree(file), nested=False):
        if top(name) == "nodeagent":
            assert within(name, frozenset(helpers)), f"{name} is no part of the shim"
        else:
            assert top(name) in sys.stdlib_module_names, f"{name} is not in the standard library"


def test_helpers_of_the_shim_need_nothing_either() -> None:
    found = set(imports(tree(PACKAGE / "workers" / "linux.py")))
    assert not {n for n in found if top(n) not in sys.stdlib_module_names}


def test_the_standby_is_one_file() -> None:
    found = set(imports(tree(PACKAGE / "workers" / "standby.py")))
    assert not {n for n in found if top(n) == "nodeagent"}, "the job's Python need not have nodeagent"


def test_no_path_of_a_developers_machine_is_left_in_the_repository() -> None:
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in SKIPPED]
        for file in (Path(folder) / name for name in files):
            if file.suffix in TEXT and file.is_file():
                text = file.read_bytes().decode(errors="replace")
                if MACHINE_PATH.search(text) or f"{ROOT}/" in text:
                    found.append(named(file))
    assert not found
