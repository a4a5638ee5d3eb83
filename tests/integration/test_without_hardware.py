"""An agent that was installed without ``nodeagent/hardware``: it runs jobs, and says what it does not watch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from nodeagent.ctl.terminal import CtlError
from nodeagent.local.privateredis import PrivateRedis
from tests.folders import short
from tests.integration.test_api_away import RealAgent, ctl

pytestmark = pytest.mark.redis
WITHOUT = "import sys; sys.modules['nodeagent.hardware'] = None; from nodeagent.agent.main import main; main()"


def test_an_agent_without_hardware_runs_jobs_and_says_what_it_does_not_watch() -> None:
    with tempfile.TemporaryDirectory(prefix="na-without-", dir=short()) as folder, PrivateRedis() as redis:
        agent = RealAgent(Path(folder), redis, ("-c", WITHOUT))
        try:
            agent.until(agent.socket.exists, "the agent answers")
            agent.until(lambda: agent.client.get("/v1/nodes")["items"] != [], "the node joins")
            (node,) = agent.client.get("/v1/nodes")["items"]
            assert (node["state"], node["gpus"], node["verdicts"]) == ("ready", [], [])
            done = ctl(agent.socket, "run", "--name", "sleeper", "--", "true")
            assert done.exit_code == 0, done.output
            assert agent.job()["phase"] == "succeeded"
            found = [f["what"] for f in agent.client.get("/v1/doctor")["items"] if f["where"] == "node/n1"]
            assert "the hardware is not watched, and no GPU is offered: nodeagent.hardware is not installed" in found
            for method, path in (
                ("GET", "/v1/health/rules"), ("POST", "/v1/nodes/n1/diag"), ("POST", "/v1/nodes/n1/health/ack"),
            ):  # fmt: skip
                with pytest.raises(CtlError, match=r"is not watched: nodeagent\.hardware is not installed"):
                    agent.client.change(method, path)
            assert "the hardware is not watched" in (agent.folder / "agent.log").read_text()
        finally:
            agent.end()
