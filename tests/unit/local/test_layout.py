"""Where local clusters lie."""

from __future__ import annotations

from pathlib import Path

from nodeagent.ctl.where import ENV
from nodeagent.local.layout import HOME_VARIABLE


def test_the_variable_that_moves_them_is_in_the_reference_of_the_tool() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    assert all(f"`{variable}`" in reference for variable in (ENV, HOME_VARIABLE))
