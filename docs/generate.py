"""Writes the parts of the documents that are drawn from the code, between their markers: `python -m docs.generate`.

Owns the markers and the drawing; must never write anything outside of a block. tests/unit/test_documents.py says when
a block is out of date.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import get_args

from docs.packages import ARCHITECTURE, house, lines, near, picture
from nodeagent.agent.gauges import (
    GPU_STATES,
    MAX_JOBS,
    MAX_ROLES,
    NODE_STATES,
    PLACE_STATES,
    REPAIRING,
    MetricsPage,
)
from nodeagent.agent.metrics import MAX_SERIES, Metrics
from nodeagent.agent.undecided import Guarded
from nodeagent.ctl.torchline import FLAGS
from nodeagent.hardware.judging.judge import rules
from nodeagent.model.health import Kind, Severity
from nodeagent.model.job import TERMINAL, Phase
from nodeagent.model.pod import PodPhase
from nodeagent.model.timing import RELEASE, Timing
from nodeagent.model.world import CauseKind
from nodeagent.plan.cluster import RefusalKind
from nodeagent.plan.steps import GENERATION, GENERATION_MEANING, MEANING, POD, POD_MEANING, TRANSITIONS, diagram

PROTOCOL = Path(__file__).with_name("protocol.md")
METRICS = Path(__file__).with_name("metrics.md")
HEALTH = Path(__file__).with_name("health.md")
TORCHRUN = Path(__file__).with_name("torchrun.md")
CLI = Path(__file__).with_name("cli.md")
FRAMEWORKS = Path(__file__).with_name("frameworks.md")
MEASURED = Path(__file__).parent.parent / "benchmarks" / "frameworks.json"
EXAMPLES = ("paddle", "hf_trainer", "lightning", "fsdp2", "jax", "tensorflow", "mindspore")
"""Those whose recovery `python -m benchmarks.frameworks` measures."""


def phases() -> str:
    """The job's phases as a Mermaid diagram, and the table of the steps between them."""
    rows = ["| step | taken when | from |", "|---|---|---|"]
    for step, meaning in MEANING.items():
        before = ", ".join(phase for phase, taken in TRANSITIONS if taken == step)
        rows.append(f"| {step} | {meaning} | {before} |")
    return "\n".join(["```mermaid", diagram(TRANSITIONS, "queued", sorted(TERMINAL)), "```", "", *rows])


def lifecycles() -> str:
    """A generation and a pod as Mermaid diagrams, with what each step means."""
    lines = [
        "A generation:",
        "",
        "```mermaid",
        diagram(GENERATION, "forming", ["ended"]),
        "```",
        "",
        "| step | taken when |",
        "|---|---|",
    ]
    lines += [f"| {step} | {meaning} |" for step, meaning in GENERATION_MEANING.items()]
    lines += ["", "A node's pod of a job:", "", "```mermaid", diagram(POD, "empty"), "```", ""]
    lines += [
        "| step | taken when |",
        "|---|---|",
        *(f"| {step} | {meaning} |" for step, meaning in POD_MEANING.items()),
    ]
    return "\n".join(lines)


def timing() -> str:
    """The inequalities with the default values worked out. Raises ValueError if one does not hold."""
    t = Timing()
    if problems := t.problems():
        raise ValueError("; ".join(problems))
    gone = t.fence * 1.02 + t.credit + t.kill
    slow = t.heartbeat + 2 * t.store_timeout
    latest = (t.failsafe_limit + t.fence) * 1.02 + t.kill
    rows = [
        ("fence x 1.02 + credit + kill <= lease", f"{gone:.3f} <= {t.lease:g}", "a node's workers are gone before its "
         "lease is seen to have lapsed"),
        ("heartbeat + 2 x store_timeout < fence", f"{slow:g} < {t.fence:g}", "one reply that never comes stops nobody"),
        ("heartbeat <= credit < gap", f"{t.heartbeat:g} <= {t.credit:g} < {t.gap:g}", "a silent node does lapse; a "
         "pause of the store counts as the store's, not as the nodes'"),
        ("fence x 1.02 + kill <= promise", f"{t.fence * 1.02 + t.kill:.3f} <= {t.promise:g}", "workers on failsafe "
         "time are gone before a failsafe member that gave it lets go"),
        (f"(failsafe_limit + fence) x 1.02 + kill <= failsafe_limit x {RELEASE:g} + lease", f"{latest:.0f} <= "
         f"{t.failsafe_limit * RELEASE + t.lease:.0f}", "a failsafe member is given up only when nothing runs on its "
         "time any more"),
        ("heartbeat <= failsafe <= fence - 2 x heartbeat", f"{t.heartbeat:g} <= {t.failsafe:g} <= "
         f"{t.fence - 2 * t.heartbeat:g}", "one missed renewal asks nobody; the failsafe members are asked at least "
         "twice before the fence acts"),
    ]  # fmt: skip
    return "\n".join(
        ["| inequality | seconds | so that |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def words(kinds: object) -> str:
    """The fixed words of a Literal, or of a tuple."""
    return ", ".join(f"`{word}`" for word in (kinds if isinstance(kinds, tuple) else get_args(kinds)))


LABELS: dict[str, str] = {
    "job": f"name of a job with a record; gauges have the {MAX_JOBS} oldest live jobs only",
    "node": "id of a node with a record; of a restart the one at fault, empty where none is",
    "version": "the agent's own version: one series",
    "state": f"of nodes: {words(NODE_STATES)}; of GPUs: {words(GPU_STATES)}; of places: {words(PLACE_STATES)}",
    "role": f"name of a role of a job of several roles; the first {MAX_ROLES} of a job only",
    "cause": f"{words(CauseKind)} ([what they mean](protocol.md#faults-and-blame))",
    "reason": f"{words(RefusalKind)} ([what they mean](protocol.md#signatures))",
    "gpu": "UUID of a GPU of this node; empty for the node itself",
    "rule": "id of a [rule](health.md) that is in force",
    "severity": words(Severity),
    "kind": f"{words(Kind)}, `verify`",
    "outcome": "`done` (it helped, as far as that was verified), `failed`, `interrupted` (its end was not seen)",
    "stage": words(REPAIRING),
    "xid": "code of an Xid that a GPU of this node reported",
    "class": "of the node: `spot` if it may be taken away, else `regular`",
    "decision": words(Guarded),
    "device": "`gpu`, `slot`",
    "queue": "name of a queue; of counters `others`, as `user` says",
    "user": f"who submitted the job; with its queue `others` in combinations of device, queue and user that this node "
    f"met after {MAX_SERIES} others",
    "phase": f"of jobs: {words(Phase)}; of pods: {words(PodPhase)}; "
    "of recoveries: [these](architecture.md#what-a-recovery-is-made-of)",
}
"""Label to the values that it can have, and so how many series there are."""

UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_info": "always 1", "_joined": "0 or 1",
         "_seconds_total": "seconds", "_generation_cause": "a number that grows", "_celsius": "degrees Celsius",
         "_step": "steps",
         "_goodput": "part of 1",
         "_generation": "a number that grows"}  # fmt: skip
"""How a name ends, and what is measured; all others count."""


def metrics() -> str:
    """Every metric of an agent."""
    rows = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for family in MetricsPage(Metrics()).families():
        unit = next((unit for end, unit in UNITS.items() if family.name.endswith(end)), "count")
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {unit} | {family.meaning} |")
    return "\n".join(rows)


def labels() -> str:
    """What each label can be. Raises KeyError for one that nobody has bounded."""
    used = dict.fromkeys(label for family in MetricsPage(Metrics()).families() for label in family.labels)
    return "\n".join(["| label | values |", "|---|---|", *(f"| `{name}` | {LABELS[name]} |" for name in sorted(used))])


def health_rules() -> str:
    """The rules on sick hardware; Xids that mean the same share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for rule in rules():
        after = f"{rule.after:g} s" if rule.after else f"{rule.times} times" if rule.times else "-"
        after += f" in {rule.window / 3600:g} h" if rule.window else ""
        rows.setdefault((rule.text, rule.severity, rule.action, rule.heals, after, rule.source), []).append(rule.id)
    lines = [
        "| rule | fires when | severity | repair | heals by | holds for | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for (text, severity, action, heals, after, source), ids in rows.items():
        names = ", ".join(f"`{name}`" for name in ids)
        cells = (names, text, severity, action.replace("_", " "), heals, after, source)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def torchrun_flags() -> str:
    """torchrun's options, and what they mean here."""
    rows = ["| option | torchrun | here |", "|---|---|---|"]
    for flag in FLAGS:
        names = f"`{flag.short}`, " if flag.short else ""
        names += f"`{flag.name} {flag.value}`".replace("|", "\\|") if flag.value else f"`{flag.name}`"
        rows.append(f"| {names} | {flag.there} | {flag.here if flag.needed else f'not needed: {flag.here}'} |")
    return "\n".join(rows)


def torchrun_names() -> str:
    """Their names alone, in lines that can be read."""
    names = [f"`{word}`" for flag in FLAGS for word in (flag.name, flag.short) if word]
    return fill(", ".join(names) + ".", 120, break_long_words=False, break_on_hyphens=False)


def packages() -> str:
    """Which package imports which, as a Mermaid flowchart."""
    return "\n".join(["```mermaid", picture(), "```"])


def recovery(example: str) -> str:
    """What a killed worker costs in an example, here and under its framework's own launcher."""
    found = json.loads(MEASURED.read_text()).get(example)
    if found is None:
        return "Not measured yet."
    seconds = found["seconds"]
    generations = {
        "preload": "as in its job file",
        "guess": f"what `submit` guesses ({', '.join(f'`{name}`' for name in found['guessed']) or 'nothing'})",
        "none": "nothing preloaded",
        "launcher": f"`{found['launcher']}` {found['version']}" if found["launcher"] else "its own launcher",
    }
    cells = {name: _spread(seconds[name]) for name in generations if seconds.get(name)}
    if "launcher" not in cells:
        cells["launcher"] = found["instead"] or "has none that starts workers again"
    return "\n".join(
        [
            f"| {' | '.join(generations.values())} |",
            "|---" * len(generations) + "|",
            f"| {' | '.join(cells[name] for name in generations)} |",
            "",
            f"(Seconds from `kill -9` to the first step: median, least to most of {len(seconds['preload'])}; "
            f"{found['date']}, load average {found['load']}.)",
        ]
    )


def _spread(seconds: list[float]) -> str:
    return f"**{statistics.median(seconds):.1f}** ({min(seconds):.1f} to {max(seconds):.1f})"


Blocks = dict[str, Callable[[], str]]
BLOCKS: Blocks = {"phases": phases, "lifecycles": lifecycles, "timing": timing}
"""Those of the protocol."""
PAGES: dict[Path, Blocks] = {
    ARCHITECTURE: {"packages": packages, "lines": lines, "house": house},
    PROTOCOL: BLOCKS,
    METRICS: {"metrics": metrics, "labels": labels},
    HEALTH: {"rules": health_rules},
    TORCHRUN: {"flags": torchrun_flags},
    CLI: {"torchrun": torchrun_names},
    FRAMEWORKS: {f"recovery of {example}": partial(recovery, example) for example in EXAMPLES},
}


def drawn(page: Path, text: str, *, exact: bool = False) -> str:
    """The document with every block drawn anew, but those of lines where they are still right within rounding, unless
    they are to be ``exact``. Raises ValueError when the markers of a block are not there."""
    for name, draw in PAGES[page].items():
        begin, end = f"<!-- {name}: drawn by docs/generate.py -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        old, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{page.name} has no markers of the block {name!r}: {begin.strip()} and {end.strip()}")
        new = draw() + "\n"
        is_right = not exact and name in ("lines", "house") and near(old, new)
        text = before + begin + (old if is_right else new) + end + after
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(drawn(page, page.read_text(), exact=True))
