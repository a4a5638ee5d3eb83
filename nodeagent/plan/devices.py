"""Which of a node's free GPUs a job gets that does not take them all: those that it has, then such as are near each
other, so that their traffic stays on one NUMA node, with the network card and the cores there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nodeagent.model.node import Gpu


def pick(free: Sequence[Gpu], count: int, held: Collection[str] = ()) -> tuple[str, ...]:
    """UUIDs of so many of these, by index. ``held``: those that the job has now, which it keeps."""
    if len(free) <= count:
        return tuple(gpu.uuid for gpu in sorted(free, key=_index))
    chosen = [gpu for gpu in sorted(free, key=_index) if gpu.uuid in held][:count]
    rest = [gpu for gpu in sorted(free, key=_index) if gpu.uuid not in held]
    near: dict[int | None, list[Gpu]] = {}
    for gpu in rest:
        near.setdefault(gpu.numa, []).append(gpu)
    begun = {gpu.numa for gpu in chosen}
    while near and len(chosen) < count:
        lack = count - len(chosen)
        # Where it is already; else where all have room, with the fewest left over; else where most are.
        numa = min(
            near, key=lambda n: (n not in begun, len(near[n]) < lack, abs(len(near[n]) - lack), near[n][0].index)
        )
        chosen += near.pop(numa)[:lack]
        begun.add(numa)
    return tuple(gpu.uuid for gpu in sorted(chosen, key=_index))


def _index(gpu: Gpu) -> int:
    return gpu.index
