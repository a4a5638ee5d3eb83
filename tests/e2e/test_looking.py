"""``get``, ``nodes`` and ``logs`` tell what is so, also when the gang has just changed or a node is gone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.e2e.support import CALL_LIMIT, Cluster, bounded

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
NODES = 2

SAYS = """
import os, pathlib, sys, time
def say(text):
    print(text, "of", os.environ["NODEAGENT_GENERATION"], "on", os.environ["NODEAGENT_NODE"], flush=True)
say("begin")
while not pathlib.Path("finish").exists():
    time.sleep(0.1)
say("end")
"""


@pytest.fixture
def pair(calm: Cluster) -> Cluster:
    """A job on both nodes that can do with one."""
    (calm.work / "finish").unlink(missing_ok=True)
    spec = {
        "name": "says", "command": [sys.executable, "-c", SAYS], "nodes": {"min": 1, "max": 2, "target": 2},
        "workers_per_node": 1, "grace": "1s",
    }  # fmt: skip
    calm.submit(json.dumps(spec))
    calm.until_running("says", 2)
    calm.until(lambda: calm.ctl("logs", "says").stdout.count("begin") == 2, 20, "both have begun")
    return calm


def test_after_a_scale_in_only_the_nodes_that_are_left_are_shown(pair: Cluster) -> None:
    first = pair.job("says")["generation"]
    pair.ctl("scale", "says", "1")
    pair.until_running("says", 1, above=first)  # what is shown of a pod follows its change by a beat
    job = pair.json("get", "says")
    assert [(p["node"], p["phase"]) for p in job["pods"]] == [(job["chief"], "running")]
    row = pair.ctl("get").stdout.splitlines()[-1].split()
    assert (row[0], row[1], row[-1]) == ("says", "RUNNING", job["chief"])
    pods = {n["name"]: [p["job"] for p in n["pods"]] for n in pair.json("nodes")["items"]}
    assert pods == {n: ["says"] if n == job["chief"] else [] for n in ("n1", "n2")}


def test_a_dead_node_is_no_longer_shown_and_is_named_in_the_logs_and_the_other_goes_on(pair: Cluster) -> None:
    first = pair.job("says")["generation"]
    with bounded(pair.start("logs", "says", "-f")) as following:
        begun = {read_line(following), read_line(following)}
        pair.ctl("local", "kill", "n2")
        pair.until_running("says", 1, above=first)
        assert [p["node"] for p in pair.json("get", "says")["pods"]] == ["n1"], "not what n2 said before it died"
        pair.until(lambda: f"begin of {first + 1} on n1" in pair.ctl("logs", "says").stdout, 20, "n1 begins again")

        both = pair.ctl("logs", "says", "--previous")
        assert f"begin of {first} on n1" in both.stdout
        assert "n2" in both.stderr and "does not answer" in both.stderr

        (pair.work / "finish").touch()
        pair.until_phase("says", "succeeded")
        out, err = following.communicate(timeout=CALL_LIMIT)
    assert following.returncode == 0, err
    assert {line.partition(": ")[2] for line in begun} == {f"begin of {first} on n1\n", f"begin of {first} on n2\n"}
    after = first + 1
    assert out.splitlines() == [f"[0]<stdout>: begin of {after} on n1", f"[0]<stdout>: end of {after} on n1"]
    assert "n2" in err and "does not answer" in err


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_shell_takes_the_completion_script(shared: Cluster, shell: str) -> None:
    script = shared.ctl("completion", shell).stdout
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True, timeout=CALL_LIMIT)


@pytest.mark.parametrize("command", ["describe", "drain"])
def test_the_shell_completes_names(shared: Cluster, command: str) -> None:
    asks = {"_NODEAGENTCTL_COMPLETE": "bash_complete", "COMP_WORDS": f"nodeagentctl {command} n", "COMP_CWORD": "2"}
    asking = Cluster(shared.home, shared.work, {**shared.environ, **asks})
    assert "plain,n1" in asking.ctl().stdout.splitlines()
