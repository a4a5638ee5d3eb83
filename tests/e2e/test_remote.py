"""Several machines as far as the API goes: agents that reach each other over https alone, and the tool with a token.

The agents' unix sockets are away while their output is asked for, so that nobody can go the short way.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeagent.ctl.client import Client
from nodeagent.ctl.terminal import NoAgentError
from nodeagent.ctl.where import Where
from tests.e2e.support import Cluster, bounded, cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]

ME = pwd.getpwuid(os.geteuid()).pw_name
TALKS = "i=0; while [ ! -e {stop} ]; do i=$((i+1)); echo $NODEAGENT_GENERATION says $i; sleep 0.1; done"


@pytest.fixture
def remote() -> Iterator[Cluster]:
    """Three nodes that serve each other over https, and let three tokens in."""
    with cluster(0) as one:
        entries = {"mine": f"user: {ME}", "strangers": "user: nobody", "reads": "may: read"}
        lines = ["tokens:"]
        for name, entry in entries.items():
            secret = one.work / f"{name}.token"
            secret.touch(mode=0o600)
            secret.write_text(f"{name}-of-the-test")
            lines.append(f'  {name}: {{sha256: "{hashlib.sha256(secret.read_bytes()).hexdigest()}", {entry}}}')
        tokens = one.work / "tokens.yaml"
        tokens.touch(mode=0o600)
        tokens.write_text("\n".join(lines))
        one.environ |= {"NODEAGENT__API__LISTEN": "127.0.0.1", "NODEAGENT__API__TOKENS": str(tokens)}
        one.up(3)
        one.until(lambda: all(n["https"] for n in one.ask("/v1/nodes")["items"]), 20, "every node serves https")
        yield one


def job(work: Path, name: str = "talk", nodes: str = "1:3") -> str:
    command = TALKS.format(stop=work / f"{name}.stop")
    return f"name: {name}\ncommand: [sh, -c, '{command}']\nnodes: {nodes}\nworkers_per_node: 1\ngrace: 1s\n"


@contextmanager
def alone(remote: Cluster, node: str) -> Iterator[list[str]]:
    """Only this node's socket is there: ``--agent`` for the tool."""
    sockets = {path.parent.name: path for path in remote.home.glob("local/run/*/*/api.sock")}
    away = {path: path.with_suffix(".away") for name, path in sockets.items() if name != node}
    for path, hidden in away.items():
        path.rename(hidden)
    try:
        yield ["--agent", str(sockets[node])]
    finally:
        for path, hidden in away.items():
            if hidden.exists() and not path.exists():
                hidden.rename(path)


def printed(file: Path, *words: str) -> bool:
    return all(word in file.read_text() for word in words)


def test_output_of_all_nodes_is_followed_over_faults(remote: Cluster) -> None:
    remote.submit(job(remote.work))
    remote.until_running("talk", 3)
    out, err = remote.work / "out", remote.work / "err"
    with alone(remote, "n1") as agent:
        output = remote.ctl(*agent, "logs", "talk", "--tail", "60")
        assert output.stderr == ""
        remote.until(
            lambda: len({x[:3] for x in remote.ctl(*agent, "logs", "talk").stdout.splitlines()}) == 3,
            20, "lines of three ranks, of which n1 has one",
        )  # fmt: skip
        with out.open("w") as stdout, err.open("w") as stderr:
            command = remote.start(*agent, "logs", "talk", "-f", to=(stdout, stderr))
            with bounded(command):
                remote.until(lambda: printed(out, "[0]<", "[1]<", "[2]<"), 20, "three ranks are followed")
                os.kill(remote.workers("talk", "n2").popitem()[1], signal.SIGKILL)
                remote.until(lambda: printed(out, "[0]<stdout>: 2 says", "[1]<stdout>: 2 says"), 30, "generation 2")
                remote.frozen.add("n3")
                remote.ctl("local", "kill", "n3")
                remote.until(lambda: printed(err, "node n3 does not answer"), 30, "the dead node is named")
                grown = out.stat().st_size
                remote.until(lambda: out.stat().st_size > grown + 500, 30, "the others go on")
                (remote.work / "talk.stop").touch()
                assert command.wait(30) == 0, err.read_text()
    lines = out.read_text().splitlines()
    assert len(lines) == len(set(lines)), "no line twice"
    for rank in (0, 1, 2):
        mine = [int(x.split()[-1]) for x in lines if x.startswith(f"[{rank}]<stdout>: 1 says")]
        assert mine == list(range(1, len(mine) + 1)), "and none left out"


def test_the_tool_over_https_with_a_token(remote: Cluster) -> None:
    node = remote.node("n2")

    def ctl(who: str, *words: str, fingerprint: str = node["fingerprint"]) -> subprocess.CompletedProcess[str]:
        token = str(remote.work / f"{who}.token")
        trust = ["--agent", node["https"], "--fingerprint", fingerprint, "--token-file", token]
        return remote.ctl(*trust, *words, check=None)

    file = remote.work / "job.yaml"
    file.write_text(job(remote.work, nodes="2"))
    assert ctl("reads", "submit", str(file)).returncode == 6
    done = ctl("mine", "submit", str(file))
    assert done.returncode == 0, done.stderr
    remote.until_running("talk", 2)
    assert remote.job("talk")["owner"] == ME
    stranger = ctl("strangers", "stop", "talk")
    assert stranger.returncode == 6
    assert "nobody may read it, not change it" in stranger.stderr
    assert ctl("strangers", "get", "-o", "name").stdout == "job/talk\n"
    remote.until(lambda: "[1]<stdout>: 1 says" in ctl("mine", "logs", "talk").stdout, 20, "its output is there")
    for who in ("reads", "strangers"):
        refused = ctl(who, "logs", "talk")
        assert (refused.returncode, refused.stdout) == (6, "")
        assert f"is for {ME} and operators" in refused.stderr
    wrong = ctl("mine", "stop", "talk", fingerprint="0" * 64)
    assert wrong.returncode == 5
    assert "nothing was sent" in wrong.stderr
    with pytest.raises(NoAgentError, match="is not trusted"):
        Client([], remote=Where(node["https"])).get("/v1/jobs")
    assert remote.job("talk")["phase"] == "running"
    assert ctl("mine", "stop", "talk").returncode == 0
    remote.until_phase("talk", "stopped")  # another agent than the one that took it is asked
