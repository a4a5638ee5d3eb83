"""The packages of nodeagent: which may import which, what is core, and how many lines each has.

Owns the table of arrows. ``docs/generate.py`` draws it into docs/architecture.md; tests/unit/test_imports.py holds the
code to it.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nodeagent"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

Graph = Mapping[str, Collection[str]]
"""A module or a package, and those that it imports."""

ARROWS: Graph = {
    "train": (),
    "model": (),
    "osutil": (),
    "hardware": ("model", "osutil"),
    "spec": ("model",),
    "trust": ("model", "osutil", "spec"),
    "store": ("model", "osutil", "spec"),
    "lease": ("osutil", "store"),
    "shim": ("model", "osutil", "lease"),
    "pods": ("model", "osutil", "spec", "lease", "shim"),
    "local": ("osutil", "trust", "pods"),
    "plan": ("model", "pods"),
    "diag": ("model", "osutil", "hardware", "spec"),
    "doctor": ("model", "osutil", "spec", "trust", "store", "shim", "plan"),
    "agent": ("model", "osutil", "hardware", "spec", "trust", "store", "lease", "pods", "plan"),
    "api": ("model", "osutil", "spec", "trust", "store", "pods", "plan", "agent"),
    "ctl": ("api",),
}
"""Package to the packages that it imports when it is loaded. In this order each stands after all that it imports.
``plan`` uses the states of pods alone (``pods/base.py``); of ``agent`` only ``health.py`` uses ``hardware``: it is
loaded only where that is there."""

LATER: Graph = {
    "spec": ("hardware",),
    "local": ("hardware",),
    "diag": ("ctl",),
    "doctor": ("hardware",),
    "agent": ("diag", "doctor", "api"),
    "api": ("hardware", "doctor"),
    "ctl": ("model", "osutil", "hardware", "spec", "local", "doctor"),
}
"""What a package imports beside that only once it is needed, inside of a function: ``agent/serve.py`` adds what people
use after the first beat, the tool has to start fast, and hardware is optional."""

PLAN: Graph = {
    "cluster": (),
    "steps": (),
    "nodes": ("cluster",),
    "failure": ("cluster", "steps", "nodes"),
    "fairshare": ("cluster", "nodes"),
    "placing": ("cluster", "nodes", "fairshare"),
    "queueing": ("cluster", "steps", "nodes", "failure", "fairshare", "placing"),
    "pods": ("cluster", "nodes", "failure", "placing", "queueing"),
    "job": ("cluster", "steps", "nodes", "failure", "fairshare", "placing", "queueing"),
    "repair": ("cluster", "nodes", "job"),
    "findings": ("cluster", "nodes", "failure", "fairshare"),
}
"""The same inside of ``plan``: each of its packages, and its modules beside them."""

BESIDE = ("nodeagent.entry",)
"""Modules of no package: the programs' entry points, each of which loads its program once it is called."""

CORE = ("model", "osutil", "spec", "trust", "store", "lease", "shim", "pods", "plan", "agent")
"""What no job runs without."""
READ_FIRST = ("model", "store", "lease", "shim", "pods", "plan", "agent")
"""Of the core: what a newcomer reads."""


@cache
def tree(file: Path) -> ast.Module:
    """The module as Python's parser sees it."""
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


def later_imports(node: ast.AST) -> Iterator[str]:
    """Full names of modules that the node imports inside of its functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(child)
        else:
            yield from later_imports(child)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Each module of a package by its full name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


_WANTED: Mapping[str, Callable[[ast.AST], Iterator[str]]] = {
    "loaded": partial(imports, nested=False),
    "later": later_imports,
    "ever": imports,
}


@cache
def module_graph(package: Path = PACKAGE, when: Literal["loaded", "later", "ever"] = "loaded") -> dict[str, set[str]]:
    """Each module, and those of the same package that it imports: when it is loaded; ``later``, in a function; or
    ``ever``, what only a type checker imports included."""
    every, wanted = modules(package), _WANTED[when]
    graph: dict[str, set[str]] = {}
    for module, file in every.items():
        graph[module] = {found for name in wanted(tree(file)) if (found := _module(name, every)) and found != module}
    return graph


def _module(name: str, every: Collection[str]) -> str:
    """The module that an imported name is, or is in; empty if it is none of these."""
    while name and name not in every:
        name = name.rpartition(".")[0]
    return name


def package_graph(graph: Graph, inside: str = "") -> dict[str, set[str]]:
    """The arrows between the packages of these modules; ``inside`` of one package (``nodeagent.plan``) those between
    its packages, and its modules beside them. ``nodeagent`` itself, which has the version alone, is none, nor is what
    is ``BESIDE``."""
    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if package := _package(module, inside):
            arrows = found.setdefault(package, set())
            arrows |= {of for name in imported if (of := _package(name, inside)) and of != package}
    return found


def _package(module: str, inside: str) -> str:
    depth = inside.count(".") + 1
    parts = module.split(".")
    named = len(parts) > depth and module.startswith(inside) and module not in BESIDE
    return parts[depth] if named else ""


def circle(graph: Graph) -> list[str]:
    """One circle of the graph, its first member again at the end; empty if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def picture() -> str:
    """The arrows as a Mermaid flowchart; dotted: later. One to what a package reaches through another is left out."""
    reached: dict[str, set[str]] = {}
    for package, arrows in ARROWS.items():
        reached[package] = set(arrows).union(*(reached[of] for of in arrows))
    lines = ["flowchart TD"]
    for package in reversed(ARROWS):
        lines.append(f"    {package}[{package}]" if package in CORE else f"    {package}([{package}])")
    for package in reversed(ARROWS):
        arrows = ARROWS[package]
        direct = [of for of in ARROWS if of in arrows and not any(of in reached[other] for other in arrows)]
        lines += [f"    {package} --> {of}" for of in direct]
        lines += [f"    {package} -.-> {of}" for of in LATER.get(package, ()) if of not in reached[package]]
    return "\n".join(lines)


NEAR = 0.1
"""Part by which a number may be another than the table of lines says."""
FEW = 25
"""What a small number may be another by."""


def near(old: str, new: str) -> bool:
    """Whether two tables of lines say the same, within rounding."""
    number = r"\d[\d,]*"
    if re.sub(number, "", old) != re.sub(number, "", new):
        return False
    pairs = zip(*(_numbers(re.findall(number, text)) for text in (old, new)), strict=True)
    return all(abs(one - other) <= max(FEW, NEAR * other) for one, other in pairs)


def _numbers(words: list[str]) -> list[int]:
    return [int(word.replace(",", "")) for word in words]


@cache
def lines() -> str:
    """What the lines of each package are."""
    rows = [
        "| package | modules | lines | code | docstrings | imports | comments, blank |",
        "|---|---|---|---|---|---|---|",
    ]
    total, core, first = [0] * 6, [0] * 6, [0] * 6
    for package in ARROWS:
        counts = [0] * 6
        for file in sorted((PACKAGE / package).rglob("*.py")):
            counts = [a + b for a, b in zip(counts, [1, *_kinds(file)], strict=True)]
        for group, member in ((total, True), (core, package in CORE), (first, package in READ_FIRST)):
            group[:] = [a + b * member for a, b in zip(group, counts, strict=True)]
        rows.append(_row(f"`{package}`" + ("" if package in CORE else ", optional"), counts))
    rows.append(_row("a newcomer's part of the core: " + ", ".join(f"`{name}`" for name in READ_FIRST), first))
    rows.append(_row("core", core))
    rows.append(_row("all", total))
    return "\n".join(rows)


def _row(name: str, counts: list[int]) -> str:
    return "| " + " | ".join([name, *(f"{count:,}" for count in counts)]) + " |"


def _kinds(file: Path) -> list[int]:
    """Of a module: all its lines, those of code, of docstrings, of imports, and the rest: comments and blank ones."""
    text = file.read_text().splitlines()
    kind = {n: "code" for n, line in enumerate(text, 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in _statements(tree(file)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                kind |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), "docstring")
            case ast.Import() | ast.ImportFrom():
                kind |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), "import")
    found = list(kind.values())
    counts = [found.count(name) for name in ("code", "docstring", "import")]
    return [len(text), *counts, len(text) - sum(counts)]


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            yield from _statements(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


BEFORE = {
    "files of Python": 317,
    "of these, shorter than 100 lines": 166,
    "lines of Python": 38_729,
    "the median file, in lines": 95,
    "the longest file, in lines": 391,
    "lines of Lua, the store's steps": 1_487,
    "lines of tests": 46_138,
    "public class names that exist more than once": 32,
    "modules in a circle of imports": 19,
    "files from a killed worker to the next step": 65,
    "files from `scale 4` to a new process": 30,
}
"""Of commit e2e96ee, counted as ``house`` counts; circles and ways as a reader of that commit found them by hand."""


@cache
def house() -> str:
    """How large the parts are that a reader meets, before they were redrawn and now."""
    files = [len(file.read_text().splitlines()) for file in sorted(PACKAGE.rglob("*.py"))]
    classes = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    killed, scaled = ways()
    now = (
        len(files),
        sum(count < 100 for count in files),
        sum(files),
        round(statistics.median(files)),
        max(files),
        sum(len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.lua")),
        sum(len(file.read_text().splitlines()) for file in (ROOT / "tests").rglob("*.py")),
        sum(count > 1 for count in classes.values()),
        max(0, len(circle(module_graph())) - 1),
        len(killed),
        len(scaled),
    )
    rows = [f"| {name} | {old:,} | {new:,} |" for (name, old), new in zip(BEFORE.items(), now, strict=True)]
    return "\n".join(["| | before | now |", "|---|---|---|", *rows])


def ways() -> tuple[set[str], set[str]]:
    """The files that a killed worker and a ``scale`` pass, by the code map: the second ends as the first does."""
    text = ARCHITECTURE.read_text()
    parts = text[text.index("## Code map") : text.index("## What survives what")].split("\n**")
    killed, scaled = parts[1:3]
    rest = killed[killed.index("`plan/job/proposal.py`") :]
    return _files(killed), _files(scaled) | _files(rest)


def _files(text: str) -> set[str]:
    return set(re.findall(r"`((?:[a-z_]+/)?[a-z_/]+\.(?:py|lua))`", text))
