"""Who imports whom: in one direction, as the table of packages says, and nothing that makes a program large or slow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from docs.packages import ARROWS, LATER, PLAN, circle, module_graph, package_graph

HEAVY = ("torch", "numpy")
PACKAGE = "nodeagent.hardware"
"""The one that may be left out."""


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("nodeagent.agent.serve", HEAVY),
        ("nodeagent.ctl.main", (*HEAVY, "aiohttp", "redis", "pydantic", "yaml")),
        ("nodeagent.spec.units", (*HEAVY, "aiohttp", "redis", "pydantic", "yaml")),
        ("nodeagent.lease.main", (*HEAVY, "asyncio", "redis", "pydantic")),
        ("nodeagent.shim.main", (*HEAVY, "redis", "aiohttp")),
        ("nodeagent.train", HEAVY),
        ("nodeagent.train.progress", HEAVY),
        ("nodeagent.train.writeout", HEAVY),
    ],
)
def test_nothing_heavy_is_imported(module: str, without: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set(sys.argv[1:])))"
    done = subprocess.run([sys.executable, "-c", code, *without], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# --- arrows


def test_no_modules_and_no_packages_import_each_other_in_a_circle() -> None:
    """When they are loaded. An import inside of a function may lead back: it runs when both are there."""
    graph = module_graph()
    assert circle(graph) == []
    assert circle(package_graph(graph)) == []
    insides = {f"nodeagent.{package}": package_graph(graph, f"nodeagent.{package}") for package in ARROWS}
    assert "failure" in insides["nodeagent.plan"]
    assert {package: found for package, inner in insides.items() if (found := circle(inner))} == {}


def test_no_modules_need_each_other_in_a_circle() -> None:
    """Not even for a type, or in a function: whoever reads one of them would have to read them all."""
    assert circle(module_graph(when="ever")) == []


def test_the_packages_of_plan_import_what_the_table_says() -> None:
    found = package_graph(module_graph(), "nodeagent.plan")
    assert found == {package: set(imported) for package, imported in PLAN.items()}


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (ARROWS, lambda: package_graph(module_graph())),
        (LATER, lambda: package_graph(module_graph(when="later"))),
    ],
    ids=["when loaded", "when needed"],
)
def test_packages_import_what_the_table_says(
    table: Mapping[str, tuple[str, ...]], found: Callable[[], dict[str, set[str]]]
) -> None:
    """A new arrow is a decision: it belongs into the table of docs/packages.py, and into docs/architecture.md."""
    beside = {} if table is ARROWS else ARROWS
    arrows = {package: imported.difference(beside.get(package, ())) for package, imported in found().items()}
    expected = {package: set(table.get(package, ())) for package in ARROWS}
    wrong = {p: (arrows[p] ^ expected[p]) for p in expected if arrows[p] != expected[p]}
    assert (set(arrows), wrong) == (set(ARROWS), {}), "these arrows stand in the table or in the code alone"


@pytest.mark.parametrize("table", [ARROWS, PLAN])
def test_the_table_stands_in_the_order_of_its_arrows(table: Mapping[str, tuple[str, ...]]) -> None:
    before: set[str] = set()
    for package, imported in table.items():
        assert before.issuperset(imported), package
        before.add(package)


A_PACKAGE = {
    "x/__init__.py": "",
    "x/one.py": "from a.y.two import f\n",
    "y/__init__.py": "",
    "y/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.x.one\n"
    "def f():\n    import a.x.one\n",
}


def written(folder: Path, more: Mapping[str, str]) -> Path:
    """The package ``a`` in this folder, made of these files."""
    for name, text in {**A_PACKAGE, **more}.items():
        file = folder / "a" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "a"


def test_what_only_a_type_checker_or_a_function_imports_makes_no_circle(tmp_path: Path) -> None:
    package = written(tmp_path, {})
    graph = module_graph(package)
    assert graph["a.x.one"] == {"a.y.two"}
    assert circle(graph) == circle(package_graph(graph)) == []
    assert package_graph(module_graph(package, "later"))["y"] == {"x"}


def test_what_only_a_type_checker_or_a_function_imports_is_needed_all_the_same(tmp_path: Path) -> None:
    for_types, in_a_function = A_PACKAGE["y/two.py"].split("def ")
    for number, text in enumerate((for_types, "def " + in_a_function)):
        graph = module_graph(written(tmp_path / str(number), {"y/two.py": text}), "ever")
        assert sorted(set(circle(graph))) == ["a.x.one", "a.y.two"]


def test_a_circle_is_found(tmp_path: Path) -> None:
    tried = "try:\n    from a.x import one\nexcept ImportError:\n    one = None\n"
    graph = module_graph(written(tmp_path / "packages", {"y/three.py": tried}))
    assert circle(graph) == []
    assert sorted(set(circle(package_graph(graph)))) == ["x", "y"]
    graph = module_graph(written(tmp_path / "modules", {"y/two.py": "import a.x.one\n"}))
    assert sorted(set(circle(graph))) == ["a.x.one", "a.y.two"]


# --- what is optional


def test_only_what_watches_the_hardware_loads_its_package() -> None:
    needing = {name for name, imported in module_graph().items() if any(PACKAGE in of for of in imported)}
    outside = {name for name in needing if PACKAGE not in name and not name.startswith("nodeagent.diag.")}
    assert outside == {"nodeagent.agent.health"}, "serve.py loads this one where the package is installed"


def test_without_the_hardware_package_every_program_loads() -> None:
    programs = (
        "agent.main",
        "agent.serve",
        "api.https",
        "ctl.run",
        "doctor.machine",
        "local.supervisor",
    )
    code = f"import sys; sys.modules[{PACKAGE!r}] = None; import " + ", ".join(f"nodeagent.{name}" for name in programs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
