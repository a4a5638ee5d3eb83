"""Jobs that cannot start, and what happens around a start: each failure is told once, with its reason."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
NODES = 2

PYTHON = sys.executable


def submit(calm: Cluster, name: str, command: list[str], **more: object) -> None:
    spec = {"name": name, "command": command, "nodes": 2, "workers_per_node": 1}
    calm.submit(json.dumps(spec | more))


def failed(calm: Cluster, name: str) -> dict[str, Any]:
    job = calm.until_phase(name, "failed")
    assert job["reason"] in calm.ctl("describe", name).stdout
    return job


def test_a_command_that_does_not_exist(calm: Cluster) -> None:
    done = calm.ctl("run", "--nodes", "2", "--nproc-per-node", "1", "--name", "typo", "--", "pyhton", "x.py", check=127)
    job = calm.job("typo")
    assert (job["phase"], job["outcome"]["code"], job["generation"] <= 1) == ("failed", 127, True)
    assert "pyhton" in done.stderr


def test_a_script_that_does_not_exist(calm: Cluster) -> None:
    words = ("run", "--nodes", "2", "--nproc-per-node", "1", "--name", "gone", "--", PYTHON, "nosuch.py")
    done = calm.ctl(*words, check=2)
    assert "nosuch.py" in done.stderr and "No such file" in done.stderr
    assert calm.job("gone")["generation"] == 1


def test_a_working_folder_that_does_not_exist(calm: Cluster) -> None:
    missing = str(calm.work / "missing")
    submit(calm, "folder", [PYTHON, "-c", "pass"], working_dir=missing)
    job = failed(calm, "folder")
    assert f"{missing} is missing" in job["reason"]
    assert "n1" in job["reason"] and "n2" in job["reason"]
    assert job["generation"] == 0, "nothing was started"


def test_a_script_that_fails_at_its_start_is_not_tried_eleven_times(calm: Cluster) -> None:
    script = "import os; open('tries', 'a').write(os.environ['RANK']); raise SystemExit('no data set: ' + 7 * 'x')"
    submit(calm, "broken", [PYTHON, "-c", script])
    job = failed(calm, "broken")
    tries = (calm.work / "tries").read_text()
    assert len(tries) == len(set(tries)), "no rank was started twice"
    assert (job["generation"], job["outcome"]["code"]) == (1, 1)
    output = calm.ctl("describe", "broken").stdout
    assert "no data set: xxxxxxx" in output and "exit code 1" in output


def test_a_module_that_cannot_be_preloaded_means_a_cold_start_that_says_so(calm: Cluster) -> None:
    (calm.work / "plain.py").write_text("import time; print('started', flush=True); time.sleep(600)\n")
    submit(calm, "cold", [PYTHON, "plain.py"], preload=["json", "no_such_module"])
    calm.until_running("cold", 2)
    output = calm.ctl("describe", "cold")
    assert "no_such_module" in output.stdout, output.stdout
    calm.until(lambda: calm.ctl("logs", "cold").stdout.count("started") == 2, 20, "both ranks print")


HOOK = "import os; open('hooks', 'a').write(os.environ['NODEAGENT_NODE'] + ' {what}\\n')"


def test_hooks_and_the_env_file(calm: Cluster) -> None:
    (calm.work / "secrets").write_text("# of this node\nSECRET='s3cret'\n")
    script = (
        "import os; ready = open('hooks').read().split(); assert os.environ['NODEAGENT_NODE'] in ready;"
        "print(os.environ['SECRET'])"
    )
    hooks = {
        "pre_start": [PYTHON, "-c", HOOK.format(what="pre")],
        "post_stop": [PYTHON, "-c", HOOK.format(what="post")],
    }
    submit(calm, "hooked", [PYTHON, "-c", script], hooks=hooks, env_file="secrets")
    calm.until_phase("hooked", "succeeded")

    def seen() -> list[str]:
        return sorted((calm.work / "hooks").read_text().splitlines())

    calm.until(lambda: seen() == ["n1 post", "n1 pre", "n2 post", "n2 pre"], 20, "each hook ran once on each node")
    assert calm.ctl("logs", "hooked").stdout.count("s3cret") == 2
    for shown in (calm.ctl("get", "hooked", "-o", "json"), calm.ctl("describe", "hooked"), calm.ctl("events")):
        assert "s3cret" not in shown.stdout, "never stored"


def test_an_env_file_that_is_missing(calm: Cluster) -> None:
    submit(calm, "unsecret", [PYTHON, "-c", "pass"], env_file="nowhere")
    assert str(calm.work / "nowhere") in failed(calm, "unsecret")["reason"]


def test_a_pre_start_that_fails_is_shown(calm: Cluster) -> None:
    hook = [PYTHON, "-c", "import sys; sys.exit('the scratch disk is full')"]
    submit(calm, "unhooked", [PYTHON, "-c", "pass"], hooks={"pre_start": hook}, restarts={"max": 1, "backoff": 0})
    failed(calm, "unhooked")
    output = calm.ctl("describe", "unhooked").stdout
    assert "pre_start" in output and "the scratch disk is full" in output
    assert not calm.ctl("logs", "unhooked").stdout
