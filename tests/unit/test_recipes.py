"""The recipes of CONTRIBUTING.md lead somewhere: their files are there, and who follows them in a copy of the tree gets
what they promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEW = "praise"
"""What NAME stands for here."""
PARTS = ("nodeagent", "docs", "config", "tests/unit", "tests/contract", "tests/inprocess")
"""Of the tree, beside single files: what the tests of a recipe need."""


@dataclass(frozen=True)
class Place:
    """A file that a recipe names, and what is to be found in it."""

    file: str
    anchors: tuple[str, ...]
    new: bool
    """The recipe makes it."""
    optional: bool
    """Its step begins with "If"."""


def recipes() -> dict[str, list[Place]]:
    found = {}
    for text in re.split(r"^### Recipe: ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)[1:]:
        name, _, body = text.partition("\n")
        steps = re.findall(r"^\d+\. (.*?)(?=^\d+\. |\n\n|\Z)", body.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
        found[name] = [place for step in steps for place in _places(" ".join(step.split()))]
    return found


def _places(step: str) -> list[Place]:
    """A name in backticks is a file if it has a folder and an ending; what follows it is in that file."""
    optional = step.startswith("If ")
    words = re.findall(r"`([^`]+)`", step.partition(": ")[2] if optional else step)
    files: list[tuple[str, list[str]]] = []
    for word in words:
        if re.fullmatch(r"[a-z]\w*/[\w/.-]+\.\w+", word):
            files.append((word, []))
        elif files:
            files[-1][1].append(word)
    return [Place(file, tuple(anchors), f"`{file}` (new)" in step, optional) for file, anchors in files]


RECIPES = recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_each_step_names_files_and_places_that_are_there(name: str) -> None:
    places = RECIPES[name]
    assert len(places) >= 3
    for place in places:
        file = ROOT / place.file
        if place.new:
            assert file.parent.is_dir() and "NAME" in place.file, place
        else:
            text = file.read_text()
            assert [anchor for anchor in place.anchors if anchor not in text] == [], place.file


# --- followed


@dataclass(frozen=True)
class Change:
    """One file as a recipe has it changed: the text goes in before what stands there once. A new file is the text."""

    file: str
    before: str
    text: str


CHANGES: dict[str, tuple[Change, ...]] = {
    "a field of a job": (
        Change("nodeagent/model/jobspec.py", "    submitter: Submitter\n\n", f'    {NEW}: str = ""\n'),
        Change(
            "nodeagent/spec/jobfile.py", "    ttl: Annotated[", f'    {NEW}: str = ""\n    """Praise."""\n'
        ),
        Change("nodeagent/spec/jobfile.py", "        ttl=written.ttl,\n", f"        {NEW}=written.{NEW},\n"),
        Change("docs/job-file.md", "| `ttl` |", f"| `{NEW}` | | a word for its authors |\n"),
        Change(
            "tests/unit/spec/test_jobfile.py", 'CONTRACT = """\n',
            f"def test_{NEW}() -> None:\n    assert job(LEAST + '{NEW}: well done').{NEW} == 'well done'\n\n\n",
        ),
    ),
    "a field of a record": (
        Change("nodeagent/model/job.py", "    restarts: int = 0\n", f"    {NEW}: int = 0\n"),
        Change("nodeagent/store/codec.py", '    "held", "rev",\n', f'    "{NEW}",\n'),
    ),
    "a store step": (
        Change(
            f"nodeagent/store/scripts/{NEW}.lua", "",
            f"-- {NEW}: node, text\nif not node_read(A.node) then return refuse('not_found', 'no such node') end\n"
            "event({ kind = 'NodePraised', node = A.node, text = A.text })\nreturn { 1 }\n",
        ),
        Change(
            "nodeagent/store/base.py", "    async def queues(self, expect_rev",
            f'    async def {NEW}(self, node: str, text: str) -> None:\n        """Event NodePraised."""\n\n',
        ),
        Change(
            "nodeagent/store/client.py", "    async def queues(self, expect_rev",
            f"    async def {NEW}(self, node: str, text: str) -> None:\n"
            f'        await self._calls.step("{NEW}", {{"node": node, "text": text}}, always)\n\n',
        ),
        Change("docs/protocol.md", "| `cordon` | an operator", f"| `{NEW}` | anybody | node known | an event |\n"),
        Change(
            "tests/contract/test_operators.py", "async def test_a_live_name_is_taken",
            f"async def test_{NEW}(bench: Bench) -> None:\n    await bench.up('n1')\n"
            f"    await bench.store.{NEW}('n1', 'well done')\n    assert (await bench.kinds())[-1] == 'NodePraised'\n"
            f"    await refused('not_found', bench.store.{NEW}('n2', ''))\n\n\n",
        ),
    ),
    "a health rule": (
        Change(
            "nodeagent/hardware/judging/rules.py", "    GpuRule(\n        Rule(\"memory.ecc_off\"",
            f'    GpuRule(\n        Rule("memory.{NEW}", "info", "none", "reading", "many desktops", "NVML"),\n'
            '        lambda g: _above(g.graphics, 10), lambda g: "many",\n    ),\n',
        ),
        Change(
            "tests/unit/hardware/judging/test_rules.py", '    ("memory.ecc_off"',
            f'    ("memory.{NEW}", gpu(graphics=11), gpu(graphics=10)),\n',
        ),
    ),
    "a metric": (
        Change(
            "nodeagent/agent/metrics.py", "        self.store_errors = Counter(\n",
            f'        self.{NEW} = Counter("nodeagent_{NEW}", "Words of praise.", registry=self.registry)\n',
        ),
        Change("tests/unit/api/test_metrics.py", "    metrics.store_errors.inc()\n", f"    metrics.{NEW}.inc()\n"),
        Change(
            "config/grafana/dashboards.py", '    Panel("Pods", "By phase',
            f'    Panel("Praise", "In words.", "timeseries", [(named("nodeagent_{NEW}_total"), "{{{{node}}}}")]),\n',
        ),
    ),
    "a command": (
        Change(
            f"nodeagent/ctl/{NEW}.py", "",
            f'"""``{NEW}``: a word for a node."""\n\nfrom __future__ import annotations\n\nimport click\n\n\n'
            f'@click.command(short_help="Praise a node.")\ndef {NEW}() -> None:\n    """Praise a node."""\n'
            '    click.echo("well done")\n',
        ),
        Change("nodeagent/ctl/main.py", '    "scale": ("scale"', f'    "{NEW}": ("{NEW}", "Praise a node."),\n'),
        Change("docs/cli.md", "### usage\n", f"### {NEW}\n\n    nodeagentctl {NEW}\n\nSays a word.\n\n"),
        Change("tests/unit/ctl/test_main.py", '"run submit validate', f'"{NEW} "\n        '),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_changed_is_what_the_recipe_names(name: str) -> None:
    """In its order, and nothing else."""
    named = [place.file.replace("NAME", NEW) for place in RECIPES[name]]
    needed = {p.file.replace("NAME", NEW) for p in RECIPES[name] if not p.optional} - OTHERWISE.get(name, set())
    changed = list(dict.fromkeys(change.file for change in CHANGES[name]))
    assert changed == [file for file in dict.fromkeys(named) if file in changed]
    assert needed <= set(changed)


OTHERWISE = {"a metric": {"nodeagent/agent/gauges.py"}, "a field of a record": {"nodeagent/model/world.py"}}
"""Files that a recipe names for another case than the one that is followed here."""


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which all recipes were followed."""
    copy = tmp_path_factory.mktemp("followed")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part)  # with what was compiled: it takes half of the time
    (copy / "benchmarks").mkdir()
    for file in (*ROOT.glob("*.*"), *(ROOT / "tests").glob("*.py"), ROOT / "benchmarks" / "frameworks.json"):
        if file.is_file():
            shutil.copy(file, copy / file.relative_to(ROOT))
    for change in (change for changes in CHANGES.values() for change in changes):
        file = copy / change.file
        old = file.read_text() if change.before else ""
        assert old.count(change.before) == 1, (change.file, change.before)
        file.write_text(old.replace(change.before, change.text + change.before))
    return copy


def run(copy: Path, *words: str) -> str:
    """A program of Python in the copy, and what it wrote; it must succeed."""
    environ = {**os.environ, "PYTHONPATH": str(copy)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, *words], cwd=copy, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def passes(copy: Path, *wanted: str) -> None:
    run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *wanted)


def test_a_health_rule_and_a_command_are_there_once_their_recipes_were_followed(followed: Path) -> None:
    command = "tests/unit/ctl/test_main.py"
    names = ("test_help_of_every_command", "test_every_command_and_option_is_in_the_reference")
    ids = [f"{command}::{name}[{NEW}]" for name in names]
    passes(
        followed,
        "tests/unit/hardware/judging/test_rules.py",
        f"{command}::test_the_contracts_commands_are_all_there",
        *ids,
    )


PROOFS = (
    "spec/test_docs.py::test_every_key_is_in_the_document",
    "spec/test_docs.py::test_every_field_of_a_job_can_be_written",
    "spec/test_schema.py::test_the_files_are_current",
    f"spec/test_jobfile.py::test_{NEW}",
    "store/test_codec.py",
    "ctl/test_main.py",
    "test_dashboards.py",
    "api/test_metrics.py::test_the_page",
    "api/test_metrics.py::test_the_document_says_what_a_live_page_says",
    "test_documents.py::test_the_steps_are_the_scripts",
)
"""Tests of the tree that hold what the recipes change to its documents, schemas and dashboards."""


@pytest.mark.slow
def test_every_recipe_leads_to_tests_that_pass(followed: Path) -> None:
    """With the commands that follow its steps."""
    for module in ("nodeagent.spec.schema", "docs.generate", "config.grafana.dashboards"):
        run(followed, "-m", module)
    assert f"memory.{NEW}" in (followed / "docs/health.md").read_text()
    assert f"nodeagent_{NEW}_total" in (followed / "docs/metrics.md").read_text()
    passes(followed, *(f"tests/unit/{one}" for one in PROOFS), f"tests/contract/test_operators.py::test_{NEW}[here]")
    code = "from nodeagent.store import codec; from tests.unit.plan.build import make_job; "
    code += f"job = make_job().model_copy(update={{'{NEW}': 7}}); flat = codec.encode_job(job); "
    code += f"print(codec.decode_job([x for p in flat.items() for x in p]).{NEW})"
    assert run(followed, "-c", code) == "7\n"
