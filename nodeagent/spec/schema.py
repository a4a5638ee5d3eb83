"""The JSON Schemas of the job file and the agent's config, for editors and other tools. Generated from the models,
kept in ``schemas/``: ``python -m nodeagent.spec.schema`` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.jobfile import ROLE_KEYS, JobFile

SCHEMAS = Path(__file__).with_name("schemas")


def job_schema() -> dict[str, Any]:
    """What a job file may hold: either ``command`` and ``nodes``, or ``roles``."""
    schema = JobFile.model_json_schema()
    beside = {"anyOf": [{"required": [key]} for key in ROLE_KEYS]}
    either = [
        {"required": ["command", "nodes"], "not": {"required": ["roles"]}},
        {"required": ["roles"], "not": beside},
    ]
    schema["properties"]["roles"] |= {"minProperties": 1, "maxProperties": 1}
    return _finished(schema | {"oneOf": either}, "nodeagent job file")


def agent_schema() -> dict[str, Any]:
    """What an agent's config may hold."""
    return _finished(AgentConfig.model_json_schema(), "nodeagent agent config")


def _finished(schema: dict[str, Any], title: str) -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title} | {
        key: _plain(value, named=key in ("properties", "$defs")) for key, value in schema.items() if key != "title"
    }


def _plain(node: Any, *, named: bool) -> Any:
    """Without what pydantic makes up: titles, and defaults of whole sections, which may not be written so. ``named``:
    the keys are names, not keywords."""
    if isinstance(node, list):
        return [_plain(item, named=False) for item in node]
    if not isinstance(node, dict):
        return node
    drop = {"title"} | ({"default"} if isinstance(node.get("default"), dict) else set())
    return {k: _plain(v, named=k in ("properties", "$defs")) for k, v in node.items() if named or k not in drop}


def render(schema: dict[str, Any]) -> str:
    """A schema as the text of its file."""
    return json.dumps(schema, indent=2) + "\n"


def main() -> None:
    """Write the schema files anew."""
    SCHEMAS.mkdir(exist_ok=True)
    for name, schema in (("job", job_schema()), ("agent", agent_schema())):
        (SCHEMAS / f"{name}.schema.json").write_text(render(schema))


if __name__ == "__main__":
    main()
