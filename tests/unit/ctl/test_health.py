"""The help of ``health``."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from nodeagent.ctl.main import cli


@pytest.mark.parametrize("verb", ["ack", "inject"])
def test_the_help_promises_no_memory_of_the_request(verb: str) -> None:
    shown = " ".join(CliRunner().invoke(cli, ["health", verb, "--help"]).output.split())
    assert "it is not remembered: asked again, it is done again" in shown
