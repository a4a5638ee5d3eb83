"""The ``limits`` section of the agent's config: what one user may have and ask for, and who may submit what.

Must never look up a user or a group: ``nodeagent/api`` does.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from nodeagent.model.jobspec import MOST_RESTARTS
from nodeagent.spec import units
from nodeagent.spec.errors import CheckError
from nodeagent.spec.section import Section


def _names(value: object) -> object:
    if isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value):
        return tuple(value)
    raise CheckError(f"{units.show(value)} is not a list of names", "write for instance [alice, bob]")


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class SubmitConfig(Section):
    """Who may submit jobs: with neither list everybody, else those on one of them. Root, the agent's own user and
    operators always may."""

    users: Names = ()
    """Users by name."""
    groups: Names = ()
    """Unix groups whose members may."""


class LimitsConfig(Section):
    """What one user may have and ask for. Root and the agent's own user have no limits, nor have operators."""

    jobs: int = Field(default=100, ge=1, le=1_000_000)
    """Most live jobs of one user in the cluster."""
    job_bytes: Annotated[
        int,
        BeforeValidator(units.size),
        WithJsonSchema({"type": ["string", "integer"], "examples": ["16MiB"]}),
        Field(ge=256 * 1024),
    ] = 16 * 1024**2
    """Most bytes that the specs of one user's jobs take in the cluster, ended ones that are kept included."""
    requests: int = Field(default=50, ge=1, le=100_000)
    """Requests a second that this agent answers one user in the long run; twice as many at once."""
    concurrent: int = Field(default=32, ge=1, le=100_000)
    """Requests of one user that this agent answers at the same time, followers included."""
    followers: int = Field(default=16, ge=1, le=100_000)
    """Logs and events that one user follows at this agent at the same time."""
    nodes_per_job: int | None = Field(default=None, ge=1)
    """Most nodes that a job may ask for. Default: any number."""
    restarts_per_job: int | None = Field(default=None, ge=0, le=MOST_RESTARTS)
    """Most restarts that a job may ask for, within an hour or longer. Default: what the job asks for."""
    submit: SubmitConfig = SubmitConfig()
