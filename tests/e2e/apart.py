"""One more agent for a local cluster, in a mount namespace of its own: what is mounted there only its jobs see, and it
goes with the last of its processes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from tests.e2e.support import Cluster, bounded


def why_not() -> str:
    """Why it cannot be had here; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "no unshare or nsenter"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    return "" if done.returncode == 0 else "no mount namespaces for this user"


@contextmanager
def agent_apart(one: Cluster, name: str, mount: str) -> Iterator[subprocess.Popen[str]]:
    """The agent of node ``name``, a copy of n1's, started after the shell command ``mount``, in the work folder."""
    config = yaml.safe_load(next(one.home.glob("local/data/*/n1/agent.yaml")).read_text())
    config["node"]["id"] = name
    config["dirs"] = {kind: str(one.home / name / kind) for kind in config["dirs"]}
    file = one.work / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    agent = [sys.executable, "-m", "nodeagent.agent.main", "run", "--config", str(file)]
    mounted = ["sh", "-c", f'{mount} && exec "$@"', "sh", *agent]
    with (one.work / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", *mounted], env=one.environ, cwd=one.work, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, text=True,
        )  # fmt: skip
    with bounded(process):
        yield process
        process.send_signal(signal.SIGINT)  # orderly: it stops its workers and leaves
        process.wait(30)
