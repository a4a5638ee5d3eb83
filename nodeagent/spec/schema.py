"""The JSON Schemas of the job file and the agent's config, for editors and other tools. Generated from the models,
kept in ``schemas/``: ``python -m nodeagent.spec.schema`` writes them anew."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.jobfile import ROLE_KEYS, JobFile

SCHEMAS = Path(__file__).with_name("schemas")


class _Described(GenerateJsonSchema):
    """Each key with the docstring below it."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """The schema of one section."""
        out = super().model_schema(schema)
        words = _docstrings(schema["cls"])
        for name, value in out.get("properties", {}).items():
            if name in words:
                value.setdefault("description", words[name])
        return out


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """What stands below each key in the source."""
    section = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(section, ast.ClassDef)
    out = {}
    for key, below in zip(section.body, section.body[1:], strict=False):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                out[name] = inspect.cleandoc(text)
            case _:
                pass
    return out


def job_schema() -> dict[str, Any]:
    """What a job file may hold: either ``command`` and ``nodes``, or ``roles``."""
    schema = JobFile.model_json_schema()
    beside = {"anyOf": [{"required": [key]} for key in ROLE_KEYS]}
    either = [
        {"required": ["command", "nodes"], "not": {"required": ["roles"]}},
        {"required": ["roles"], "not": beside},
    ]
    schema["properties"]["roles"] |= {"minProperties": 1}
    return _finished(schema | {"oneOf": either}, "nodeagent job file")


def agent_schema() -> dict[str, Any]:
    """What an agent's config may hold."""
    return _finished(AgentConfig.model_json_schema(schema_generator=_Described), "nodeagent agent config")


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
