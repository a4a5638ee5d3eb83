"""The documents say what the code does: links lead somewhere, drawings are current, commands and keys exist."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import get_args

import click
import pytest

from docs.generate import BLOCKS, PAGES, PROTOCOL, drawn
from docs.generate import timing as inequalities
from docs.packages import lines, near
from nodeagent.agent.main import main as nodeagent
from nodeagent.ctl.main import cli
from nodeagent.ctl.run import as_torchrun
from nodeagent.model.timing import Timing
from nodeagent.model.world import CauseKind
from nodeagent.plan.failure.budget import COUNTS
from nodeagent.plan.failure.policies import EVENTS
from nodeagent.plan.steps import TRANSITIONS
from nodeagent.spec.agentconfig import AgentConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "docs/adr", "docs/runbooks", "examples", "examples/*", "ansible", ".")
DOCUMENTS = sorted({p for f in FOLDERS for p in ROOT.glob(f"{f}/*.md")})
ADRS = sorted((ROOT / "docs/adr").glob("0*.md"))
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
TEXT = PROTOCOL.read_text()
SCRIPTS = ROOT / "nodeagent/store/scripts"
TOOLS: dict[str, click.Command] = {"nodeagentctl": cli, "nodeagent-run": as_torchrun, "nodeagent": nodeagent}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- links


def _without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE)


def _anchors(path: Path) -> set[str]:
    """As the forges make them of headings."""
    generations = re.findall(r"^#+ (.+)$", _without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in generations}


def _links(path: Path) -> list[str]:
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", _without_code(path.read_text()))


def test_links_lead_somewhere() -> None:
    broken = []
    for path in DOCUMENTS:
        for link in _links(path):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append((_name(path), link))
    assert not broken


def test_documents_are_found() -> None:
    assert {"README.md", "docs/protocol.md", "docs/architecture.md"} <= {_name(p) for p in DOCUMENTS}
    assert sum(len(_links(p)) for p in DOCUMENTS) > 30


# --- commands


def _spoken(text: str) -> Iterator[list[str]]:
    """Every command line of one of our tools in code blocks and code spans: words up to a bare ``--`` or a script."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL) + re.findall(
        r"(?:^ {4,}.*\n)+", text, re.MULTILINE
    )
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        found = re.match(r"\s*(?:\$ |# )?(?:/\S*/)?(nodeagentctl|nodeagent-run|nodeagent) (\S.*)", line)
        if found is None:
            continue
        words = shlex.split(found[2].replace("...", ""), comments=True)
        words = [word.strip("[]").partition("|")[0] for word in words]
        ends = (at for at, word in enumerate(words) if word == "--" or word.endswith(".py"))
        yield [found[1], *words[: next(ends, None)]]


def _wrong(words: list[str]) -> str:
    """What of this command line the tool does not know, or misses; empty if it would run. Of a command that is only
    named nothing is missed."""
    command, given = TOOLS[words[0]], False
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
    for word in words[1:]:
        if isinstance(command, click.Group) and re.fullmatch(r"[a-z][-a-z]*", word):
            inner = command.get_command(click.Context(command), word)
            if inner is None:
                return word
            command = inner
            options |= {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
            continue
        given = True
        if word.startswith("-") and word != "-" and word.partition("=")[0] not in options:
            return word
    needed = [p.opts for p in command.params if isinstance(p, click.Option) and p.required]
    return next((opts[0] for opts in needed if given and not set(opts) & set(words)), "")


def test_commands_exist() -> None:
    assert not [
        (_name(path), words, bad) for path in DOCUMENTS for words in _spoken(path.read_text()) if (bad := _wrong(words))
    ]


def test_commands_are_found() -> None:
    spoken = list(_spoken(README))
    assert {words[1] for words in spoken if words[0] == "nodeagentctl"} >= {"run", "nodes", "doctor", "local"}
    assert _wrong(["nodeagentctl", "runn"]) and _wrong(["nodeagentctl", "run", "--lokal", "2"])
    assert _wrong(["nodeagentctl", "drain", "n1"]) == "--reason"
    assert not _wrong(["nodeagentctl", "drain"])


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for p in DOCUMENTS for t in re.findall(r"(?:`| {4})make ([a-z-]+)", p.read_text())}
    assert {"demo", "test"} <= named <= targets


def test_the_makes_help_has_each_target_of_its_head() -> None:
    head = (ROOT / "Makefile").read_text().partition("\n\n")[0]
    named = re.findall(r"^# {5}make ([a-z-]+)", head, re.MULTILINE)
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert len(named) > 10
    assert re.findall(r"^make ([a-z-]+)", shown, re.MULTILINE) == named


def test_no_shell_takes_a_shown_command_apart() -> None:
    """zsh refuses a name with ranges that is not in quotes, and of a list every shell makes two words."""
    texts = {_name(path): path.read_text() for path in DOCUMENTS} | {"help": _helps(cli)}
    bare = re.compile(r"(?:reserve nodes|for a time:|queue create|queue set|such as).*?[ `]\w+(?:\[\d|=\[).*")
    assert bare.search("reserve nodes n[1-8] from") and bare.search("queue set a users=[carl]")
    assert not [(name, found[0]) for name, text in texts.items() for found in bare.finditer(text)]


def _helps(command: click.Command) -> str:
    """The help of this command and of all below it, each on one line."""
    text = " ".join((command.help or "").split()) + "\n"
    if isinstance(command, click.Group):
        context = click.Context(command)
        inner = (command.get_command(context, name) for name in command.list_commands(context))
        text += "".join(_helps(one) for one in inner if one is not None)
    return text


def test_files_of_the_code_map_exist() -> None:
    code_map = ARCHITECTURE[ARCHITECTURE.index("## Code map") : ARCHITECTURE.index("## What survives what")]
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|lua))`", code_map))
    assert len(named) > 40
    assert not [name for name in sorted(named) if not (ROOT / "nodeagent" / name).exists()]


def test_the_code_map_counts_its_files() -> None:
    parts = ARCHITECTURE[ARCHITECTURE.index("## Code map") : ARCHITECTURE.index("## What survives what")].split("\n**")
    killed, scaled = (
        len(set(re.findall(r"`((?:[a-z_]+/)?[a-z_/]+\.(?:py|lua))`", part.partition("| as above")[0])))
        for part in parts[1:3]
    )
    assert f"These are {killed} files; `scale` passes {scaled} others" in parts[1]


# --- the protocol


def test_drawn_parts_are_current() -> None:
    old = [_name(page) for page in PAGES if drawn(page, text := page.read_text()) != text]
    assert not old, "run: python -m docs.generate"


def test_a_document_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="no markers of the block 'phases'"):
        drawn(PROTOCOL, "# nothing to draw in")


def test_the_diagram_is_the_table() -> None:
    for (before, step), after in TRANSITIONS.items():
        assert f"    {before} --> {after}: {step}\n" in BLOCKS["phases"]()


def _table(text: str, first: str) -> list[list[str]]:
    """Rows of the table whose head begins with this cell; a | inside of code does not part cells."""
    lines = text[text.index(f"| {first} |") :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_keys_are_the_scripts() -> None:
    source = "\n".join(p.read_text() for p in SCRIPTS.glob("*.lua"))
    used = {key.rstrip(":") for key in re.findall(r"P \.\. '([a-z:]+)'", source)}
    reported = {row[0].strip("`").partition("<")[0].rstrip(":") for row in _table(TEXT, "key")}
    assert reported == used


def test_the_steps_are_the_scripts() -> None:
    assert {row[0].strip("`") for row in _table(TEXT, "step | who")} == {
        p.stem for p in SCRIPTS.glob("*.lua") if not p.name.startswith("_")
    }


def test_the_causes_are_the_codes() -> None:
    reported = {}
    for kinds, _seen, counts, event in _table(TEXT, "kind | what was seen"):
        for kind in re.findall(r"`(\w+)`", kinds):
            reported[kind] = (counts.startswith("yes"), event)
    assert set(reported) == set(get_args(CauseKind))
    assert {kind for kind, (counts, _) in reported.items() if counts} == COUNTS
    assert {kind: event for kind, (_, event) in reported.items() if event != "-"} == EVENTS


def test_the_numbers_are_the_defaults() -> None:
    t, ports = Timing(), AgentConfig().ports
    assert t.problems() == []
    for text in (README, TEXT, ARCHITECTURE):
        assert f"{t.fence:g} s" in text
        assert f"{AgentConfig().without_agent:g} s" in text
    assert f"fence x 1.02 + credit + kill <= lease | {t.fence * 1.02 + t.credit + t.kill:.3f} <= {t.lease:g}" in TEXT
    for text in (README, ARCHITECTURE):
        assert "{}-{}".format(*ports.rendezvous) in text
        assert f"127.0.0.1:{ports.api}" in text


def test_the_config_names_each_inequality_of_the_timing() -> None:
    rows = _table(inequalities(), "inequality")
    text = (ROOT / "docs/config.md").read_text()
    assert len(rows) == 6
    assert not [inequality for inequality, *_ in rows if f"`{inequality}`" not in text]


@pytest.mark.parametrize(
    ("phase", "row"),
    [
        ("worker_killed", "a worker is killed"),
        ("node_killed", "a node is killed"),
        ("node_joins", "a third node joins"),
    ],
)
def test_the_figures_of_the_readme_are_those_that_were_measured(phase: str, row: str) -> None:
    measured = json.loads((ROOT / "benchmarks/results.json").read_text())[phase]
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    reported = [re.findall(r"[0-9.]+", cell)[0] for cell in line.split("|")[2:5]]
    ours, theirs = (statistics.median(measured[launcher]) for launcher in ("nodeagent", "torchrun"))
    for text, value in zip(reported, (ours, theirs, theirs / ours), strict=True):
        assert float(text) == round(value, len(text.partition(".")[2])), (row, text, value)


# --- decisions


def test_decisions_are_short_and_whole() -> None:
    odd = []
    for path in ADRS:
        lines = path.read_text().splitlines()
        numbered = lines[0].startswith(f"# {int(path.name[:4])}. ")
        headings = [line for line in lines if line.startswith("## ")] == ["## Context", "## Choice", "## Consequences"]
        if not (numbered and headings and 15 <= len(lines) <= 40):
            odd.append((_name(path), lines[0], f"{len(lines)} lines"))
    assert not odd


def test_the_index_of_decisions_names_each_and_strikes_what_was_replaced() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    for path in ADRS:
        replaced = re.search(r"^Replaced by \[ADR \d+\]", path.read_text(), re.MULTILINE) is not None
        number = f"[{int(path.name[:4])}]({path.name})"
        assert index.count(number) == 1, path.name
        assert (f"~~{number}" in index) == replaced, path.name


def test_decisions_are_numbered_without_holes() -> None:
    numbers = [int(p.name[:4]) for p in ADRS]
    assert numbers[0] == 1
    assert all(after == before + 1 for before, after in pairwise(numbers))


# --- the lines


def test_lines_are_near_within_rounding_and_no_further() -> None:
    row = "| `plan` | 44 | 9,550 |"
    assert near(row, "| `plan` | 44 | 10,400 |") and near(row, "| `plan` | 45 | 9,550 |")
    assert not near(row, "| `plan` | 44 | 10,800 |")
    assert not near(row, "| `pods` | 44 | 9,550 |")


def test_each_line_is_of_one_kind() -> None:
    """Of all packages: what the table says adds up."""
    for row in lines().splitlines()[2:]:
        _, _, every, *kinds = (cell.strip().replace(",", "") for cell in row.strip("|").split("|"))
        assert int(every) == sum(map(int, kinds)), row
