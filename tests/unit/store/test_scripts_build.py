"""Agents of one version number whose steps or records are others do not take each other for the same."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import nodeagent
from nodeagent.store import scripts

PARTS = ("store/scripts/ack.lua", "model/world.py")


def version_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(scripts, "files", lambda package: folder.joinpath(*package.split(".")[1:]))
    return scripts.version.__wrapped__()


@pytest.mark.parametrize("part", PARTS)
def test_another_step_or_record_makes_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    here = Path(nodeagent.__file__).parent
    for folder in ("store/scripts", "model"):
        shutil.copytree(here / folder, tmp_path / folder)
    before = version_of(tmp_path, monkeypatch)
    assert re.fullmatch(re.escape(nodeagent.__version__) + r"\+[0-9a-f]{8}", before)
    assert before == scripts.version()
    file = tmp_path / part
    file.write_text(file.read_text() + "\n")
    assert version_of(tmp_path, monkeypatch) != before
