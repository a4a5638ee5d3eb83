"""The reference documents name every key, and what they show as a tool's answer is its answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import get_args

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from nodeagent.ctl.main import cli
from nodeagent.model.jobspec import ActionName, EventName, JobSpec
from nodeagent.spec import jobvalues
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.check import annotation_at
from nodeagent.spec.errors import Path as KeyPath
from nodeagent.spec.jobfile import JobFile
from tests.unit.spec.helpers import job

ROOT = Path(__file__).parents[3]
JOB_FILE = (ROOT / "docs" / "job-file.md").read_text()
CONFIG = (ROOT / "docs" / "config.md").read_text()


def _keys(model: type[BaseModel], path: KeyPath = ()) -> Iterator[str]:
    """Every key of the model and of the models inside of it."""
    for name in annotation_at(model, path).model_fields:
        yield name
        inner = annotation_at(model, (*path, name))
        deeper: KeyPath = (*path, name, *([0] if get_args(inner) else []))
        found = annotation_at(model, deeper)
        if isinstance(found, type) and issubclass(found, BaseModel):
            yield from _keys(model, deeper)


@pytest.mark.parametrize(("text", "model"), [(JOB_FILE, JobFile), (CONFIG, AgentConfig)])
def test_every_key_is_in_the_document(text: str, model: type[BaseModel]) -> None:
    keys = set(_keys(model))
    assert len(keys) > 25
    assert not {k for k in keys if f"`{k}`" not in text}


@pytest.mark.parametrize("key", sorted(set(_keys(AgentConfig))))
def test_every_key_is_in_the_sample(key: str) -> None:
    sample = (ROOT / "config" / "nodeagent.yaml").read_text()
    assert re.search(rf"^# *{key}:", sample, re.MULTILINE)


def test_the_table_of_the_top_level_has_every_key() -> None:
    table = CONFIG.partition("## Top level\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(AgentConfig.model_fields)


def test_the_list_of_what_is_recorded_is_that() -> None:
    listed = JOB_FILE.partition("With the job are recorded,")[2].partition(". ")[0]
    assert tuple(re.findall(r"`(\w+)`", listed)) == jobvalues.RECORDED


def test_every_word_of_a_job_is_in_the_document() -> None:
    for word in (*get_args(EventName), *get_args(ActionName), *jobvalues.RECORDED):
        assert f'`"{word}"`' in JOB_FILE or f"`{word}`" in JOB_FILE, word
    assert " ".join(jobvalues.LIMITS) in JOB_FILE


def test_every_field_of_a_job_can_be_written() -> None:
    recorded = {"submitter", "guessed"}  # by the tool
    assert set(JobSpec.model_fields) - recorded <= set(JobFile.model_fields)


def test_the_example_is_read() -> None:
    block = JOB_FILE.split("```yaml\n")[1].split("```")[0]
    assert job(block).role.nodes.target == 4


def test_the_shown_mistakes_are_what_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("name: a\ncomand: x\nnodes: 8:2\nenv: {OMP_NUM_THREADS: 4}\ngrace: 30 sec\n")
    shown = JOB_FILE.partition("    $ nodeagentctl validate job.yaml\n")[2].partition("\n\n")[0] + "\n"
    assert CliRunner().invoke(cli, ["validate", "job.yaml"]).stderr == dedent(shown)
