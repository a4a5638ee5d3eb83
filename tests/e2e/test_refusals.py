"""What cannot be done is refused: with the reason, the contract's exit code, and nothing changed."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from tests.e2e.support import Cluster, digits_job
from tests.e2e.users import ctl_as

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
NODES = 2

SLEEPER = """
name: {name}
command: [{python}, -c, "import time; print('up', flush=True); time.sleep(600)"]
nodes: {{min: 1, max: 2, target: 1}}
workers_per_node: 1
"""


@pytest.fixture(scope="module")
def world(shared: Cluster) -> Cluster:
    """``first`` and ``second`` are running, ``over`` has ended."""
    for name in ("over", "first", "second"):
        shared.submit(SLEEPER.format(name=name, python=sys.executable))
    shared.ctl("stop", "over")
    uids = {shared.until_running(name, 1)["uid"] for name in ("first", "second")}

    def settled() -> bool:
        """Each node is ready for both, as member or spare, and has forgotten the one that is over."""
        shown = [n["readiness"] for n in shared.json("nodes")["items"]]
        return all(set(r) == uids and {s["state"] for s in r.values()} == {"ready"} for r in shown)

    shared.until(settled, 60, "the nodes are as ready as they get")
    return shared


def everything(world: Cluster) -> Any:
    """All that the tool shows of jobs and nodes, without what time alone changes."""
    shown = [world.json("get")["items"], world.json("nodes")["items"]]
    for row in (*shown[0], *shown[1]):
        for passing in ("age", "duration", "agent_age", "rev"):
            row.pop(passing, None)
    return shown


def refused(world: Cluster, code: int, says: str, *words: str) -> str:
    """The call is refused with this code and this reason, and changes nothing; what it said."""
    before = everything(world)
    done = world.ctl(*words, check=code)
    assert re.search(says, done.stderr), f"{says!r} is not in: {done.stderr}"
    assert everything(world) == before
    return done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("scale", "nosuch", "2"), 3, r"nosuch.*\n.*next: "),
        (("scale", "first", "3"), 6, r"3.*1.*2"),
        (("scale", "first", "0"), 6, r"0.*1.*2"),
        (("scale", "over", "2"), 6, "over.*stopped"),
        (("pause", "over"), 6, "over.*stopped"),
        (("resume", "over"), 6, "over.*stopped"),
        (("restart", "over"), 6, "over.*stopped"),
        (("cordon", "n9", "--reason", "test"), 3, "n9"),
        (("uncordon", "n9"), 3, "n9"),
        (("drain", "n9", "--reason", "test"), 3, "n9"),
        (("cordon", "n1"), 2, "--reason"),
        (("stop",), 2, "first.*second|second.*first"),
        (("logs", "nosuch"), 3, "nosuch"),
        (("describe", "nosuch"), 3, "nosuch"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_refused_with_the_reason_and_nothing_changed(
    world: Cluster, words: tuple[str, ...], code: int, says: str
) -> None:
    refused(world, code, says, *words)


def test_a_name_that_is_taken(world: Cluster) -> None:
    before = everything(world)
    job = digits_job(world.work, "first", nodes="1", steps=1)
    done = world.submit(job, check=6)
    assert re.search("first.*running", done.stderr)
    assert "first" in world.ctl("submit", "--dry-run", str(world.work / "job.yaml"), check=6).stderr
    assert everything(world) == before


MISTAKES = """\
name: Wrong Name
comand: [python, train.py]
nodes: {min: 4, max: 2}
env: {OMP_NUM_THREADS: 4}
grace: 30 sec
"""


@pytest.mark.parametrize("verb", ["submit", "validate"])
def test_a_job_file_with_five_mistakes_tells_all_five(world: Cluster, verb: str) -> None:
    file = world.work / "wrong.yaml"
    file.write_text(MISTAKES)
    refusal = refused(world, 2, "wrong.yaml:1:7: name", verb, str(file))
    places = re.findall(r"wrong\.yaml:(\d+:\d+): ", refusal)
    assert [place for place in places if place != "1:1"] == ["1:7", "2:1", "3:8", "4:24", "5:8"], refusal
    assert "did you mean 'command'" in refusal


@pytest.mark.usefixtures("another_user")
def test_another_users_job(world: Cluster) -> None:
    world.home.chmod(0o755)
    before = everything(world)
    for words in (("scale", "first", "2"), ("stop", "first"), ("delete", "first"), ("pause", "first")):
        done = ctl_as(world, *words)
        assert (done.returncode, "root" in done.stderr) == (6, True), done.stderr
    for verb in ("cordon", "drain"):
        done = ctl_as(world, verb, "n1", "--reason", "mine")
        assert done.returncode == 6, done.stderr
    job = {"name": "theirs", "command": ["true"], "nodes": 1, "user": "root", "working_dir": "/"}
    done = ctl_as(world, "submit", "-", given=json.dumps(job))
    assert done.returncode in (2, 6) and "root" in done.stderr, done.stderr
    assert everything(world) == before
    seen = ctl_as(world, "get", "first", "-o", "json")
    assert json.loads(seen.stdout)["owner"] == "root", "reading is free"


def test_without_an_agent(world: Cluster) -> None:
    """No agent anywhere: 5, and `run` that names one: 125."""
    nowhere = str(world.home / "nothing.sock")
    for words, code in ((("get",), 5), (("scale", "first", "2"), 5), (("run", "--", "true"), 125)):
        done = world.ctl("--agent", nowhere, *words, check=code)
        assert nowhere in done.stderr and "next: " in done.stderr
