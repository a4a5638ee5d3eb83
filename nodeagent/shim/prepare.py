"""Getting one pod ready on this node: the checks as the job's user, then the fork server; and the environments that
only this node can complete.

Standard library only. Must never look at the job's folders in the shim's own process: a dead file server blocks
the process that looks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import MARK, power_mark
from nodeagent.shim.checks import check, clear_containers, see_folders, verdict
from nodeagent.shim.container import Containers
from nodeagent.shim.environment import MOST_FOUND, compose
from nodeagent.shim.forkserver.client import ForkServer
from nodeagent.shim.loop import Loop
from nodeagent.shim.processes import ShimChildren, reap, start_function

CHECK_BOUND = 20.0
"""Seconds for the look at the job's folders."""
CHECK_AGAIN = 5.0
"""An unfit node looks again this often."""
FOLDER_AGAIN = 30.0
"""Seconds between two looks at the job's folders, and at which one checkpoint_dir is, also while workers run: a mount
may go or be put right, and a script may empty the folder, marker and all. Long, since thousands of nodes ask one file
server."""
CLEAR_AGAIN = 10.0
"""Seconds between two removals of what earlier pods left in podman's store. Others have to wait for it meanwhile."""
FORK_SERVER_STARTS = 3
"""A fork server that dies this often without a start of workers in between is not started again."""


PrepareCheck = Callable[[Mapping[str, Any]], dict[str, Any]]


class Preparation:
    """``changed`` is called at each change; ``note`` gets lines for the pod's log."""

    def __init__(
        self,
        loop: Loop,
        children: ShimChildren,
        pod: dict[str, Any],
        socket: Path,
        changed: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self._loop, self._children, self._pod, self._socket = loop, children, pod, socket
        self._changed, self._note = changed, note
        self._starts = 0
        self._folder_trouble = ""
        self.in_trouble = False
        """A look at the job's folders found what does not pass by itself."""
        self._looks_again = self._cleared = False
        self._noted: set[str] = set()
        self.fork_server = ForkServer(loop, self._fork_server_changed)
        self.fork_server.pool.size = pod["preforked"]
        self.checked: dict[str, Any] | None = None
        """What the checks found; None until they have ended."""

    @property
    def fit(self) -> bool:
        return self.checked is not None and "reason" not in self.checked

    @property
    def reason(self) -> str:
        """Why it is not fit."""
        return self.checked["reason"] if self.checked else "this node has not been checked yet"

    @property
    def local_address(self) -> str:
        """The node's address as the checks looked it up; as it is written where they have not."""
        return str(self.checked["local_address"] if self.checked is not None and self.fit else self._pod["address"])

    def relocate(self, address: str) -> None:
        """The node's address is another one; a name is looked up with new checks."""
        self._pod["address"] = address
        if self.checked is None or not self.fit:
            return
        if is_number(address):
            self.checked["local_address"] = address
        else:
            self.doubt()

    @property
    def folder(self) -> str:
        """The id of the job's checkpoint folder as last seen; "" if it has none or none was seen yet."""
        return self.checked["folder"] if self.checked is not None and self.fit else ""

    def phase(self) -> tuple[str, str, int, bool]:
        """preparing, ready or unfit, with reason, code and passing, as in base.PodStatus."""
        if self.checked is None:
            return "preparing", "", 0, False
        if not self.fit:
            return "unfit", self.checked["reason"], self.checked["code"], self.checked["passing"]
        warming = self.fork_server.pid is not None and not self.fork_server.warm
        return "preparing" if warming else "ready", self.notes, 0, False

    @property
    def notes(self) -> str:
        """What is wrong with the job's folders since they were checked, and with the fork server, where modules of the
        job have their say: not everybody may read what is behind its colon (plan/pods/report.py)."""
        of_server = "; ".join(self.fork_server.notes)
        trouble = f"trouble with the fork server: {of_server}" if of_server else ""
        return "; ".join(filter(None, (self._folder_trouble, trouble)))

    def used(self, workers: int) -> None:
        """So many workers are being started: the fork server's deaths count anew."""
        self._starts = 0
        self.fork_server.pool.size = workers

    def check(self) -> None:
        """Look at the job's folders in a child; then start the fork server."""
        try:
            self._ask(check, self._checks_late, self._checked)
        except OSError as error:
            self._checked({"reason": f"no process for the checks: {error.strerror}", "code": 0, "passing": True})

    def doubt(self) -> None:
        """Workers found that something is wrong: nothing starts here until the checks have been passed again."""
        self.in_trouble = False
        if not self.fit:
            return
        self.checked, self._folder_trouble = None, ""
        self.check()

    def _ask(
        self, look: PrepareCheck, late: Callable[[dict[str, Any]], None], answered: Callable[[dict[str, Any]], None]
    ) -> None:
        """Have a child look. ``late`` is called when it takes too long, before it is killed; ``answered`` when it has
        ended, also then. Raises OSError."""
        found_in = os.memfd_create("nodeagent-checks", os.MFD_CLOEXEC)  # a pipe holds 64 KiB: an env_file may be longer
        try:
            pid = start_function(lambda: answer(look, self._pod), found_in, 2, "the checks")
        except OSError:
            os.close(found_in)
            raise
        unanswered, over = f"did not answer within {CHECK_BOUND:.0f} s", False

        def nothing(why: str) -> dict[str, Any]:
            return {"reason": f"the job's folders {why}", "code": 0, "passing": True}

        def overdue() -> None:
            nonlocal over
            over = True
            late(nothing(unanswered))
            os.kill(pid, signal.SIGKILL)

        bound = self._loop.after(CHECK_BOUND, overdue)

        def ended() -> None:
            bound.cancel()
            self._children.forget(pid)
            code = os.waitstatus_to_exitcode(reap(pid))
            with os.fdopen(found_in, "rb") as file:
                file.seek(0)
                text = file.read(MOST_FOUND + 1)
            if text.endswith(b"\n"):
                answered(json.loads(text))
            else:
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                answered(nothing(unanswered if over else f"could not be looked at: {how}; more in shim.log"))

        self._children.expect(pid, ended)

    def _checks_late(self, result: dict[str, Any]) -> None:
        """Unfit at once, even if the child cannot die; it looks again when it could."""
        self.checked = result
        self._changed()

    def _checked(self, result: dict[str, Any]) -> None:
        self.checked = result
        if "reason" in result:
            self._loop.after(CHECK_AGAIN, self.check)
        else:
            if not self._looks_again:
                self._looks_again = True
                self._loop.after(FOLDER_AGAIN, self._look_at_folders)
            if not self._cleared and self._pod["container"] is not None:
                self._cleared = True
                self._clear_containers()
            if result["fork_server"] and self.fork_server.pid is None:
                self._start_fork_server()
        self._changed()

    def _clear_containers(self) -> None:
        """Whatever comes of it, the node is ready; the next pod tries it again."""
        if self._pod["container"]["runtime"] != "podman" or self.checked is None or not self.fit:
            return
        try:
            self._ask(partial(clear_containers, self.checked), lambda _: None, self._containers_cleared)
        except OSError as error:
            self._note(f"no process to remove what earlier pods left in podman's store: {error.strerror}")

    def _containers_cleared(self, result: dict[str, Any]) -> None:
        if "reason" in result:
            self._note(f"what earlier pods left in podman's store is not removed: {result['reason']}")
        elif result["more"]:
            self._loop.after(CLEAR_AGAIN, self._clear_containers)

    def _look_at_folders(self) -> None:
        """A look that fails (a full process table, a slow file server) changes only what is reported: the id that was
        seen last stays."""
        try:
            self._ask(see_folders, lambda _: None, self._folders_seen)
        except OSError as error:
            self._folders_seen({"reason": f"no process for a look at its folders: {error.strerror}"})

    def _folders_seen(self, result: dict[str, Any]) -> None:
        self._loop.after(FOLDER_AGAIN, self._look_at_folders)
        trouble = result.get("reason", "")
        if trouble and trouble != self._folder_trouble:
            self._note(f"a look at the job's folders failed: {trouble}")
        self._folder_trouble, self.in_trouble = trouble, bool(trouble) and not result.get("passing", True)
        if not trouble and self.checked is not None and self.fit:
            self.checked["folder"] = result["folder"]
        self._changed()

    def _start_fork_server(self) -> None:
        assert self.checked is not None
        self._starts += 1
        env = self.environment({})
        pod = self._pod
        guessed = [name for name in pod["guessed"] if self._starts == 1 or name == "torch"]  # another one may end it
        try:
            self.fork_server.start(
                pod["command"], env, pod["working_dir"], self.checked["path0"], pod["preload"], guessed,
                self.checked["programs"],
            )  # fmt: skip
        except OSError as error:
            self.fork_server.give_up(f"no process for it: {error.strerror}")
            return
        pid = self.fork_server.pid
        assert pid is not None

        def ended() -> None:
            self._children.forget(pid)
            self.fork_server.gone()  # while the number is still its own: it may be killed on the way
            reap(pid)

        self._children.expect(pid, ended)

    def _fork_server_changed(self) -> None:
        """Another one is started when it died, unless it cannot be used."""
        if self.fork_server.pid is None and not self.fork_server.unusable and self._starts < FORK_SERVER_STARTS:
            self._start_fork_server()
        for text in self.fork_server.notes:
            if text not in self._noted:
                self._noted.add(text)
                self._note(f"fork server: {text}")
        self._changed()

    def environment(self, ours: dict[str, str]) -> dict[str, str]:
        """A worker's, from what the agent ordered; the fork server's from nothing. Only once fit."""
        pod = self._pod
        assert self.checked is not None
        env = compose(self.checked["base"], self.checked["env_file"], pod["env"], ours or pod["env"])
        return env | power_mark() | {MARK: pod["mark"], "NODEAGENT_SOCKET": str(self._socket)}

    def containers(self) -> Containers | None:
        """How its workers are started in containers; None if they are not. Only once fit."""
        if self._pod["container"] is None:
            return None
        assert self.checked is not None
        found = self.checked
        return Containers(self._pod, self._socket.parent, found["container"], found["base"], found["env_file"])


def is_number(address: str) -> bool:
    """It is an address, which nobody has to look up."""
    try:
        socket.getaddrinfo(address, 0, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True


def answer(look: PrepareCheck, pod: dict[str, Any]) -> None:
    """In the child: the verdict on standard output, whole or not at all."""
    found = verdict(look, pod).encode()
    if len(found) > MOST_FOUND:
        text = f"the job's environment is too long: {len(found) >> 20} MiB of at most {MOST_FOUND >> 20} MiB"
        found = json.dumps({"reason": f"{text} (env_file, modules)", "code": 0, "passing": False}).encode()
    with open(1, "wb", closefd=False) as out:
        out.write(found + b"\n")  # without its end it was killed meanwhile
