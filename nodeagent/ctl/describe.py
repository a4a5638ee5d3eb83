"""``describe``: the state of a job or node, and the reasons. This module writes a node's text; ``jobtext.py`` a
job's."""

from __future__ import annotations

from typing import Any

import click

from nodeagent.ctl.client import Client, job_path, node_path
from nodeagent.ctl.jobtext import field, folded, job_lines
from nodeagent.ctl.options import (
    NODE,
    agent_option,
    complete_jobs,
    complete_nodes,
    connect,
    job_option,
    output_option,
    which_job,
)
from nodeagent.ctl.output import Column, coloured, dump, notice, paint, span, table_lines, terminal_width
from nodeagent.ctl.terminal import CtlError, Exit, echo

Json = dict[str, Any]

GPUS = (
    Column("GPU", lambda g: g["index"]),
    Column("NAME", lambda g: g["name"]),
    Column("UUID", lambda g: g["uuid"]),
    Column("HEALTH", lambda g: "healthy" if g["healthy"] else f"left out: {g['why']}", text=True),
    Column("JOB", lambda g: g["job"]),
)
PODS = (
    Column("JOB", lambda p: p["job"]),
    Column("ROLE", lambda p: p["role"]),
    Column("GENERATION", lambda p: p["generation"]),
    Column("RANKS", lambda p: ",".join(str(r) for r in p["ranks"])),
    Column("STATE", lambda p: "stopping" if p["stopping"] else "in the gang"),
)

NEXT = {
    "ready": "nothing is wrong",
    "restarting": "start its agent again (systemctl start nodeagent); "
    "if it will not be back: nodeagentctl drain {name} --reason TEXT",
    "repairing": "nothing: nodeagent repairs it; in your own hands instead: nodeagentctl cordon {name} --reason TEXT",
    "cordoned": "let it take work again: nodeagentctl uncordon {name}",
    "draining": "wait until no pod is left; then work on it, and: nodeagentctl uncordon {name}",
    "drained": "work on it; then let it take work again: nodeagentctl uncordon {name}",
    "leaving": "nothing: its work moves to other nodes; when it is gone for good: nodeagentctl forget {name}",
    "maintenance": "nothing: it takes work again when the window is over; sooner: nodeagentctl reserve delete ID",
    "mute": "see whether its agent runs there, and why the store does not answer it: systemctl status nodeagent, "
    "journalctl -u nodeagent",
    "silent": "see whether the machine and its agent run (systemctl status nodeagent) and reach the store; "
    "permanently down, and a job waits for it: nodeagentctl forget {name}",
    "lost": "start its agent again (systemctl restart nodeagent): it joins with a new life; "
    "permanently down, remove its record: nodeagentctl forget {name}",
    "left": "start its agent to bring it back: systemctl start nodeagent; "
    "for good, remove its record: nodeagentctl forget {name}",
}


AWAY = ("mute", "silent", "lost", "left")
"""States of a node whose agent nobody hears: its pid and age are those of one that may have ended."""


def _process(node: Json) -> str:
    return f", pid {node['agent_pid']}, up {span(node['agent_age'])}"


def _verdict(verdict: Json) -> list[str]:
    """The fault, its rule, the value that triggered the rule, and the next action."""
    device = (
        "node" if not verdict["device"] else f"GPU {verdict['device'] if verdict['gpu'] is None else verdict['gpu']}"
    )
    severity = verdict["severity"] + (" (dry run)" if verdict["dry_run"] else "")
    stage = verdict["stage"] + ("" if verdict["left"] is None else f" for another {span(verdict['left'])}")
    return [
        f"  {device}: {severity}: {verdict['text']}",
        f"    rule {verdict['rule']}, {stage}, {span(verdict['age'])} old, action {verdict['action']}",
        *([f"    read: {verdict['raw']}"] if verdict["raw"] else []),
        f"    next: {verdict['next']}",
    ]


def node_lines(node: Json, colour: bool = False, width: int | None = None) -> list[str]:
    """Everything of use about one node, folded to a ``width``."""
    life, inner = node["incarnation"], None if width is None else width - 2
    lines = [
        field("Node", node["name"]),
        field("State", paint(node["state"], colour)),
        field("Why", node["reason"] or "-"),
        field("Address", f"{node['address']} (host {node['hostname']})"),
        field("Agent", f"version {node['version']}{'' if node['state'] in AWAY else _process(node)}"),
        field("Life", f"{life['life']}, start {life['start']}"),
        field("CPU slots", f"{node['cpu_slots']}, {node['cpu_slots_used']} taken"),
        field("Labels", ", ".join(f"{k}={v}" for k, v in sorted(node["labels"].items())) or "-"),
    ]
    if node["restarting_for"] is not None:
        lines.append(field("Restarting", f"for {span(node['restarting_for'])}"))
    if node["http"]:
        lines.append(field("Page", f"{node['http']}/ (from that machine)"))
        lines.append(field("Health", f"{node['http']}/healthz (from that machine)"))
    if node["https"]:
        lines.append(field("API", f"{node['https']} (certificate {node['fingerprint']})"))
    if node["gpus"]:
        lines += ["", "GPUs:", *("  " + line for line in table_lines(GPUS, node["gpus"], inner))]
    if node["verdicts"]:
        lines += ["", "Verdicts:", *(line for verdict in node["verdicts"] for line in _verdict(verdict))]
    if node["repair"]:
        lines.append("  " + field("Repair", node["repair"]))
    if node["breaker"]:
        lines.append("  " + field("Breaker", node["breaker"]))
    lines += ["", "Pods:"]
    lines += ["  " + line for line in table_lines(PODS, node["pods"], inner)] if node["pods"] else ["  none"]
    unfit = [f"  {uid}: {r['reason']}" for uid, r in sorted(node["readiness"].items()) if r["state"] == "unfit"]
    if unfit:
        lines += ["", "Cannot run:", *unfit]
    held = node["held"]
    if held:
        names = {gpu["uuid"]: f"GPU {gpu['index']}" for gpu in node["gpus"]}
        lines += ["", "Held by processes that do not end, and given to nobody:"]
        lines += [f"  {', '.join(names.get(d, d) for d in one['devices'])}: job {one['job']}" for one in held]
    setbacks = node.get("setbacks", ())  # items of a list of nodes have neither this field nor the next one
    if setbacks:
        lines += ["", "Left out:"]
        lines += [f"  by job {one['job']}: it {one['text']}; tried again in {span(one['left'])}" for one in setbacks]
    cut_off = node.get("unreachable", ())
    if cut_off:
        lines += ["", "Cut off:", *(f"  {text}" for text in cut_off)]
    step = NEXT[node["state"]].format(name=node["name"])
    if node.get("store_away_since") is not None:
        step = (
            "get the store to answer the agent that was asked (nodeagentctl doctor): until then what it shows of this "
            "node may be old"
        )
    elif node["state"] == "ready" and held:
        step = (
            f"on {node['hostname']}: see what the processes wait for (ps -eo pid,stat,wchan:30,cmd | grep ' D'); if "
            f"that lasts: nodeagentctl drain {node['name']} --reason TEXT, then reboot it"
        )
    elif node["state"] == "ready" and node["condition"]:
        step = "see what each verdict says"
    elif node["state"] == "ready" and cut_off:
        step = "look at the network between these nodes (nodeagentctl doctor --peers): workers may wait for each other"
    elif node["state"] == "ready" and unfit:
        step = "correct what Cannot run says; the checks are made again by themselves"
    elif node["state"] == "ready" and setbacks:
        first = min(setbacks, key=lambda one: one["left"])
        step = (
            f"nothing: job {first['job']} tries this node again in {span(first['left'])}; what went wrong: "
            f"nodeagentctl describe job/{first['job']}"
        )
    return folded([*lines, "", field("Next", step)], width)


def _complete_both(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [*complete_jobs(ctx, param, incomplete), *complete_nodes(ctx, param, incomplete)]


@click.command(short_help="Show what a job or node does, and why.")
@click.argument("name", required=False, metavar="[JOB|NODE]", shell_complete=_complete_both)
@job_option
@output_option
@agent_option
@click.pass_context
def describe(ctx: click.Context, name: str | None, job_named: str | None, fmt: str) -> None:
    """Show the state of JOB or NODE and the reason, what it waits for, what failed and which worker caused it, what
    each fault cost, and what to do next. Write `job/NAME` or `node/NAME` if a job and a node have the same name.
    """
    client = connect(ctx)
    kind, found = _find(client, name, job_named)
    notice(found, fmt)
    if fmt in ("json", "yaml"):
        dump(found, fmt)
        return
    if fmt == "name":
        echo(f"{kind}/{found['name']}")
        return
    render = job_lines if kind == "job" else node_lines
    echo("\n".join(render(found, coloured(), terminal_width())))


def _find(client: Client, name: str | None, job_named: str | None) -> tuple[str, Json]:
    if name and name.startswith("node/"):
        return "node", client.get(node_path(NODE.convert(name, None, None)))
    if not name or job_named or name.startswith("job/"):
        return "job", client.get(job_path(which_job(client, (name or "").removeprefix("job/"), job_named)))
    try:
        return "job", client.get(job_path(name))
    except CtlError as no_job:
        if no_job.code != Exit.NOT_FOUND and no_job.kind != "store_away":  # it may be a job of the history, or a node
            raise
        try:
            return "node", client.get(node_path(name))
        except CtlError as no_node:
            if no_node.code != Exit.NOT_FOUND:
                raise
            if no_job.code != Exit.NOT_FOUND:
                raise no_job from None
            if "is an array" in no_job.message:
                raise no_job from None
            hints = [e.next_step for e in (no_job, no_node) if "did you mean" in e.next_step]
            raise CtlError(
                f"no job and no node {name!r}",
                Exit.NOT_FOUND,
                " or ".join(hints) or "list them: nodeagentctl get, nodeagentctl nodes",
            ) from None
