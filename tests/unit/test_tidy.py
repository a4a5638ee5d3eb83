"""The house rules, checked: what may import what, and that every module says what it owns.

One test for each rule: it looks at all files, and names every one that breaks it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from docs.packages import imports, tree

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nodeagent"
UNIT = ROOT / "tests" / "unit"
FILES = sorted(PACKAGE.rglob("*.py"))
IMPURE = frozenset({
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "redis", "secrets", "select",
    "shutil", "socket", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
})  # fmt: skip
"""What a decision must not touch: clocks, randomness, files, processes, the network, logs."""
OF_PLAN = frozenset({"nodeagent.model", "nodeagent.plan", "nodeagent.pods.base"})
"""What ``plan/`` may use of nodeagent: records, and the states of pods it decides on."""
ON_ITS_OWN = sorted([
    *PACKAGE.glob("shim/**/*.py"), PACKAGE / "lease" / "grants.py",
])  # fmt: skip
"""Run by the job's own Python, or small enough to outlive everything: the standard library only."""
MOST_PARAMETERS = 8
"""Of a constructor, ``self`` not counted."""
TEXT = frozenset(
    {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".lua", ".sh", ".service", ".j2", ".cfg", ".txt", ""}
)
SKIPPED = frozenset(
    {".git", ".venv", ".frameworks", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__",
     "test-results"}
)  # fmt: skip


def top(name: str) -> str:
    return name.partition(".")[0]


def within(name: str, packages: frozenset[str]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def offenders(files: Iterable[Path], rule: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What breaks the rule, by file. A rule that looks at no file would hold for ever."""
    found = {named(file): sorted(rule(file)) for file in files}
    assert found, "no file was looked at"
    return {name: wrong for name, wrong in found.items() if wrong}


def impure(file: Path) -> Iterator[str]:
    """What a decision must not do: touch the world, use what is not a record, wait, keep state, depend on a hash."""
    for name in imports(tree(file)):
        if top(name) in IMPURE or (top(name) not in sys.stdlib_module_names and not within(name, OF_PLAN)):
            yield f"imports {name}"
    for node in ast.walk(tree(file)):
        match node:
            case ast.AsyncFunctionDef() | ast.AsyncFor() | ast.AsyncWith() | ast.Await() | ast.Global():
                yield f"line {node.lineno}: {type(node).__name__}"
            case ast.Call(func=ast.Name(id="open" | "print" | "input" | "__import__" | "hash" | "id" as called)):
                yield f"line {node.lineno}: calls {called}"


def test_decisions_are_pure() -> None:
    """plan/ uses records and itself, nothing else."""
    assert not offenders((PACKAGE / "plan").rglob("*.py"), impure)


def test_records_know_only_records() -> None:
    def rule(file: Path) -> Iterator[str]:
        for name in imports(tree(file)):
            if top(name) in IMPURE or (top(name) == "nodeagent" and not within(name, frozenset({"nodeagent.model"}))):
                yield f"imports {name}"

    assert not offenders((f for f in FILES if f.parent.name == "model"), rule)


def test_each_module_says_what_it_owns() -> None:
    assert not offenders(FILES, lambda file: [] if ast.get_docstring(tree(file)) else ["has no docstring"])


def test_each_public_class_name_exists_once() -> None:
    found: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


ALIAS = re.compile(r"[A-Z]+[a-z]\w*")


def test_a_name_of_a_type_means_one_thing() -> None:
    """Several modules may give the same name to the very same type, and none to another one, or to a class."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add("a class")
        for node in tree(file).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() | ast.Name() as value):
                    if ALIAS.fullmatch(name):
                        found.setdefault(name, set()).add(ast.unparse(value))
    assert {name: types for name, types in found.items() if len(types) > 1} == {}


VAGUE_PART = re.compile("told|said|heard|wish|mend|care|whoever", re.IGNORECASE)
VAGUE = re.compile(r"(?<![a-z])(told|said|heard|wish(es|ed)?|mend(s|ed)?|cares?|whoever)(?![a-z])", re.IGNORECASE)
"""Words that name nothing: what was reported, published, received, wanted or repaired has a word of its own."""


def identifiers(file: Path) -> Iterator[str]:
    """Names that Python code gives and uses, in snake_case; of Lua and JavaScript the code without its comments."""
    if file.suffix != ".py":
        comment = r"--.*" if file.suffix == ".lua" else r"/\*[\s\S]*?\*/|//.*"
        yield from re.sub(comment, "", file.read_text()).split()
        return
    found = {getattr(node, kind, None) for node in ast.walk(tree(file)) for kind in ("id", "attr", "arg", "name")}
    yield from (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name) for name in found if isinstance(name, str))


def test_identifiers_say_what_they_name() -> None:
    folders = [PACKAGE, *(ROOT / name for name in ("benchmarks", "config", "docs", "examples", "release", "tests"))]
    sources = [file for folder in folders for kind in ("py", "lua", "js") for file in folder.rglob(f"*.{kind}")]
    assert {file.suffix for file in sources} == {".py", ".lua", ".js"}
    worth_parsing = [file for file in sources if VAGUE_PART.search(file.read_text())]
    assert not offenders(worth_parsing, lambda file: {name for name in identifiers(file) if VAGUE.search(name)})


def parameters(made: ast.ClassDef) -> int:
    """How many a class that does something is made with. Records count none: models, and dataclasses that are frozen or
    have no methods, are made by the names of their fields."""
    own = [child for child in made.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in own:
        if function.name == "__init__":
            arguments = function.args
            return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
    ways = [ast.unparse(way) for way in made.decorator_list]
    if own and any(way.startswith("dataclass") and "frozen=True" not in way for way in ways):
        return sum(isinstance(child, ast.AnnAssign) and "init=False" not in ast.unparse(child) for child in made.body)
    return 0


def test_no_constructor_takes_more_than_eight_parameters() -> None:
    """What needs more does two things, or has loose what belongs together under a name."""

    def wrong(file: Path) -> Iterator[str]:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef) and (count := parameters(node)) > MOST_PARAMETERS:
                yield f"{node.name} takes {count}"

    assert not offenders(FILES, wrong)


def test_nothing_loads_torch() -> None:
    """But what worker scripts import, which nothing else may."""

    def rule(file: Path) -> Iterator[str]:
        loaded = {n for n in imports(tree(file), nested=False) if top(n) in {"torch", "numpy", "sklearn"}}
        yield from loaded | {n for n in imports(tree(file)) if within(n, frozenset({"nodeagent.train"}))}

    assert not offenders((f for f in FILES if "train" not in f.parts), rule)


def test_the_helper_of_worker_scripts_needs_nothing_but_torch() -> None:
    """The job's Python need not have more, nor the rest of nodeagent."""

    def rule(file: Path) -> Iterator[str]:
        for name in imports(tree(file)):
            if not within(name, frozenset({"nodeagent.train", "torch"})) and top(name) not in sys.stdlib_module_names:
                yield name

    assert not offenders((f for f in FILES if "train" in f.parts), rule)


def test_shim_and_fork_server_need_nothing_but_the_standard_library() -> None:
    """The shim may use its own parts, what wraps system calls, the waits of restarts, and the order of roles. These,
    and each file of the fork server, stand alone: the job's Python need not have nodeagent."""
    server = PACKAGE / "shim" / "forkserver"
    alone = [
        PACKAGE / "osutil" / "linux.py",
        PACKAGE / "osutil" / "stderr.py",
        PACKAGE / "osutil" / "suspend.py",
        PACKAGE / "osutil" / "tcp.py",
        PACKAGE / "model" / "backoff.py",
        PACKAGE / "model" / "roleorder.py",
        *(server / name for name in ("server.py", "ending.py", "warming.py", "binding.py")),
    ]
    model = {"nodeagent.model.backoff", "nodeagent.model.roleorder"}
    system = {f"nodeagent.osutil.{name}" for name in ("linux", "stderr", "suspend", "tcp")}
    parts = frozenset({"nodeagent.shim", "nodeagent.lease.grants", *system, *model})

    def rule(file: Path) -> Iterator[str]:
        for name in imports(tree(file), nested=file in alone):
            if top(name) not in sys.stdlib_module_names and (file in alone or not within(name, parts)):
                yield name

    assert not offenders([*ON_ITS_OWN, *alone], rule)


def test_the_lease_process_needs_nothing_but_the_standard_library() -> None:
    """So that it is small, and starts at once; the parts of the store that it uses, too."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import nodeagent.lease.main, nodeagent.store.whois"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


ABOUT_SEVERAL = {
    "api/test_metrics": "the page of agent/metrics.py and agent/gauges.py, as the API serves it",
    "ctl/test_golden": "what several commands print, letter by letter",
    "hardware/judging/test_arbitrary": "rules on events and readings alike, and probes",
    "local/test_parts": "layout, registry, session and the tether together",
    "model/test_records": "what all records have in common",
    "plan/test_constrained": "jobs that choose nodes, through all of plan/",
    "plan/test_folders": "one checkpoint folder, from membership to pod",
    "plan/queueing/test_at_rest": "decisions carried out one after the other, through all of plan/",
    "plan/test_stories": "examples of other schedulers, through all of plan/",
    "spec/test_apiconfig": "the section api, and the tokens that it names",
    "spec/test_docs": "documents of the job file and the config",
    "store/test_inprocess": "the server of tests/inprocess",
}
"""Unit tests whose file is about no single module, and what it is about. ``test_MODULE_ASPECT`` is about one."""


def mirrored(file: Path) -> Path:
    """The folder of nodeagent that a unit test's folder stands for."""
    return PACKAGE / file.parent.relative_to(UNIT)


def names_a_module(file: Path) -> bool:
    """Whether the name is that of a module or package in its folder of nodeagent, or begins with one."""
    words = file.stem.split("_")[1:]
    names = [mirrored(file) / "_".join(words[:count]) for count in range(1, len(words) + 1)]
    return any(name.with_suffix(".py").exists() or name.is_dir() for name in names)


def test_unit_tests_mirror_the_tree() -> None:
    files = [file for file in sorted(UNIT.rglob("*/test_*.py")) if mirrored(file).is_dir()]
    assert len(files) > 150
    lost = {str(file.relative_to(UNIT).with_suffix("")) for file in files if not names_a_module(file)}
    assert lost == set(ABOUT_SEVERAL), "name it after its module, or say here what it is about"


def test_no_path_of_the_machine_that_runs_this_is_left_in_the_repository() -> None:
    places = {f"{ROOT}/", f"{sys.prefix}/"}
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in SKIPPED]
        for file in (Path(folder) / name for name in files if name not in SKIPPED):  # .git is a file in a worktree
            if file.suffix in TEXT and file.is_file():
                text = file.read_bytes().decode(errors="replace")
                if any(place in text for place in places):
                    found.append(named(file))
    assert not found
