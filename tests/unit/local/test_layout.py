"""Where local clusters lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.ctl.where import ENV
from nodeagent.local.layout import HOME_VARIABLE, LocalError, LocalFolders


def test_the_variable_that_moves_them_is_in_the_reference_of_the_tool() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    assert all(f"`{variable}`" in reference for variable in (ENV, HOME_VARIABLE))


def test_a_user_without_a_home_learns_which_variable_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a uid of no account."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (HOME_VARIABLE, "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(LocalError, match=f"uid 4321 has no home folder: set HOME or {HOME_VARIABLE}"):
        LocalFolders.of_user()
