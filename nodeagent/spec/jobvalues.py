"""One check for each kind of value of a job, shared by the job file, the command line and the agent's own check.

Each takes what was written and gives what the model holds, or raises ``CheckError``. Never knows where it stands.
"""

from __future__ import annotations

import math
import posixpath
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, cast, get_args

from nodeagent.model.base import NAME
from nodeagent.model.jobspec import (
    LATEST,
    MOST_AFTER,
    MOST_INDEX,
    MOST_MEMBERS,
    ActionName,
    EventName,
    Need,
    Nodes,
    Submitter,
)
from nodeagent.model.queue import MOST_MIN_RUNTIME
from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, NotTextError, did_you_mean, raise_all

MAX_NODES = 4096
AUTO = "auto"
MAX_WORKERS = 1024

LIMITS = ("as", "core", "cpu", "data", "fsize", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss", "rtprio",
          "rttime", "sigpending", "stack")  # fmt: skip
"""``resource.RLIMIT_*`` of Linux, in lower case, without the prefix."""

_WORKER = "nodeagent sets it for each worker"
_GPUS = "nodeagent gives each worker its GPUs; use gpus_per_worker (0 for none)"
RESERVED = {
    "RANK": _WORKER, "LOCAL_RANK": _WORKER, "WORLD_SIZE": _WORKER, "LOCAL_WORLD_SIZE": _WORKER,
    "GROUP_RANK": _WORKER, "GROUP_WORLD_SIZE": _WORKER, "ROLE_NAME": _WORKER, "ROLE_RANK": _WORKER,
    "ROLE_WORLD_SIZE": _WORKER, "MASTER_ADDR": _WORKER, "MASTER_PORT": _WORKER, "TORCHELASTIC_RUN_ID": _WORKER,
    "TORCHELASTIC_RESTART_COUNT": _WORKER, "TORCHELASTIC_MAX_RESTARTS": _WORKER, "TORCHELASTIC_ERROR_FILE": _WORKER,
    "TORCHELASTIC_USE_AGENT_STORE": _WORKER, "PADDLE_TRAINER_ID": _WORKER, "PADDLE_TRAINERS_NUM": _WORKER,
    "PADDLE_CURRENT_ENDPOINT": _WORKER, "PADDLE_TRAINER_ENDPOINTS": _WORKER, "PADDLE_PSERVERS_IP_PORT_LIST": _WORKER,
    "TRAINING_ROLE": _WORKER, "POD_IP": _WORKER, "RANK_ID": _WORKER, "RANK_SIZE": _WORKER, "DEVICE_ID": _WORKER,
    "MS_ROLE": _WORKER, "MS_WORKER_NUM": _WORKER, "MS_SCHED_HOST": _WORKER, "MS_SCHED_PORT": _WORKER,
    "MS_NODE_ID": _WORKER,
    "PADDLE_MASTER": _WORKER, "PADDLE_GLOBAL_SIZE": _WORKER, "PADDLE_GLOBAL_RANK": _WORKER,
    "PADDLE_LOCAL_SIZE": _WORKER, "PADDLE_LOCAL_RANK": _WORKER, "PADDLE_RANK_IN_NODE": _WORKER,
    "PADDLE_NNODES": _WORKER, "PADDLE_PORT": _WORKER, "PADDLE_ROLE": _WORKER, "PADDLE_TRAINERS": _WORKER,
    "PADDLE_GLOO_HTTP_ENDPOINT": _WORKER, "DISTRIBUTED_TRAINER_ENDPOINTS": _WORKER,
    "TF_CONFIG": _WORKER, "JAX_COORDINATOR_ADDRESS": _WORKER,
    "CUDA_VISIBLE_DEVICES": _GPUS, "FLAGS_selected_gpus": _GPUS, "JAX_LOCAL_DEVICE_IDS": _GPUS,
}  # fmt: skip
"""Variables that a job may not set, and why. NODEAGENT_* are reserved too."""


def text(value: object, example: str) -> str:
    """Non-empty text that can be passed to a process."""
    if not isinstance(value, str):
        raise CheckError(f"{units.show(value)} is not text", f"write for instance {example}")
    if not value or "\0" in value:
        raise CheckError("an empty text" if not value else "a NUL character in it", f"write for instance {example}")
    return value


def job_name(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(NAME, value):
        return value
    right = "use 1 to 63 of a-z, 0-9, '-' and '.', starting and ending with a letter or digit"
    if isinstance(value, str):
        fixed = re.sub(r"[^-a-z0-9.]+", "-", value.lower()).strip("-.")[:63].strip("-.")
        if fixed:
            right += f", such as '{fixed}'"
    elif isinstance(value, int | float):
        kind = "a truth value" if isinstance(value, bool) else "a number"
        right = f"YAML reads it as {kind}: put it in quotes, as you wrote it"
    raise CheckError(f"{units.show(value)} is not a name", right)


def role_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", value):
        raise CheckError(f"{units.show(value)} is not a role's name", "use 1 to 40 of a-z, 0-9 and '-'")
    return value


def command(value: object) -> tuple[str, ...]:
    """A list of words, or one line split as a shell splits it (but no shell runs it)."""
    if isinstance(value, str):
        try:
            words = shlex.split(value)
            plain = list(shlex.shlex(value, posix=True, punctuation_chars=True))
        except ValueError:
            raise CheckError("a quote that is not closed", "close it, or write a list of words") from None
        operators = [w for w in plain if w and set(w) <= set("|&;<>()")]
        if operators and words[:1] not in (["sh"], ["bash"]):
            raise CheckError(
                f"no shell runs this, so '{operators[0]}' does nothing",
                "write [sh, -c, 'the whole line'] if you need one",
            )
        value = words
    if not isinstance(value, list | tuple):
        raise CheckError(f"{units.show(value)} is not a command", "write [python, train.py]")
    if not value:
        raise CheckError("an empty command", "write [python, train.py]")
    raise_all(_word_mistakes(value))
    return tuple(value)


def _word_mistakes(words: Sequence[object]) -> Iterator[CheckError]:
    for i, word in enumerate(words):
        if not isinstance(word, str):
            yield NotTextError(word, (i,))
        elif "\0" in word:
            yield CheckError("a NUL character in it", "remove it", (i,))
    if isinstance(words[0], str) and not words[0].strip():
        yield CheckError("the program's name is empty", "write [python, train.py]", (0,))


def nodes(value: object, *, example: str = "4, 2:8, auto or {min: 2, max: 8, target: 4}") -> Nodes:
    """``4``, ``2:8``, ``{min: 2, max: 8, target: 4}``, ``{min: 2, max: 8, target: auto}`` or ``auto``."""
    auto = value == AUTO or (isinstance(value, dict) and value.get("target") == AUTO)
    if isinstance(value, Nodes):
        low, high, target, auto = value.min, value.max, value.target, value.auto
    elif value == AUTO:
        low, high, target = 1, MAX_NODES, 1
    elif isinstance(value, dict):
        low, high, target = _from_mapping(value)
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", value)):
        low, high = int(match[1]), int(match[2])
        target = high
    else:
        low = high = target = units.whole(value, 1, MAX_NODES, example)
    if not 1 <= low <= high <= MAX_NODES:
        what = f"min {low} is above max {high}" if low > high else f"min {low}, max {high}"
        raise CheckError(what, f"it must be 1 <= min <= max <= {MAX_NODES}")
    if not low <= target <= high:
        raise CheckError(f"target {target} is not within min {low} .. max {high}", "it must be min <= target <= max")
    return Nodes(min=low, max=high, target=target, auto=auto)


def _from_mapping(value: dict[str, object]) -> tuple[int, int, int]:
    known = ("min", "max", "target")
    bad = [CheckError(f"unknown key '{k}'", did_you_mean(k, known), (k,)) for k in value if k not in known]
    numbers: dict[str, int] = {}
    auto = value.get("target") == AUTO
    for key in known:
        if key in value and not (auto and key == "target"):
            try:
                numbers[key] = units.whole(value[key], 1, MAX_NODES)
            except CheckError as error:
                bad.append(CheckError(error.what, error.right, (key,)))
    if not bad and "min" not in value and "max" not in value:
        bad.append(CheckError("neither min nor max is given", "write for instance {min: 2, max: 8}"))
    raise_all(bad)
    low = numbers.get("min", 1)
    if auto:
        return low, numbers.get("max", MAX_NODES), low
    high = numbers.get("max", max(low, numbers.get("target", low)))
    return low, high, numbers.get("target", high)


def role_names(value: object) -> tuple[str, ...]:
    """One role's name, or a list of them."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckError(f"{units.show(value)} is not a role's name, nor a list of them", "write [pserver]")
    return tuple(names)


def replicas(value: object) -> Nodes:
    """``2``, ``1:4`` or ``{min: 1, max: 4, target: 2}`` places."""
    example = "2, 1:4 or {min: 1, max: 4, target: 2}"
    written = value == AUTO or (isinstance(value, dict) and value.get("target") == AUTO)
    if written or (isinstance(value, Nodes) and value.auto):
        raise CheckError("auto borrows idle nodes, which a role beside others cannot", f"write {example}")
    return nodes(value, example=example)


def workers_per_node(value: object) -> int | Literal["gpu"]:
    if value == "gpu":
        return "gpu"
    return units.whole(value, 1, MAX_WORKERS, "gpu (one worker per GPU) or a number such as 8")


def env_name(name: str) -> str:
    """A variable that a job may set."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise CheckError(f"{units.show(name)} is not a variable's name", "use letters, digits and '_', no digit first")
    if name.startswith("NODEAGENT_"):
        raise CheckError(f"{name} is reserved", "names that start with NODEAGENT_ are nodeagent's own: use another")
    if name in RESERVED:
        raise CheckError(f"{name} is reserved", f"remove it: {RESERVED[name]}")
    return name


def env_value(value: str) -> str:
    if "\0" in value:
        raise CheckError("a NUL character in it", "remove it")
    return value


def user_name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.][-A-Za-z0-9_.@\\]*\$?", value):
        raise CheckError(f"{units.show(value)} is not a user's name", "write the login name, such as train1")
    return value


def folder(value: object) -> str:
    """A path, absolute or not, in which nothing needs replacing."""
    path = text(value, "/shared/resnet")
    if path.startswith("~"):
        raise CheckError(
            f"in {units.show(path)} nothing replaces '~'", "write the whole path, such as /home/train1/resnet"
        )
    if "$" in path:
        raise CheckError(f"in {units.show(path)} nothing replaces '$'", "write the whole path")
    return printable(path)


def printable(path: str) -> str:
    """A path that can be shown to people: nodes name it in their records and messages. Spaces of any kind are."""
    odd = next((one for one in path if not one.isprintable() and unicodedata.category(one) != "Zs"), None)
    if odd is not None:
        raise CheckError(
            f"the path has a character that cannot be printed (U+{ord(odd):04X})", "use a path without such characters"
        )
    return path


def resolve(path: str, base: str) -> str:
    """``path`` as seen from ``base``, without ``.`` and ``..``."""
    return posixpath.normpath(posixpath.join(base, path))


def limit_name(name: str) -> str:
    if name not in LIMITS:
        plain = name.lower().removeprefix("rlimit_")
        raise CheckError(f"unknown limit '{name}'", did_you_mean(plain, LIMITS))
    return name


def limit_value(value: object) -> int | Literal["infinity"]:
    if value == "infinity":
        return "infinity"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    if value in ("unlimited", "inf", ".inf", "max", -1):
        raise CheckError(f"{units.show(value)} is not a limit", "write infinity")
    raise CheckError(f"{units.show(value)} is not a limit", "write a whole number such as 1048576, or infinity")


def modules(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise CheckError(f"{units.show(value)} is not a list", f"write [{value}]")
    if not isinstance(value, list | tuple):
        raise CheckError(f"{units.show(value)} is not a list of modules", "write [torch]")
    raise_all(
        CheckError(f"{units.show(name)} is not a module's name", "write it as after 'import'", (i,))
        for i, name in enumerate(value)
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split("."))
    )
    return tuple(value)


def on_off(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("on", "off"):
        return value == "on"
    raise CheckError(f"{units.show(value)} is neither on nor off", "write on or off")


def events(value: object) -> tuple[EventName, ...]:
    """One event, or a list of them."""
    known: tuple[EventName, ...] = get_args(EventName)
    names: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if not names:
        raise CheckError("an empty list", "name at least one event, or '*' for any")
    raise_all(
        CheckError(
            f"{units.show(name)} is not an event",
            did_you_mean(str(name), known, intro="events are"),
            (i,) if isinstance(value, list | tuple) else (),
        )
        for i, name in enumerate(names)
        if name not in known
    )
    return tuple(k for n in names for k in known if k == n)


_NO_ACTION = {
    "ResumeJob": (
        "a job that waits for nodes goes on by itself, and one that was paused when somebody resumes it",
        "remove it; go on with a job that AbortJob has paused by nodeagentctl resume",
    ),
}
"""Actions of other launchers that have no meaning here: why, and what there is instead."""


def action(value: object) -> ActionName:
    """What a policy does."""
    known: tuple[ActionName, ...] = get_args(ActionName)
    if str(value) in _NO_ACTION:
        what, right = _NO_ACTION[str(value)]
        raise CheckError(f"{value} has no meaning here: {what}", right)
    found = next((name for name in known if name == value), None)
    if found is None:
        raise CheckError(f"{units.show(value)} is not an action", did_you_mean(str(value), known, intro="actions are"))
    return found


def bounded(low: float, high: float, *, above: bool = False) -> Callable[[object], float]:
    """A duration of ``low..high`` seconds (``above``: more than ``low``)."""

    def check(value: object) -> float:
        seconds = units.duration(value)
        if not low <= seconds <= high or (above and seconds == low):
            span = f"{'above' if above else 'at least'} {low:g}s" + (
                "" if high == float("inf") else f" and at most {high:g}s"
            )
            raise CheckError(f"{units.show(value)} is out of range", f"it must be {span}")
        return seconds

    return check


def or_never(value: object) -> float | None:
    """A duration above zero; ``never`` (and nothing) is None."""
    return None if value in ("never", None) else bounded(0, math.inf, above=True)(value)


def usual_time_limit(value: object) -> float | Literal["never"] | None:
    """The same, with ``never`` itself; nothing is None."""
    return "never" if value == "never" else or_never(value)


def min_runtime(value: object) -> float | None:
    """A duration of a queue; nothing is None."""
    return None if value is None else bounded(0, MOST_MIN_RUNTIME)(value)


HANG_BOUNDS = (1.0, 7 * 86400.0)
"""Seconds: the shortest and the longest limit of ``hang``."""


def finish(value: object) -> float | None:
    """``off`` or a duration within the bounds of ``hang``."""
    if value is False or value == "off":
        return None
    try:
        return bounded(*HANG_BOUNDS)(value)
    except CheckError as error:
        raise CheckError(error.what, f"{error.right}, or off") from None


def hang(value: object) -> object:
    """``off``, ``auto``, or the mapping that is checked next."""
    if value in ("off", False, None):
        return None
    if value == "auto":
        return {"progress": "auto"}
    if isinstance(value, dict):
        return value
    right = "write hang: {progress: 10m}, hang: auto or hang: off"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            units.duration(value)
        except CheckError:
            pass
        else:
            right = f"write hang: {{progress: {value}}}"
    raise CheckError(f"{units.show(value)} does not say when a job hangs", right)


def hang_progress(value: object) -> float | None:
    """A duration; ``auto`` is None."""
    return None if value == "auto" else bounded(*HANG_BOUNDS)(value)


def usual_hang(value: object) -> float | Literal["auto", "off"] | None:
    """A duration within the bounds of ``hang``, ``auto`` or ``off``; nothing is None."""
    if value is None or value == "auto":
        return value
    if value is False or value == "off":
        return "off"
    try:
        return bounded(*HANG_BOUNDS)(value)
    except CheckError as error:
        raise CheckError(error.what, f"{error.right}, or auto or off") from None


def allowed_user(name: str, submitter: Submitter) -> None:
    """Only root may run a job as somebody else. A uid is no name; whoever's name is a number may use it."""
    if name == submitter.user:
        return
    if name.isdigit():
        raise CheckError(
            f"{name} is a number, and nodes find a user by name",
            f"write the login name, such as train1 (`id -nu {name}` prints that of a uid)",
        )
    if submitter.uid != 0:
        who = "root" if name == "root" else f"{name} or root"
        raise CheckError(f"{submitter.user} may not run a job as {name}", f"remove the key, or have {who} submit it")


def absolute(path: str) -> str:
    """A path from / on, which can be shown to people."""
    if not path.startswith("/") or "\0" in path:
        raise CheckError(f"{units.show(path)} is not an absolute path", "write it from / on")
    return printable(path)


RECORDED = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "LANG")
"""The submitter's variables that are recorded with the job."""


def recorded_name(name: str) -> str:
    if name not in RECORDED:
        raise CheckError(f"{name} is not recorded with a job", f"put it into env; recorded are {', '.join(RECORDED)}")
    return name


_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_BEGIN = "write +2h (from now), or a time such as 2030-01-31T22:00 or 2030-01-31T22:00+01:00"
_ARRAY = "write 0-99, 0-99:10 or 1,3,5-7, and %8 behind it for at most 8 at once"


class When(NamedTuple):
    """A point in time, as somebody writes it."""

    seconds: float
    """Unix time, or, ``from_now``, the seconds until then: the agent counts them, since clocks differ."""
    from_now: bool


def begin(value: object) -> When | None:
    """``+DURATION``, or a time in ISO 8601, of this machine's zone unless it says otherwise."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckError(f"{units.show(value)} is not a time", _BEGIN)
    return moment(value)


def moment(value: str) -> When:
    """The same of a text."""
    if value.startswith("+"):
        return When(units.duration(value[1:]), from_now=True)
    try:
        at = max(0.0, datetime.fromisoformat(value).timestamp())
    except (ValueError, OverflowError):
        raise CheckError(f"{units.show(value)} is not a time", _BEGIN) from None
    if at > LATEST:
        raise CheckError(f"{units.show(value)} is after the year 9999", _BEGIN)
    return When(at, from_now=False)


def ttl(value: object) -> float | None:
    return None if value is None else bounded(0, math.inf)(value)


def after(value: object) -> dict[str, Need]:
    """A name, a list of names, or names with what is needed of each."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        value = dict.fromkeys(map(str, value), "ok")
    if not isinstance(value, dict):
        raise CheckError(f"{units.show(value)} names no jobs", "write [prepare], or {prepare: ok, other: any}")
    if len(value) > MOST_AFTER:
        raise CheckError(f"{len(value)} jobs", f"a job comes after {MOST_AFTER} others at most")
    for name, need in value.items():
        job_name(name)
        if need not in get_args(Need):
            raise CheckError(f"{units.show(need)} for {name}", "write ok (it succeeds) or any (it ends)", (name,))
    return cast("dict[str, Need]", value)


def after_option(text: str) -> tuple[str, Need]:
    """``JOB`` or ``JOB:ok|any``; ``job/JOB``, as ``-o name`` prints it, is the same."""
    name, _, need = text.removeprefix("job/").partition(":")
    ((name, needed),) = after({name: need or "ok"}).items()
    return name, needed


def array(value: object) -> str | None:
    """The text as it was written, if ``indices`` can read it."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise CheckError(f"{units.show(value)} is not an array", _ARRAY)
    indices(value)
    return value


@dataclass(frozen=True, slots=True)
class Indices:
    """Of an array."""

    numbers: tuple[int, ...]
    """In rising order."""
    at_once: int
    """0: any number."""


def indices(text: str) -> Indices:
    """``0-99%8``, ``0-99:10``, ``1,3,5-7``. Raises ``CheckError``."""
    ranges, percent, most = text.replace(" ", "").partition("%")
    if percent and not re.fullmatch(r"[1-9]\d{0,8}", most):
        raise CheckError(f"{units.show(text)} is not an array", "write how many may run at once behind the %: 0-99%8")
    found: list[int] = []
    for part in ranges.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise CheckError(f"{units.show(text)} is not an array", _ARRAY)
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        if last < first or last > MOST_INDEX or step < 1:
            raise CheckError(f"the range {part} in {units.show(text)}", f"it goes up, to {MOST_INDEX} at most")
        if len(found) + (last - first) // step >= MOST_MEMBERS:
            raise CheckError(f"{units.show(text)} is too long", f"an array has at most {MOST_MEMBERS} members")
        found += range(first, last + 1, step)
    return Indices(tuple(sorted(set(found))), int(most or 0))


def member_name(name: str, index: int) -> str:
    """Of an array's member. Raises ``CheckError`` where that is no job's name."""
    return job_name(f"{name}-{index}")
