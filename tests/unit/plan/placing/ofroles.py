"""Roles, sites and jobs of several roles in few words, for the tests of their places. Builds records only."""

from __future__ import annotations

from nodeagent.model.jobspec import JobSpec, Nodes, Role
from tests.unit.plan.build import make_spec


def role(name: str, *, nodes: int = 0, replicas: int = 0, workers: int = 1, gpus: int = 0, least: int = 0) -> Role:
    """Elastic with ``least``."""
    size = nodes or replicas
    places = Nodes(min=least or size, max=size, target=size)
    return Role(
        name=name, command=("x",), nodes=places if nodes else Nodes(min=1, max=size, target=size),
        replicas=None if nodes else places, workers_per_node=workers, gpus_per_worker=gpus,
    )  # fmt: skip


def roles_spec(*roles: Role, **more: object) -> JobSpec:
    return make_spec().model_copy(update={"roles": roles, **more})


TWO = (role("pserver", replicas=2), role("trainer", nodes=2))
SERVERS = role("server", replicas=2)
TRAINERS = role("trainer", nodes=4, least=2)
BOTH = (SERVERS, TRAINERS)
