"""House rule: nothing that others wait for reads what the kernel takes from another process's memory.

Who reads a process's command line, environment or maps waits while its memory map is held, and each account can hold
that of its own processes for as long as it likes: a page of a file system that it serves itself is enough. (Its user,
name, state, parents, children and cgroup are to be had without.) Every module that reads such a file of another
process, or calls what does, is listed with what bounds the wait."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nodeagent"
HELD = (
    "cmdline", "environ", "maps", "smaps", "smaps_rollup", "numa_maps", "pagemap", "map_files", "mem", "clear_refs",
    "auxv", "io", "stack", "syscall", "personality", "patch_state",
)  # fmt: skip
"""Files of /proc/PID that wait for its memory map, or for the end of its exec, which waits for the former map."""
FILE = re.compile(rf"(/task/\d+)?/({'|'.join(HELD)})(/.*)?")
CALLS = frozenset({"read_environ", "has_mark", "kill_marked", "process_iter"})
"""Functions that read them. (Of psutil, any use of ``Process``.)"""

ALLOWED: dict[str, tuple[str, str]] = {
    "osutil/linux.py": ("/environ read_environ", "the functions themselves: a pod's processes are found by their mark"),
    "pods/host.py": (
        "has_mark kill_marked",
        "the one in a thread, within ADOPT_LIMIT; the other in a daemon thread of the sweeper, one for each user: a "
        "user's pods wait for his own processes",
    ),
    "local/power.py": ("read_environ", "in a daemon thread, within HELD; without root, of the own user's alone"),
    "shim/hang/stacks.py": ("/stack /syscall", "a child of the shim, of the job's own workers, within a bound"),
}


def reads(source: str) -> set[str]:
    """What of it a module names: the files, with a slash, and the functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.JoinedStr(values=[_, *_] as parts):
                after = [part for part in parts[1:] if isinstance(part, ast.Constant)]
                found.update(f"/{named[2]}" for part in after if (named := FILE.fullmatch(str(part.value))))
            case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str(name))) if name in HELD:
                found.add(f"/{name}")
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in CALLS:
                found.add(name)
            case ast.Attribute(attr="Process", value=ast.Name(id="psutil")):
                found.add("psutil.Process")
            case _:
                continue
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), file


MODULES = dict(modules())


def wrong(name: str, source: str) -> str:
    """What is said of a module; empty if nothing is."""
    found, allowed = reads(source), set(ALLOWED[name][0].split()) if name in ALLOWED else set()
    if new := sorted(found - allowed):
        return f"{name} reads {new}, which its user can hold up: use stat, status, comm or cgroup, or look aside"
    if gone := sorted(allowed - found):
        return f"{name} does not read {gone} any more"
    return ""


def test_nothing_waits_for_another_processs_memory() -> None:
    assert {name: found for name, file in MODULES.items() if (found := wrong(name, file.read_text()))} == {}


def test_no_module_is_listed_that_is_gone() -> None:
    assert ALLOWED.keys() <= MODULES.keys()


@pytest.mark.parametrize("source", [
    'read_proc(f"/proc/{pid}/cmdline")',
    'Path(f"/proc/{pid}/environ").read_bytes()',
    'open(f"/proc/{pid}/task/1/smaps")',
    'open(f"/proc/{pid}/task/{thread}/mem")',
    'os.listdir(f"/proc/{pid}/map_files/{name}")',
    '(entry / "cmdline").read_bytes()',
    "psutil.Process(pid).name()",
    "from nodeagent.osutil import linux\nlinux.kill_marked(wanted)",
    "for process in psutil.process_iter():\n    pass",
])  # fmt: skip
def test_this_check_can_fail(source: str) -> None:
    assert wrong("hardware/accelerator.py", source)


@pytest.mark.parametrize("source", [
    'open("/proc/self/maps")', 'open("/proc/cmdline")', 'open("/proc/pressure/io")', 'f"{folder}/environment"',
    'os.environ["A"]', 'read_proc(f"/proc/{pid}/cgroup")', 'content = {"environ": spec.submitter.environ}',
])  # fmt: skip
def test_what_waits_for_nobody_is_free(source: str) -> None:
    assert not reads(source)
