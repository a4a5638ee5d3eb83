"""What ``run`` makes of its command line before anything is asked of an agent."""

from __future__ import annotations

import re

import pytest

from nodeagent.ctl.run import _check_local, default_name
from nodeagent.ctl.terminal import CtlError
from tests.sim.parts import sim_spec


@pytest.mark.parametrize(("local", "nodes", "says"), [
    (2, (3, 3), "the job needs 3 nodes and --local 2 brings up 2: it would wait for ever"),
    (900, (1, 900), "--local 900 starts 900 agents and their workers on this machine"),
    (2, (2, 4), ""),
])  # fmt: skip
def test_a_local_cluster_that_cannot_do_is_refused(local: int, nodes: tuple[int, int], says: str) -> None:
    """Found by strangers: one waited for ever, the other brought the machine down, and neither said a word."""
    spec = sim_spec("train", nodes[0], nodes[1], nodes[1])
    if not says:
        _check_local(local, spec)
        return
    with pytest.raises(CtlError, match=says):
        _check_local(local, spec)


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        (("python", "My Train_Script.py"), "my-train-script"),
        (("/bin/true",), "true"),
        (("./--.sh",), "job"),
        (("x" * 200,), "x" * 40),
    ],
)
def test_default_names_are_valid_and_differ(command: tuple[str, ...], begins: str) -> None:
    one, two = default_name(command), default_name(command)
    assert re.fullmatch(rf"{begins}-[0-9a-f]{{6}}", one)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", one)
    assert one != two
