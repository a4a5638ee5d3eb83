"""The sample scrape config, used as it is: a real Prometheus reads an agent over https, known by a token, and nobody
without it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.prometheus_support import PROMETHEUS, WHY_NOT, Prometheus, prometheus, sample, until
from tests.integration.remote_support import ADDRESS, TOKENS, https, make_ca, sign, token, write_tokens
from tests.unit.api.fakes import LiveAgent, live_agent, spec

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason=WHY_NOT)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, allow_root=False) as started:
        yield started


@pytest.mark.parametrize(("who", "error"), [("reads", ""), ("stranger", "401")])
def test_prometheus_reads_over_https_with_a_token_only(agent: LiveAgent, tmp_path: Path, who: str, error: str) -> None:
    agent.submit(spec())
    ca = make_ca(tmp_path, "nodeagent-ca")
    pair = sign(tmp_path, ca, "n1")
    Path(token(tmp_path, who)).rename(tmp_path / "nodeagent.token")
    tls = {"cert": str(pair.cert), "key": str(pair.key)}
    with (
        https(agent, agent.view, tokens=str(write_tokens(tmp_path / "tokens.yaml", TOKENS)), tls=tls) as door,
        prometheus(tmp_path, sample([f"{ADDRESS}:{door.port}"])) as server,
    ):
        up = 'up{job="nodeagent", cluster="default"}'
        limit = 'nodeagent_budget_limit{job="digits", cluster="default"}'

        def reported() -> bool:
            """By one scrape: any may take longer than the second that it has."""
            message = "".join(target["lastError"] for target in targets(server))
            values = (server.value(up), server.value(limit))
            return error in message and values == ((0, None) if error else (1, 10))

        until(reported, lambda: f"not scraped as it should be: {targets(server)}")


def targets(server: Prometheus) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/api/v1/targets")["activeTargets"]
    return found
