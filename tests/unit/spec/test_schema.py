"""The packaged JSON Schemas: current, and of one mind with the readers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from nodeagent.spec.schema import SCHEMAS, agent_schema, job_schema, render
from nodeagent.spec.yamlfile import load
from tests.unit.spec.helpers import job
from tests.unit.spec.test_agentconfig import SAMPLE, in_use, parse
from tests.unit.spec.test_jobfile import CONTRACT, FIVE, LEAST


@pytest.mark.parametrize(("name", "schema"), [("job", job_schema()), ("agent", agent_schema())])
def test_the_files_are_current(name: str, schema: dict[str, Any]) -> None:
    current = (SCHEMAS / f"{name}.schema.json").read_text()
    assert current == render(schema), "run: python -m nodeagent.spec.schema"
    Draft202012Validator.check_schema(json.loads(current))


def _fits(schema: dict[str, Any], text: str) -> bool:
    return bool(Draft202012Validator(schema).is_valid(load(text, "f").value))


@pytest.mark.parametrize(
    "text",
    [
        CONTRACT,
        LEAST,
        LEAST + "fork_server: off\nhang: off\nhold_timeout: never\ngrace: 5\nrestarts: {backoff: 5s}",
        LEAST + 'policies: [{on: "*", do: FailJob}]\nhooks: {pre_start: a b}',
        "name: a\nroles: {w: {command: x, nodes: {max: 3}}}",
        LEAST + "hang: {progress: 10m, phases: 1h}",
        LEAST + "hang: auto",
    ],
)
def test_what_is_read_fits(text: str) -> None:
    job(text)
    assert _fits(job_schema(), text)


@pytest.mark.parametrize(
    "text",
    [
        FIVE,
        "name: a",
        LEAST + "comand: x",
        LEAST + "env: {A: 1}",
        LEAST + "uneven: yes",
        LEAST + "roles: {w: {command: x, nodes: 1}}",
        LEAST + "hang: {phases: 10m}",
        LEAST + "hang: on",
        LEAST + "policies: [{on: Nothing, do: FailJob}]",
        "name: a\ncommand: []\nnodes: 1",
        "name: a\ncommand: x\nnodes: {target: 1}",
    ],
)
def test_what_is_refused_does_not_fit(text: str) -> None:
    assert not _fits(job_schema(), text)


def test_agent_config() -> None:
    used = in_use(SAMPLE.read_text())
    parse(used)
    assert _fits(agent_schema(), used)
    assert not _fits(agent_schema(), "nod: {}")
    assert not _fits(agent_schema(), "timing: {heartbeats: 1s}")
