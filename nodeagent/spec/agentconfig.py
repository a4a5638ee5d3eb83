"""The agent's configuration: every key, its default and its limits. Reading it from a file is ``configfile``'s work.

Must never touch the machine: what depends on it (hostname, uid, the kernel's port range) comes in as an argument.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from nodeagent.model.base import NAME
from nodeagent.model.constraints import NODE
from nodeagent.model.node import MOST_CPU_SLOTS, MOST_LEVELS
from nodeagent.model.timing import Timing
from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, raise_all
from nodeagent.spec.healthconfig import HealthConfig, health_or_off, or_off
from nodeagent.spec.sections import ApiConfig, File, Folder, LimitsConfig, OptionalFile, Section, host
from nodeagent.spec.storeconfig import RedisConfig

_WORDS: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}


def _command(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
        raise CheckError(f"{units.show(value)} is not a command", "write its words as a list: [/usr/local/sbin/notice]")
    return tuple(value)


class NoticeConfig(Section):
    """How this machine's owner says that it takes the machine away: a file, a command, or either of them."""

    file: OptionalFile = None
    """The notice is there as soon as this file is."""
    command: Annotated[tuple[str, ...] | None, BeforeValidator(_command), WithJsonSchema(_WORDS)] = None
    """Its words. It is run again and again, for 5 seconds at most; the notice is there when its exit code is 0."""
    every: Annotated[
        float,
        BeforeValidator(units.duration),
        WithJsonSchema({"type": ["string", "number"], "examples": ["5s"]}),
        Field(ge=0.5, le=60),
    ] = 5.0
    """From one look to the next."""

    @model_validator(mode="after")
    def _from_somewhere(self) -> Self:
        if self.file is None and self.command is None:
            raise_all([CheckError("nothing says where a notice comes from", "write file or command")])
        return self


MIN_RENDEZVOUS_PORTS = 64
"""Fewest rendezvous ports: one per forming generation on this machine, and none is used twice in a row."""

_DURATION_SCHEMA = {"type": ["string", "number"], "examples": ["500ms", "30s"]}


def _gpus(value: object) -> object:
    if value in ("auto", "none"):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value):
        return tuple(value)
    raise CheckError(f"{units.show(value)} is not a choice of GPUs", "write auto, none, or a list of GPU UUIDs")


def _node_id(value: object) -> object:
    if value is not None and not (isinstance(value, str) and re.fullmatch(NAME, value)):
        raise CheckError(
            f"{units.show(value)} is not a node id",
            "use 1 to 63 of a-z, 0-9, '-' and '.', starting and ending with a letter or digit",
        )
    return value


def _cluster(value: object) -> object:
    if not (isinstance(value, str) and re.fullmatch(r"[a-z0-9-]{1,40}", value)):
        raise CheckError(f"{units.show(value)} is not a cluster name", "use 1 to 40 of a-z, 0-9 and '-'")
    return value


def _labels(value: dict[str, str]) -> dict[str, str]:
    if NODE in value:
        raise CheckError(f"'{NODE}' is the node's own name in a job's placement", "choose another label")
    return value


def _topology(value: object) -> object:
    good = isinstance(value, list | tuple) and all(isinstance(v, str) and v and v != NODE for v in value)
    if not good or not isinstance(value, list | tuple):
        raise CheckError(f"{units.show(value)} is not a list of labels", "write for instance [zone, rack, switch]")
    if len(set(value)) < len(value) or len(value) > MOST_LEVELS:
        raise CheckError("a label is named twice, or too many are", f"name each once, {MOST_LEVELS} at most")
    return tuple(value)


class NodeConfig(Section):
    """Who this node is and what it offers."""

    id: Annotated[str | None, BeforeValidator(_node_id)] = None
    """This node's name in the cluster, for ever the same. Default: the short hostname in lower case."""
    address: Annotated[str | None, BeforeValidator(lambda value: None if value is None else host(value))] = None
    """Where peers and workers reach this node. Default: the environment's POD_IP, else found by the agent."""
    data_interface: str | None = Field(default=None, min_length=1)
    """Network interface for training traffic: sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME unless the job does."""
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = {}
    """Words about the node, which a job's `placement` may ask for; `nodeagentctl nodes -o wide` shows them."""
    spot: bool = False
    """Whether this machine may be taken away at short notice: only jobs that can go on without it use it, and those
    that say `spot: allow`."""
    notice: NoticeConfig | None = None
    """How the machine's owner says that it takes the machine away; the node's work then moves to others in time."""
    cpu_slots: int | None = Field(default=None, ge=0, le=MOST_CPU_SLOTS)
    """Workers without a GPU that run here at once. Default: the number of CPUs."""
    gpus: Annotated[Literal["auto", "none"] | tuple[str, ...], BeforeValidator(_gpus)] = "auto"
    """`auto`: all that NVML and plug-ins find; `none`; or the UUIDs of NVIDIA's that may be used."""


class PortsConfig(Section):
    """Ports this node listens on."""

    api: int = Field(default=9470, ge=0, le=65535)
    """Health and metrics over HTTP on loopback, and the API over https on `api.listen`; 0 takes any free ports."""
    rendezvous: Annotated[
        tuple[int, int],
        BeforeValidator(units.port_range),
        WithJsonSchema({"type": "string", "pattern": r"^\d+-\d+$"}),
        Field(validate_default=True, json_schema_extra={"default": "29400-29899"}),
    ] = (29400, 29899)
    """FROM-TO, both inside: a gang's rendezvous takes one of them. Peers must be able to reach them."""

    @field_validator("rendezvous")
    @classmethod
    def _usable(cls, value: tuple[int, int], info: ValidationInfo) -> tuple[int, int]:
        low, high = value
        bad = []
        if high - low + 1 < MIN_RENDEZVOUS_PORTS:
            right = f"give at least {MIN_RENDEZVOUS_PORTS}, such as 29400-29899"
            bad.append(CheckError(f"{low}-{high} has only {high - low + 1} ports", right))
        if low <= (api := info.data.get("api", 0)) <= high:
            bad.append(CheckError(f"{low}-{high} includes the api port {api}", "move one of them"))
        ephemeral = (info.context or {}).get("ephemeral")
        if ephemeral and (clash := ephemeral_clash(value, ephemeral)):
            bad.append(clash)
        raise_all(bad)
        return value


def default_dirs(uid: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Where run, state and logs live: the system's folders for root, the user's XDG folders otherwise."""
    if uid == 0:
        return {"run": "/run/nodeagent", "state": "/var/lib/nodeagent", "logs": "/var/log/nodeagent"}
    absolute = {k: v for k, v in environ.items() if v.startswith("/")}
    runtime = absolute.get("XDG_RUNTIME_DIR")
    run = f"{runtime}/nodeagent" if runtime else f"/tmp/nodeagent-{uid}"
    home = absolute.get("HOME")
    base = absolute.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else None)
    state = f"{base}/nodeagent" if base else f"/tmp/nodeagent-{uid}/state"
    return {"run": run, "state": state, "logs": f"{state}/logs"}


def default_config_dir(uid: int, environ: Mapping[str, str]) -> Path | None:
    """The folder of the agent's config and of the cluster's key; None for a user without a home."""
    if uid == 0:
        return Path("/etc/nodeagent")
    for name, rest in (("XDG_CONFIG_HOME", "nodeagent"), ("HOME", ".config/nodeagent")):
        if environ.get(name, "").startswith("/"):
            return Path(environ[name], rest)
    return None


def default_key(uid: int, environ: Mapping[str, str]) -> Path:
    """Where the cluster's key lies when nobody says so."""
    return (default_config_dir(uid, environ) or Path(default_dirs(uid, environ)["state"])) / "cluster.key"


def _default_dir(which: str) -> Path:
    return Path(default_dirs(os.getuid(), os.environ)[which])


class DirsConfig(Section):
    """Folders. By default /run, /var/lib and /var/log for root, the XDG folders for anybody else."""

    run: Folder = Field(default_factory=lambda: _default_dir("run"))
    """Sockets and what ends with the boot."""
    state: Folder = Field(default_factory=lambda: _default_dir("state"))
    """What must survive a reboot: this node's promises."""
    logs: Folder = Field(default_factory=lambda: _default_dir("logs"))
    """The workers' output."""

    @field_validator("run")
    @classmethod
    def _short(cls, value: Path) -> Path:
        if len(os.fsencode(value)) > 90:
            raise CheckError(
                "the path is too long to hold sockets", "use one of at most 90 bytes, such as /run/nodeagent"
            )
        return value


class _WrittenTiming(Timing):
    """Timing with durations as people write them."""

    @field_validator("*", mode="before")
    @classmethod
    def _duration(cls, value: object) -> float:
        return units.duration(value)


def _timing(value: object) -> object:
    if isinstance(value, Timing):
        return value
    if not isinstance(value, dict):
        raise CheckError(f"{units.show(value)} is not a mapping", "write for instance {heartbeat: 500ms, lease: 3s}")
    return Timing(**_WrittenTiming.model_validate(value).model_dump())


def _consistent(timing: Timing) -> Timing:
    """Every broken inequality is an error of its own."""
    raise_all([CheckError(text) for text in timing.problems()])
    return timing


class LogsConfig(Section):
    """How much of the workers' output is kept."""

    max_bytes: Annotated[
        int,
        BeforeValidator(units.size),
        WithJsonSchema({"type": ["string", "integer"], "examples": ["64MiB"]}),
        Field(ge=4096),
    ] = 64 * 1024**2
    """Size at which a worker's log file is rotated."""
    keep: int = Field(default=4, ge=1, le=1000)
    """Files kept per worker, the current one included."""


class RetentionConfig(Section):
    """How long what ended jobs left is kept: their records in the store, their output and pods' records on a node."""

    age: Annotated[
        float, BeforeValidator(units.duration), WithJsonSchema(_DURATION_SCHEMA), Field(ge=60, le=3650 * 86_400)
    ] = 7 * 86_400.0
    """Time from a job's end until it is removed. Of records the shortest of all nodes counts."""
    jobs: int = Field(default=200, ge=0, le=1_000_000)
    """Most ended jobs of one user of which it is kept, the newest ones."""


class JobsConfig(Section):
    """What jobs may do here."""

    allow_root: bool = False
    """Whether a job may run as root on this node."""
    operators: str | None = Field(default=None, min_length=1)
    """Unix group whose members may change other users' jobs. Default: root alone."""
    logs: LogsConfig = LogsConfig()
    retention: RetentionConfig = RetentionConfig()
    standbys: int = Field(default=2, ge=0, le=64)
    """Most warm standby pods kept for paused jobs, and for running jobs that have all their nodes without this one."""


class LogConfig(Section):
    """The agent's own log, on its standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is written."""
    format: Literal["json", "console", "auto"] = "auto"
    """`auto`: console on a terminal, JSON elsewhere."""


class SavingConfig(Section):
    """The copy of the cluster's jobs on each node's disk."""

    acknowledge: Annotated[
        float, BeforeValidator(units.duration), WithJsonSchema(_DURATION_SCHEMA), Field(ge=0.1, le=20)
    ] = 2.0
    """How long an answer to a command waits until two nodes have it on their disks."""
    regroup: Annotated[
        float, BeforeValidator(units.duration), WithJsonSchema(_DURATION_SCHEMA), Field(ge=1, le=86_400)
    ] = 60.0
    """How long a store that has lost writes, or may have, waits for the nodes that were live."""


class AgentConfig(Section):
    """One agent's whole configuration, every default filled in."""

    cluster: Annotated[str, BeforeValidator(_cluster)] = "default"
    """Name of the cluster: agents that share a Redis and this name belong together."""
    cluster_key: File = Field(default_factory=lambda: default_key(os.getuid(), os.environ))
    """File with the cluster's key, the same on every node: agents run only what it has signed."""
    node: NodeConfig = NodeConfig()
    topology: Annotated[tuple[str, ...], BeforeValidator(_topology)] = ()
    """Which labels of nodes say where they stand in the network, from the largest domain to the smallest, such as
    [zone, rack]; the same on every node. Gangs then start in the smallest domain that holds them."""
    redis: RedisConfig = RedisConfig()
    api: ApiConfig = ApiConfig()
    ports: PortsConfig = PortsConfig()
    dirs: DirsConfig = Field(default_factory=DirsConfig)
    timing: Annotated[
        Timing,
        BeforeValidator(_timing),
        AfterValidator(_consistent),
        WithJsonSchema(
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    name: {**_DURATION_SCHEMA, "default": field.default} for name, field in Timing.model_fields.items()
                },
            }
        ),
    ] = Timing()
    """The cluster's clockwork; must be the same on every node. Durations, or numbers of seconds."""
    without_agent: Annotated[
        float, BeforeValidator(units.duration), WithJsonSchema(_DURATION_SCHEMA), Field(ge=1, le=3600)
    ] = 30.0
    """How long healthy training goes on while this node's agent is dead, stuck or restarted. Then the node leaves."""
    drain: Annotated[float, BeforeValidator(units.duration), WithJsonSchema(_DURATION_SCHEMA), Field(ge=1, le=3600)] = (
        60.0
    )
    """How long `systemctl stop` and a shutdown wait for the node's work to move away."""
    saving: SavingConfig = SavingConfig()
    jobs: JobsConfig = JobsConfig()
    limits: LimitsConfig = LimitsConfig()
    """What one user may have and ask for, and who may submit what."""
    health: Annotated[HealthConfig | None, BeforeValidator(health_or_off), Field(json_schema_extra=or_off)] = (
        HealthConfig()
    )
    """Looking after the node and its GPUs; `off`: nobody does."""
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _waits_long_enough(self) -> Self:
        silent, waits = self.without_agent, self.saving.regroup
        if silent >= waits:
            what = (
                f"without_agent = {silent:g} s is not below saving.regroup = {waits:g} s: a Redis that lost writes "
                f"would go on before an agent that was away while its node trained has sent it what it knows"
            )
            raise_all([CheckError(what, "lower without_agent or raise saving.regroup", at=("without_agent",))])
        return self


def name_of_host(hostname: str) -> str:
    """The id of a node for which the config names none: the short hostname in lower case.

    Raises ``CheckError`` if the hostname cannot serve as one.
    """
    short = hostname.partition(".")[0].lower()
    if not re.fullmatch(NAME, short) or short == "localhost":
        raise CheckError(
            f"the hostname {hostname!r} cannot serve as the node's id", "set node.id in the agent's config"
        )
    return short


def other_name(configured: str | None, hostname: str, node: str) -> str:
    """What the machine of a running node is called by now, if the node has its name from the machine and that is
    another one; else empty. ``configured``: the node's name by the config."""
    if configured is not None:
        return ""
    try:
        name = name_of_host(hostname)
    except CheckError:  # it could have no node of its own
        name = hostname
    return "" if name == node else name


def ephemeral_clash(ports: tuple[int, int], ephemeral: tuple[int, int]) -> CheckError | None:
    """Rendezvous ports must lie outside the range the kernel gives to outgoing connections, or one of those could
    hold the port that a gang is about to use."""
    if ports[1] < ephemeral[0] or ports[0] > ephemeral[1]:
        return None
    span = ports[1] - ports[0]
    if ephemeral[0] - 1 - span >= 1024:
        right = f"{ephemeral[0] - 1 - span}-{ephemeral[0] - 1}"
    else:
        right = "or change net.ipv4.ip_local_port_range"
    return CheckError(
        f"{ports[0]}-{ports[1]} overlaps the kernel's ephemeral ports {ephemeral[0]}-{ephemeral[1]} "
        f"(net.ipv4.ip_local_port_range)",
        f"choose ports outside them: {right}",
    )
