"""How the nodes of a gang should lie to each other: beside those that it has, and on other nodes than it was on only
where nothing is lost by that and it gets closer together.

Who may take part is ``nodes/candidates.py``'s, what close means ``topology.py``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from nodeagent.model.constraints import value_of
from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.world import Generation, PodReport
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.availability import spot_nodes
from nodeagent.plan.nodes.candidates import candidates, score
from nodeagent.plan.nodes.health import worn_nodes
from nodeagent.plan.nodes.labels import tree
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.nodes.setbacks import doubtful
from nodeagent.plan.placing.topology import PastPlaces, closer, closest, gang_of, gather, spread


def looked_at(cluster: Cluster, job: JobRecord) -> tuple[object, ...]:
    """All that a choice depends on, but for what queues may use."""
    members = job.generation.members if job.generation is not None else None
    return (
        candidates(cluster, job), survivors(cluster, job), members, worn_nodes(cluster), spot_nodes(cluster),
        job.control, job.spec, job.setbacks, tree(cluster), may_move(cluster, job),
    )  # fmt: skip


def arranged(cluster: Cluster, spec: JobSpec) -> bool:
    """It matters how the job's nodes lie to each other. Else the first that are able are taken."""
    role = None if spec.several else spec.role.placement  # where roles' own places go is for ``places.py``
    asked = spec.placement is not None or (role is not None and bool(role.spread or role.pack))
    return asked or bool(tree(cluster).levels)


def arrange(
    cluster: Cluster,
    job: JobRecord,
    able: Sequence[str],
    target: int,
    warm: Collection[str] = (),
    soon: bool = False,
) -> list[str]:
    """Up to so many of the nodes that are able, in the order of ``ranked``, as they should lie to each other. Survivors
    come first, by rank; but a gang that may move goes to a smaller domain that is ready. ``warm``: those that get
    ready for the job already. ``soon``: a gang may move to nodes that have yet to get ready."""
    stay = _beside_survivors(cluster, job, able, target, warm)
    role, gang = job.spec.role.placement, gang_of(cluster, job.spec)
    if not may_move(cluster, job) or (role is not None and role.spread) or closest(stay, gang):
        return stay
    ready = able if soon else [n for n in able if _warm(cluster, job, n)]
    groups = _by_welcome(cluster, job, sorted(ready, key=lambda n: _welcome(cluster, job, n)))
    moved = gather(groups, target, job.spec.nodes.min, gang, PastPlaces(warm=frozenset(warm)))
    return moved if len(moved) >= len(stay) and closer(moved, stay, gang) else stay


def _warm(cluster: Cluster, job: JobRecord, node: str) -> bool:
    ready = cluster.nodes[node].readiness.get(job.uid)
    return ready is not None and ready.state == "ready" and not ready.warming


def _welcome(cluster: Cluster, job: JobRecord, node: str) -> tuple[bool, bool, bool, bool, int]:
    """Sort key: how gladly the job takes a node that it is not on."""
    leaving, old, spot = node in job.control.leaving, node in worn_nodes(cluster), node in spot_nodes(cluster)
    return leaving, node in doubtful(job), old, spot, -score(cluster, job, node)


def _by_welcome(cluster: Cluster, job: JobRecord, nodes: Iterable[str]) -> list[list[str]]:
    """These nodes, which are in that order, in groups of equally welcome ones."""
    return [list(group) for _, group in groupby(nodes, key=lambda n: _welcome(cluster, job, n))]


def _beside_survivors(
    cluster: Cluster, job: JobRecord, able: Sequence[str], target: int, warm: Collection[str]
) -> list[str]:
    gang, known = gang_of(cluster, job.spec), tree(cluster)
    alive, generation = {m.node for m in survivors(cluster, job)}, job.generation
    leaving, old = job.control.leaving, worn_nodes(cluster)
    staying = [n for n in able if n in alive and n not in leaving and n not in old]
    stays = set(staying)
    groups = _by_welcome(cluster, job, (n for n in able if n not in stays))
    past = PastPlaces(
        tuple(m.node for m in generation.ordered()) if generation is not None else (), tuple(staying), frozenset(warm)
    )
    role = job.spec.role.placement
    if role is None or not role.spread:
        return gather(groups, target, job.spec.nodes.min, gang, past)
    values = {n: value_of(role.spread, n, known.labels[n]) for n in able}
    if gang.within:
        inside = gather(groups, target, job.spec.nodes.min, gang, past)
        domain = gang.paths[inside[0]][: gang.within] if inside else ()
        groups = [[n for n in group if gang.paths[n][: gang.within] == domain] for group in groups]
        staying = [n for n in staying if n in inside]
    return spread(groups, target, values, staying)


def may_move(cluster: Cluster, job: JobRecord) -> bool:
    """The job's generation has ended on purpose, nothing of it runs any more, and what it had done by then is in a
    checkpoint that is committed. After a fault it never may: its snapshots are in memory alone."""
    generation = job.generation
    if generation is None or generation.state != "ended" or not generation.planned or generation.holders:
        return False
    return cluster.notes.once(f"moves:{job.uid}", (job,), lambda _before: _may_move(job, generation))


def _may_move(job: JobRecord, generation: Generation) -> bool:
    if job.active is None:
        return True  # its workers have never run
    saved = job.checkpoint
    if saved is None or not job.active.number == saved.number == generation.number == job.last_number:
        return False  # the nodes in the generation are not those that have the memory, or the checkpoint is older
    if saved.from_memory:
        return True
    return all(_saved(job.last_reports.get(node), saved) for node in generation.members)


def _saved(report: PodReport | None, saved: Checkpoint) -> bool:
    """All workers of a node have left after a step that the checkpoint has."""
    if report is None or report.state != "left" or not report.exits:
        return False
    return all(e.left_at is not None and e.saved_in is not None and e.left_at <= saved.step for e in report.exits)
