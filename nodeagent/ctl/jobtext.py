"""A job in words, for ``describe`` and for the end of a failed ``run``. Pure: the agent's JSON in, lines out."""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections import Counter
from typing import Any

from nodeagent.ctl.client import ENDED
from nodeagent.ctl.output import Column, count, fold, hours, moment, of_devices, paint, part, size, span, table_lines
from nodeagent.ctl.terminal import one_line

Json = dict[str, Any]

DEFAULT_QUEUE = "default"
"""The queue that is not worth mentioning."""


def limits_text(limits: Json) -> str:
    """The values of ``limits`` in words."""
    submit = limits["submit"]
    named = [*submit["users"], *(f"group {group}" for group in submit["groups"])]
    return (
        f"{limits['jobs']} live jobs, {size(limits['job_bytes'])}B of job specs, "
        f"{limits['requests']} requests a second, {limits['concurrent']} at once, {limits['followers']} followers; "
        f"of a job: {_most(limits['nodes_per_job'])} nodes, {_most(limits['restarts_per_job'])} restarts an hour; "
        f"may submit: {', '.join(named) or 'everybody'}"
    )


def used_text(limits: Json) -> str:
    """How much of the limits a job's owner uses."""
    used, values = limits["used"], limits["values"]
    return (
        f"{limits['owner']} has {used['jobs']} of {values['jobs']} live jobs, {size(used['job_bytes'])}B of "
        f"{size(values['job_bytes'])}B of job specs; at {limits['node']} "
        f"{used['concurrent']} of {values['concurrent']} requests under way, "
        f"{used['followers']} of {values['followers']} followers"
    )


def _most(number: int | None) -> str:
    return "any number of" if number is None else f"at most {number}"


LAST_LINES = 20
"""Lines of a worker's error that are shown."""
MOST_WORKERS = 16
"""Workers that are listed; those that are not simply running come first."""
MOST_NAMES = 3
"""Jobs that are named if there may be many."""
TIMED = 3
"""The number of newest recoveries whose phases are shown."""


def exit_words(code: int | None) -> str:
    """``exit code 7``, or the signal's name for 128+n."""
    if code is None:
        return "-"
    if code > 128:
        try:
            return f"{signal.Signals(code - 128).name} ({code})"
        except ValueError:
            return f"exit code {code}"
    return f"exit code {code}"


FIELD = 13
"""Columns of a field's title."""
_TITLE = re.compile(r"[A-Z][A-Za-z ]{0,10}: +")


def field(title: str, value: object) -> str:
    """One line of ``describe``."""
    return f"{title + ':':<{FIELD}}{value}"


def _indent(text: str, by: str) -> list[str]:
    return [by + line for line in text.splitlines()[-LAST_LINES:]]


def job_lines(job: Json, colour: bool = False, width: int | None = None) -> list[str]:
    """All useful facts about one job, folded to a ``width``."""
    lines = _generation(job, colour)
    for block in (
        _waits(job),
        _blame(job),
        _generations(job, width),
        _farewell(job),
        _left_out(job),
        _workers(job, width),
        _alone(job),
        _next(job),
    ):
        if block:
            lines += ["", *block]
    return folded(lines, width)


def folded(lines: list[str], width: int | None) -> list[str]:
    """Lines of ``describe`` within a width: a field continues below its value, other text below its own start."""
    out = []
    for line in map(one_line, lines):
        own = len(line) - len(line.lstrip())
        indent = FIELD if _TITLE.match(line) else own + 2
        out += fold(line, width, indent)
    return out


def _generation(job: Json, colour: bool) -> list[str]:
    spec = job["spec"]
    several = len(spec["roles"]) > 1
    size = f"{job['min']}" if job["min"] == job["max"] else f"{job['min']} to {job['max']}, target {job['target']}"
    if job["borrowed"] is not None:
        size += f", {job['borrowed']} borrowed on top of it"
    lines = [
        field("Job", f"{job['name']} (uid {job['uid']})"),
        field("Phase", paint(job["phase"], colour) + (" (being deleted)" if job["deleting"] else "")),
        field("Why", job["reason"] or "-"),
        field("Owner", job["owner"] + ("" if job["owner"] == job["user"] else f", runs as {job['user']}")),
        *([] if several else [field("Command", shlex.join(spec["roles"][0]["command"]))]),
        field("Folder", spec["working_dir"]),
        *_preloaded(spec),
    ]
    if spec["container"] is not None:
        lines.append(field("Container", f"{spec['container']['image']} ({spec['container']['runtime']})"))
    if spec["modules"]:
        lines.append(field("Modules", " ".join(spec["modules"])))
    if spec["checkpoint_dir"]:
        lines.append(field("Checkpoints", spec["checkpoint_dir"] + _committed(job)))
    lines += [
        *_queue(job),
        *_start(job),
        *(_roles(job) if several else [field("Nodes", f"{size}; workers per node: {_per_node(spec['roles'][0])}")]),
        *([field("Placement", asks)] if (asks := job["placement"]["asks"]) else []),
        field("World", _world(job)),
        *([field("Topology", placed)] if (placed := job["placement"]["placed"]) else []),
        *_time(job),
        *_time_limit(job),
        *_hang(spec),
        *_policies(job),
        *_setbacks(job),
        *_ties(job),
        field("Age", f"{span(job['age'])}; {_ran(job)}; {_restarts(job)}"),
        field("Budget", _budget(job["budget"])),
    ]
    if (used := job["usage"])["goodput"] is not None:
        lines.append(field("Used", use_text(used)))
    if job.get("limits"):
        lines.append(field("Limits", used_text(job["limits"])))
    if job["scale"]:
        lines.append(field("Scale", _scale(job["scale"])))
    if job["outcome"]:
        lines.append(field("Outcome", f"{exit_words(job['outcome']['code'])}: {job['outcome']['text']}"))
    return lines


def _preloaded(spec: Json) -> list[str]:
    """What is imported ahead of time, and what of it is a guess."""
    if not spec["preload"] and not spec["guessed"]:
        return []
    guess = f"{', '.join(spec['guessed'])} (the script imports it)" if spec["guessed"] else ""
    return [field("Preloads", "; ".join(filter(None, (", ".join(spec["preload"]), guess))))]


def use_text(used: Json) -> str:
    """Hours of devices, and how many of them were lost, and overhead."""
    kinds = (("gpu", "GPU"), ("slot", "slot"))
    parts = [f"{hours(used[f'{key}_hours'])} {name} hours" for key, name in kinds if used[f"{key}_hours"]]
    lost, overhead = (hours(of_devices(used, what)) for what in ("lost", "overhead"))
    text = ", ".join(parts) + (f", {lost} of them lost to faults" if lost != "-" else "")
    text += f", {overhead} overhead" if overhead != "-" else ""
    waited = used["waited_hours"] * 3600
    return f"{text} (goodput {part(used['goodput'])})" + (f"; waited {span(waited)} to start" if waited >= 1 else "")


def _per_node(role: Json) -> str:
    return "one per GPU" if role["workers_per_node"] == "gpu" else str(role["workers_per_node"])


def _roles(job: Json) -> list[str]:
    """How large each of several roles is, and what it runs."""
    spec, lines = job["spec"], list[str]()
    for role in spec["roles"]:
        places = job["roles"][role["name"]]["target"]
        wide = role["replicas"] or role["nodes"]
        size = count(places, "place") + (f", at least {wide['min']}" if wide["min"] < wide["max"] else "")
        size += "" if role["replicas"] else ", each on a node of its own"
        ends = "; completes the job" if spec["completes"] == role["name"] else ""
        ends += "; restarts alone" if role["restart"] == "alone" else ""
        text = f"{role['name']}: {size}; workers of each: {_per_node(role)}; {shlex.join(role['command'])}{ends}"
        lines.append(field("Roles", text) if not lines else " " * FIELD + text)
    return lines


def _queue(job: Json) -> list[str]:
    """The job's queue, unless it is the default one, and its place in the queue while it waits for nodes."""
    name, line = job.get("in_queue", DEFAULT_QUEUE), job.get("queue")
    parts = [] if name == DEFAULT_QUEUE else [name]
    if line is not None:
        parts.append(f"number {line['place']} of {line['of']}, priority {job['priority']}")
    return [field("Queue", ": ".join(parts))] if parts else []


def _start(job: Json) -> list[str]:
    """The latest start of the job, if time limits determine one."""
    at, after = job.get("start_estimate"), job.get("starts_after", [])
    if at is None:
        return []
    more = f" and {len(after) - MOST_NAMES} more" if len(after) > MOST_NAMES else ""
    who = f"jobs {', '.join(after[:MOST_NAMES])}{more} end at their time limits"
    ends = f" (when {who if len(after) > 1 else f'job {after[0]} ends at its time limit'})" if after else ""
    return [field("Starts", f"by about {time.strftime('%Y-%m-%d %H:%M', time.localtime(at / 1000))}{ends}")]


def _time_limit(job: Json) -> list[str]:
    """The rest of the time limit."""
    left, limit = job["time_left"], job["spec"]["time_limit"]
    if limit is None:
        return []
    return [field("Time limit", f"{span(limit)}, {span(left)} left" + ("" if job["started"] else " (not started yet)"))]


def _hang(spec: Json) -> list[str]:
    """When its gang hangs, where that is looked for."""
    if spec["hang"] in (None, "off"):
        return []
    limit = spec["hang"]["progress"]
    long = "as long as its own steps tell (auto)" if limit is None else span(limit)
    return [field("Hangs", f"if no worker makes progress for {long}: then it is restarted")]


def _policies(job: Json) -> list[str]:
    """What policies with a timeout will do, and when, unless what they wait for ends before."""
    lines = list[str]()
    for one in job["policies_due"]:
        text = f"{one['do']} in {span(one['left'])}, unless {_ENDS.get(one['event'], 'it runs again')} before"
        lines.append(field("Policy", f"{one['event']}: {text}"))
    return lines


def _setbacks(job: Json) -> list[str]:
    """Nodes that it goes on without for now."""
    found = job["setbacks"]
    return [field("Left out", f"{one['node']} {one['text']}: tried again in {span(one['left'])}") for one in found]


_ENDS = {"PodPending": "its nodes are found", "PodRunning": "it ends or is formed anew", "Unknown": "all nodes answer"}
"""What ends the wait of a policy, by its event; of any fault that the job runs again."""


def _ties(job: Json) -> list[str]:
    """Links to other jobs: those that it comes after, and its array."""
    spec, lines = job["spec"], []
    if spec["after"]:
        lines.append(field("After", ", ".join(f"{one['name']} ({one['need']})" for one in spec["after"])))
    if array := spec["array"]:
        most = f", {array['at_once']} at once" if array["at_once"] else ""
        lines.append(field("Array", f"{array['name']}, index {array['index']} of {array['count']} jobs{most}"))
    return lines


def _committed(job: Json) -> str:
    found = job["checkpoint"]
    return "" if found is None else f"; step {found['step']} is committed ({found['name']})"


def _scale(scale: Json) -> str:
    names = f"; {', '.join(scale['leaving'])} left, and is used again last" if scale["leaving"] else ""
    role, what = (f"{scale['role']} ", "place") if scale["role"] else ("", "node")
    if scale["state"] != "pending":
        return f"{role}to {scale['want']}: {scale['reason']}{names}"
    if scale["left"] is None:
        return f"{role}to {count(scale['want'], what)}, under way"
    return (
        f"{role}from {scale['before']} to {count(scale['want'], what)}, rolled back in {span(scale['left'])} if not met"
    )


def _ran(job: Json) -> str:
    return "has not run" if job["duration"] is None else f"ran for {span(job['duration'])}"


def _budget(budget: Json) -> str:
    """The restarts that are left. A fault that found none left counts, too."""
    most, used = budget["max"], budget["used"]
    needed = f"{count(used, 'fault')} needed one"
    if not most:
        return "no restart is allowed" + (f"; {needed}" if used else "")
    spent = f"{min(used, most)} of {most} restarts spent within {span(budget['window'])}"
    return f"{spent}; " + (needed if used > most else f"{budget['left']} left")


def _restarts(job: Json) -> str:
    return f"restarted {_times(job['restarts'])}"


def _world(job: Json) -> str:
    if not job["generation"]:
        return "none formed yet"
    text = f"generation {job['generation']} ({job['generation_state']}), {count(job['world_size'], 'worker')}"
    if job["gpus"]:
        text += f", {count(job['gpus'], 'GPU')}"
    return text + (f", chief {job['chief']}" if job["chief"] else "")


def _time(job: Json) -> list[str]:
    """The time on which the workers run while the store is unreachable; while it answers, the failsafe members of the
    job."""
    if job["lent"] is not None:
        agent, since = f"the agent of {job['lent']['node']}", moment(job["store_away_since"])
        return [field("Runs on", f"{runs_on(job)} (the store has not answered {agent} since {since})")]
    if job["phase"] != "running" or job["generation_state"] != "active":
        return []
    names = ", ".join(k["node"] + ("" if k["live"] else " (silent)") for k in job["failsafe_members"])
    return [
        field(
            "Failsafe",
            f"{names} may give it failsafe time while the store is away" if names else f"none: {ALONE}",
        )
    ]


ALONE = "its workers stop when the store is away for longer than a lease"


def runs_on(job: Json) -> str:
    """The time on which the workers on the asked node run, while the store is unreachable."""
    lent = job["lent"]
    node, why = lent["node"], lent["why"]
    failsafe_members = ", ".join(k["node"] for k in job["failsafe_members"])
    match lent["state"]:
        case "lent":
            return f"failsafe time from {failsafe_members}"
        case "lease":
            return f"the lease of {node}, then " + (
                f"on failsafe time from {failsafe_members}" if failsafe_members else "without any"
            )
        case "refused":
            return f"what is left of its time on {node}: no failsafe member gives it failsafe time: {why}"
        case "stopped":
            return f"nothing on {node} any more" + (f": no failsafe member gave it failsafe time: {why}" if why else "")
    others = ", ".join(p["node"] for p in job["pods"])
    return f"it is not known on {node}, where none of its workers are: ask an agent of {others}"


def _waits(job: Json) -> list[str]:
    return ["Waits for:", *(f"  - {why}" for why in job["why"])] if job["why"] else []


WORKERS = (
    Column("RANK", lambda w: w["rank"]),
    Column("NODE", lambda w: w["node"]),
    Column("LOCAL", lambda w: w["local_rank"]),
    Column("PID", lambda w: w["pid"]),
    Column("STATE", lambda w: w["state"]),
    Column("EXIT", lambda w: exit_words(w["exit"])),
)
PROGRESS = (
    Column("STEP", lambda w: w["step"]),
    Column("DOING", lambda w: w["doing"], text=True),
)
"""Only if workers report it."""
PLACE = Column("PLACE", lambda w: w["place"])
"""Only for a job of several roles."""


def _workers(job: Json, width: int | None) -> list[str]:
    rows = [w | {"node": p["node"]} for p in job["pods"] for w in p["workers"]]
    lines = []
    if rows:
        columns = (*WORKERS, *PROGRESS) if any(w.get("doing") for w in rows) else WORKERS
        columns = (*columns, PLACE) if any(w.get("place") for w in rows) else columns
        usual = Counter(w["state"] for w in rows).most_common(1)[0][0]
        chosen = sorted(rows, key=lambda w: (w["state"] == usual, w["rank"]))[:MOST_WORKERS]
        chosen.sort(key=lambda w: int(w["rank"]))
        lines += ["Workers:", *_table(columns, chosen, width)]
        if more := len(rows) - len(chosen):
            lines.append(f"  and {more} more: nodeagentctl get {job['name']} -o json")
    odd = [p for p in job["pods"] if p["reason"] or not p["workers"]]
    lines += [f"  {p['node']}: {p['phase']}{': ' + p['reason'] if p['reason'] else ''}" for p in odd]
    preforked = [p for p in [*job["pods"], *job["spares"]] if p["preforked"]]
    if preforked:
        each = ", ".join(f"{p['preforked']} on {p['node']} ({p['preforked_memory'] / 1e6:.0f} MB)" for p in preforked)
        lines.append(f"  pre-forked for the next start: {each}")
    if job["spares"]:
        spares = ", ".join(
            f"{p['node']} ({p['phase']}{': ' + p['reason'] if p['reason'] else ''})" for p in job["spares"]
        )
        lines.append(f"  spares: {spares}")
    return lines


def _alone(job: Json) -> list[str]:
    """Workers that were started again in this generation, by themselves or with all of their role."""
    lines = [f"  {one['text']} on {one['node']} (started again {_again(one)})" for one in job["alone"]]
    return ["Restarted alone:", *lines] if lines else []


def _again(one: Json) -> str:
    return _times(one["times"]) + (f", with all of {one['whole']}" if one["whole"] else "")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _left_out(job: Json) -> list[str]:
    """Nodes that the newest generation was formed without. Most reasons begin with the node's name."""
    if not job["outside"] or job["phase"] in ENDED:
        return []
    reasons = ((node, why.removeprefix(f"{node} ")) for node, why in sorted(job["outside"].items()))
    return [f"Left out when generation {job['generation']} was formed:", *(f"  {node}: {why}" for node, why in reasons)]


def _still(generation: Json) -> str:
    return "-" if generation["downtime"] is None else f"{generation['downtime']:.2f}s"


def _ended(generation: Json) -> str:
    end = generation["ended_by"]
    if end is None:
        return str(generation["ended_because"])
    who = f"rank {end['rank']} on {end['node']}" if end["rank"] is not None else end["node"]
    how = exit_words(end["exit"]) if end["exit"] is not None else end["kind"].replace("_", " ")
    return ": ".join(part for part in (who, how) if part) + _cost(end)


def _cost(end: Json) -> str:
    if not end["counts"]:
        return " (free)"
    return " (not judged yet)" if end["judged_when"] else ""


GENERATIONS = (
    Column("GENERATION", lambda g: g["number"]),
    Column("STATE", lambda g: g["state"]),
    Column("DOWNTIME", _still),
    Column("FORMED BECAUSE", lambda g: g["cause"], text=True),
    Column("ENDED BY", _ended, text=True),
)


def _table(columns: tuple[Column, ...], rows: list[Json], width: int | None) -> list[str]:
    return ["  " + line for line in table_lines(columns, rows, None if width is None else width - 2)]


def _generations(job: Json, width: int | None) -> list[str]:
    rows = job["generations"]
    if not rows:
        return []
    timed = [f"  {g['number']}: {g['recovery']}" for g in rows if g["recovery"]][-TIMED:]
    return ["Generations:", *_table(GENERATIONS, rows, width), *timed]


def _farewell(job: Json) -> list[str]:
    """What the nodes reported about the last steps before a planned stop."""
    reported = {node: r["reason"] for node, r in job["reports"].items() if r["state"] == "left"}
    return (
        ["Last stopped as planned:", *(f"  {node}: {text}" for node, text in sorted(reported.items()))]
        if reported
        else []
    )


def blamed(job: Json) -> Json | None:
    """The end of the newest generation that a worker's fault ended; None if there is none."""
    ends = [g["ended_by"] for g in job["generations"] if g["ended_by"] is not None]
    faults = [e for e in ends if e["rank"] is not None or e["error"] or e["exit"] is not None]
    return faults[-1] if faults else None


def blame_lines(job: Json, logs_stay: bool = True) -> list[str]:
    """The first worker that failed, how, its last lines, and (if ``logs_stay``) where its output is."""
    end = blamed(job)
    if end is None:
        return []
    budget, newest = job["budget"], job["generations"][-1]["ended_by"]
    cost = "spent one restart of the budget" if end["counts"] and budget["max"] else "spent no restart"
    if end is newest and budget["max"] and budget["used"] > budget["max"]:
        cost = "needed a restart, and none was left"
    elif end is newest and job["phase"] in ENDED:
        cost = "the job was not started again"
    if end["judged_when"]:
        cost = f"so far; {end['judged_when']}"
    lines = [f"Blamed for the end of generation {end['generation']} ({cost}):"]
    who = f"rank {end['rank']} on {end['node']}" if end["rank"] is not None else end["node"] or "no single worker"
    lines.append(f"  {end['text'] or who + ': ' + exit_words(end['exit'])}")
    if end["error"]:
        title = "what its workers did" if end["kind"] == "hang" else "last lines"
        lines += [f"  {title}:", *_indent(end["error"], "    ")]
    if job["private"]:
        lines.append(f"  what it wrote is for {job['owner']} and operators")
    elif logs_stay:
        rank = "" if end["rank"] is None else f" --rank {end['rank']}"
        lines.append(f"  all it wrote: nodeagentctl logs {job['name']} --generation {end['generation']}{rank}")
    return lines


def _blame(job: Json) -> list[str]:
    lines = blame_lines(job)
    outcome = job["outcome"]
    if not lines and outcome and outcome["error"]:
        title = "Last lines of the worker at fault:" if job["started"] else "What was printed about it:"
        return [title, *_indent(outcome["error"], "    ")]
    return lines


def _wait_no_longer(way: Json | None, name: str) -> str:
    """The action that would end the waiting of a job in the queue, if there is one."""
    if way is None:
        return "look at the nodes: nodeagentctl nodes"
    if way["begins"]:
        return f"nothing: it begins by itself in {span(way['backoff'])}"
    if way["blocked"]:
        return f"nothing: it starts by itself then; or end it: nodeagentctl stop {name}"
    if way["backoff"]:
        return f"nothing: it starts again by itself in {span(way['backoff'])} (it backs off)"
    if way.get("capped"):
        return f"have an operator give its queue more, or submit it anew so that it needs less: {way['capped']}"
    if way.get("barred"):
        return "wait for jobs of its queue to end, or have an operator give the queue more: nodeagentctl queue get"
    if way.get("reserved_for"):
        return f"nothing: it starts after job {way['reserved_for']}, or before it where its time_limit is short enough"
    if way["enough"]:
        return "nothing: it starts as soon as it is its turn"
    if way["enough_soon"]:
        return "nothing yet: nodes get ready for it"
    few = way["needs"] is not None and way["live"] < way["needs"]
    if way.get("clocks") and not few:
        return f"see which clock is wrong, that of {' or '.join(way['clocks'])}, and set it: timedatectl"
    if way["unmet"] and not few:
        return START_OTHERS
    if few:
        return f"start more nodes: it needs {way['needs']}, and of all nodes {way['live']} live (nodeagentctl nodes)"
    if way["mute"]:
        return f"see whether the agent of {way['mute'][0]} runs there and reaches the store: systemctl status nodeagent"
    if way["cordoned"]:
        return f"let it use a node that is cordoned: nodeagentctl uncordon {way['cordoned'][0]}"
    if way["unfit"] and way["fit"] + way["pending"] + way["unfit"] >= (way["needs"] or 1):
        return f"correct what Why says of {count(way['unfit'], 'node')}; the checks are made again by themselves"
    if way["held"]:
        return "nothing: it starts when enough of the nodes that other jobs hold are free"
    if way["needs"] is None:
        return START_OTHERS
    return "look at what keeps the nodes above from running it: nodeagentctl nodes"


START_OTHERS = "start nodes that will do, or stop it and submit it anew so that it needs less"


def _waits_for_roles(job: Json) -> str:
    """Which roles wait until others are ready, and what these have to do for that; empty if none waits."""
    pods = [pod for pod in job["pods"] if pod["generation"] == job["generation"]]
    workers = [worker for pod in pods for worker in pod["workers"]]
    idle = {(w["place"] or "").partition(".")[0] for w in workers if w["state"] == "starting" and w["pid"] is None}
    roles = {role["name"]: role for role in job["spec"]["roles"]}
    held = [name for name in roles if name in idle and roles[name]["after"]]
    before = dict.fromkeys(other for name in held for other in roles[name]["after"])
    others = {name: roles[name]["ready"] for name in before if roles[name]["ready"] is not None}
    if not others:
        return ""
    ends = {
        name: "it listens on its port" if ready["port"] else f"its command exits 0: {shlex.join(ready['command'])}"
        for name, ready in others.items()
    }
    how = "; ".join(f"{name} is when {end}" for name, end in ends.items())
    rank = next((w["rank"] for w in workers if (w["place"] or "").partition(".")[0] in others), None)
    look = f"nodeagentctl logs {job['name']}" + (f" --rank {rank}" if rank is not None else "")
    answers = "; ".join(pod["reason"] for pod in pods if pod["reason"].startswith("ready "))
    if answers:
        look = f"{answers}. {look}"
    waits, are = "waits" if len(held) == 1 else "wait", "is" if len(others) == 1 else "are"
    return f"{', '.join(held)} {waits} until {', '.join(others)} {are} ready ({how}). Look: {look}"


def _outliving(job: Json) -> list[Json]:
    """Workers that run on though others of their generation have exited 0. Those of several roles may."""
    if len(job["spec"]["roles"]) > 1 or job["phase"] != "running":
        return []
    pods = [pod for pod in job["pods"] if pod["generation"] == job["generation"]]
    workers = [worker | {"node": pod["node"]} for pod in pods for worker in pod["workers"]]
    done = any(worker["state"] == "exited" and worker["exit"] == 0 for worker in workers)
    return [worker for worker in workers if worker["state"] == "running"] if done else []


def _ends_outliving(job: Json, left: list[Json]) -> str:
    """What becomes of them."""
    first, spec = left[0], job["spec"]
    more = f" and {count(len(left) - 1, 'other')}" if len(left) > 1 else ""
    who = (
        f"rank {first['rank']} on {first['node']}{more} still run{'s' if len(left) == 1 else ''}, others have exited 0"
    )
    look = f"nodeagentctl logs {job['name']} --rank {first['rank']}"
    if spec["hang"] not in (None, "off"):
        return f"nothing yet: {who}; without progress it is a hang. Look: {look}"
    if spec["finish"] is None:
        return f"see what holds it: {who}, and with finish: off it may stay for ever: {look}"
    return (
        f"nothing yet: {who}; a worker that then does nothing for {span(spec['finish'])} hangs (finish). Look: {look}"
    )


SILENT_SHIM = ("the shim stopped answering", "its shim does not read what it is sent")
"""What a node says of a shim that it killed itself since it did not run (``pods/shimlink.py``)."""


def _killed_shim(job: Json) -> str:
    """What to look at if the newest fault is that a pod died; else empty."""
    ends = [g["ended_by"] for g in job["generations"] if g["ended_by"] is not None]
    if not ends or ends[-1]["kind"] != "pod_failed" or not ends[-1]["text"].startswith("the pod died"):
        return ""
    if any(silence in ends[-1]["text"] for silence in SILENT_SHIM):
        return (
            f"see what kept the shim on {ends[-1]['node']} from running (it was stopped by a signal or a debugger, "
            "throttled by a cgroup, or the node is overloaded): the agent killed it since it did not answer"
        )
    return (
        f"see what ended the shim, a Python process of the job's user, on {ends[-1]['node']}: often the job's own code "
        "(pkill python, killall, kill -1), or the kernel for lack of memory (journalctl -k)"
    )


def _next(job: Json) -> list[str]:
    name, phase = job["name"], job["phase"]
    members, away = job["failsafe_members"], job["store_away_since"] is not None
    live = away or any(member["live"] for member in members)  # an agent that is not answered does not know
    silent = "" if live else ", ".join(member["node"] for member in members)
    if job["deleting"] and silent:
        step = (
            f"its record goes when one of {silent} says that nothing runs there: bring it back, or, if it is "
            "permanently down: nodeagentctl forget NODE"
        )
    elif job["deleting"]:
        step = "nothing: the record goes away by itself once nothing runs any more"
    elif phase == "failed" and job["started"] is None:
        step = "correct what Why says, then submit it again; no worker of it ran, so there is no output"
    elif phase == "failed" and job["reason"].startswith("its time limit"):
        step = "give it more: a longer time_limit, or a checkpoint to go on from; then submit it again"
    elif phase == "failed" and job["failing_node"]:
        node = job["failing_node"]
        step = (
            f"see whether it is the job's fault (nodeagentctl logs {name} --tail 50) or that of {node}, where job "
            f"after job fails at its start (nodeagentctl diag {node}; nodeagentctl cordon {node} --reason TEXT); "
            "then submit it again"
        )
    elif phase == "failed" and (look := _killed_shim(job)):
        step = f"{look}; then submit it again"
    elif phase == "failed":
        step = f"correct what failed (nodeagentctl logs {name} --tail 50), then submit it again"
    elif phase == "stopped":
        step = f"submit it again to go on, or remove it: nodeagentctl delete {name}"
    elif phase == "succeeded":
        step = f"nothing; remove its record when you like: nodeagentctl delete {name}"
    elif away:
        step = (
            "get the store to answer the agent that was asked (nodeagentctl doctor); until then the job cannot be "
            "changed through that one, and if no agent is answered it is not recovered"
        )
    elif job["store_waits"]:
        step = "nothing: what runs goes on; all else waits for those nodes: start their agents, if you can"
    elif job["refused"]:
        step = "do what Why says: the agent that was asked does not act on the job's record as it is"
    elif phase in ("paused", "pausing") and job["desired"] == "pause":
        step = f"run it again: nodeagentctl resume {name}"
    elif silent:
        step = f"bring one of {silent} back, or, if it is permanently down: nodeagentctl forget NODE"
    elif phase in ("queued", "holding"):
        step = _wait_no_longer(job.get("way_out"), name)
    elif phase == "forming":
        step = "nothing: it starts when every member has acknowledged"
    elif job["unreachable"]:
        step = "look at the network between these nodes (nodeagentctl doctor --peers): workers may wait for each other"
    elif job["no_progress"]:
        step = f"nothing yet: if it hangs, it is restarted by itself. Follow it: nodeagentctl logs {name} -f"
    elif waits := _waits_for_roles(job):
        step = f"nothing yet: {waits}"
    elif stuck := [pod["node"] for pod in job["pods"] if pod["phase"] == "stuck"]:
        look = f"nodeagentctl describe {stuck[0]}"
        step = f"see what its processes on {stuck[0]} wait for ({look}): they do not end, even with SIGKILL"
    elif left := _outliving(job):
        step = _ends_outliving(job, left)
    elif look := _killed_shim(job):
        step = f"if its pod dies again, {look}. Follow it: nodeagentctl logs {name} -f"
    elif job["why"]:
        step = f"nothing is wrong; it will grow when it can. Follow it: nodeagentctl logs {name} -f"
    else:
        step = f"nothing is wrong. Follow it: nodeagentctl logs {name} -f"
    return [field("Next", step)]
