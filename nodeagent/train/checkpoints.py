"""Checkpoints on disk: written in the background, committed through the store, loaded whole or not at all.

The files are those of ``torch.distributed.checkpoint``, so another number of ranks can load them. ``save`` copies the
state and returns; a thread writes it. When all ranks have written, rank 0 asks the shim to commit it: the store accepts
a commit only from the newest generation. Under torchrun a marker in the folder is the commit. All functions are
collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from nodeagent.train import folder as files
from nodeagent.train.context import context
from nodeagent.train.flat import TrainingState
from nodeagent.train.folder import CheckpointEntry
from nodeagent.train.link import Link, LinkError
from nodeagent.train.snapshots import announce, gather_seen, load_written, own_snapshots

COMMIT_BOUND = 60.0
"""Seconds to wait until the store has accepted a checkpoint that is on the disk."""
WRITE_BOUND = timedelta(hours=1)
"""The most time in which the slowest rank must have written its part."""


class Checkpoints:
    """The checkpoints of one training. All ranks create it at the same point, after ``init_process_group``.

    ``folder``: by default the job's checkpoint_dir, else ``ckpt``. ``keep``: the number of checkpoints that stay."""

    def __init__(self, folder: Path | None = None, keep: int = 3) -> None:
        place = context()
        self.folder = folder or place.checkpoint_dir or Path("ckpt")
        self._place, self._keep = place, max(1, keep)
        self._link = Link.of_environment()
        there = dist.is_initialized()
        self._world: int = dist.get_world_size() if there else 1
        self._rank: int = dist.get_rank() if there else 0
        # One group for each thread, so that messages do not mix; and DCP needs one for the CPU.
        self._talk = dist.new_group(backend="gloo", timeout=WRITE_BOUND) if there else None
        self._group = dist.new_group(backend="gloo", timeout=WRITE_BOUND) if there else None
        self._thread: threading.Thread | None = None
        self._committed = True
        self._damaged: set[CheckpointEntry] = set()
        """Checkpoints that ``load`` skipped: they do not count among those that are kept."""

    # -- saving

    def save(self, state: TrainingState, step: int) -> bool:
        """Begin to write the state of ``step``; the state may be changed as soon as this returns. False: the checkpoint
        is left out, since the previous one is still being written or waits for the store (use ``save_now`` if it must
        not be), or the folder cannot be read."""
        if self._agreed(self._thread is not None and self._thread.is_alive()):
            if self._rank == 0:
                announce(f"no checkpoint of step {step}: the one before is not finished")
            return False
        self.wait()
        order, problem = self._agreed(self._next_order())
        if problem:
            self._committed = False
            if self._rank == 0:
                announce(f"no checkpoint of step {step}: {problem}")
            return False
        entry = CheckpointEntry(order, int(step), self._place.generation)
        # DCP makes the folder itself, in its thread: a full disk is no reason to end the training
        writing = dcp.async_save(_taken(state), checkpoint_id=self.folder / entry.name, process_group=self._group)
        self._committed = False
        self._thread = threading.Thread(target=self._finish, args=(entry, writing), name="checkpoint")
        self._thread.start()
        return True

    def save_now(self, state: TrainingState, step: int) -> bool:
        """Save, and wait; returns whether the checkpoint was committed. Does not leave it out for an earlier one: for
        leaving, and for the end."""
        self.wait()
        self.save(state, step)
        return self.wait()

    def wait(self) -> bool:
        """Wait until the last checkpoint is finished; returns whether it was committed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._committed

    def close(self) -> bool:
        """Wait, and release the group. Call it before ``destroy_process_group``: a group that is still in use when
        Python ends can abort the process."""
        committed = self.wait()
        self._group = self._talk = None
        return committed

    def _next_order(self) -> tuple[int, str]:
        """Rank 0's count and problem: the file server may answer again at the next save."""
        if self._rank == 0:
            try:
                return files.next_order(self.folder), ""
            except OSError as error:
                return 0, _described(self._rank, error)
        return 0, ""

    def _finish(self, entry: CheckpointEntry, writing: Any) -> None:
        path = self.folder / entry.name
        mine: dict[str, list[int]] = {}
        problem = ""
        try:
            writing.result()
            mine = files.described(path, self._own_files(path))
        except CheckpointException as error:  # it is no Exception; all ranks get it
            problem = _first_failure(error)
        except Exception as error:  # noqa: BLE001 (the other ranks must learn of any error, and training continues)
            problem = _described(self._rank, error)
        gathered = self._gathered((mine, problem), self._group)
        problem = next((p for _, p in gathered if p), "")
        if self._rank == 0:
            try:
                if problem:
                    problem = self._given_up(entry, problem)
                else:
                    problem = self._commit(entry, {name: v for found, _ in gathered for name, v in found.items()})
            except Exception as error:  # noqa: BLE001 (the other ranks wait for the result)
                problem = _described(self._rank, error)
        self._committed = self._agreed(not problem, self._group)
        if self._rank == 0 and problem:
            announce(f"the checkpoint of step {entry.step} does not count: {problem}")

    def _own_files(self, path: Path) -> list[str]:
        names = sorted(file.name for file in path.glob(f"__{self._rank}_*"))
        return [*names, ".metadata"] if self._rank == 0 else names

    def _commit(self, entry: CheckpointEntry, named: Mapping[str, list[int]]) -> str:
        """Called on rank 0; returns why it was not committed, or ""."""
        path = self.folder / entry.name
        try:
            files.write_manifest(path, named)
        except OSError as error:
            return self._given_up(entry, _described(self._rank, error))
        try:
            if self._link is not None:
                self._link.ask("commit", COMMIT_BOUND, name=entry.name, step=entry.step, order=entry.order)
            files.mark_committed(path)
            files.prune(self.folder, entry, self._keep, self._damaged)
        except (LinkError, OSError) as error:
            self._tidy(entry)
            return str(error)
        return ""

    def _given_up(self, entry: CheckpointEntry, problem: str) -> str:
        """Called on rank 0 once no rank writes any more, and before a commit was requested. Removes the files: on a
        full disk they take room that other users need. Returns the problem, with the room that is then free."""
        files.drop(self.folder, entry)
        return f"{problem}; {files.room(self.folder)}"

    def _tidy(self, entry: CheckpointEntry) -> None:
        """If no commit succeeds, only the newest uncommitted checkpoint stays. Also removes what was committed after
        this worker had stopped waiting."""
        try:
            last = self._link.ask("commit.last")["name"] if self._link is not None else ""
            files.drop_uncommitted(self.folder, entry, {last, self._place.checkpoint})
        except (LinkError, OSError) as error:
            announce(f"older checkpoints that do not count are left in {self.folder}: {error}")

    # -- loading

    def newest(self) -> CheckpointEntry | None:
        """The checkpoint that ``load`` would try first."""
        found = self._candidates()
        return found[0] if found else None

    def load(self, state: TrainingState) -> int | None:
        """Load the newest committed and whole checkpoint into ``state``; returns its step, or None. Damaged ones are
        named and skipped."""
        for entry in self._candidates():
            path = self.folder / entry.name
            if entry.snapshot:
                problem = load_written(state, path, self._rank, self._world)
            else:
                damage = gather_seen(partial(self._damage, path), "", self._gathered)
                problem = next(filter(None, damage), "")
            if problem:
                self._damaged.add(entry)
                if self._rank == 0:
                    announce(f"the checkpoint of step {entry.step} is passed over: {problem}")
                continue
            if not entry.snapshot:
                taken = _taken(state)
                dcp.load(taken, checkpoint_id=path, process_group=self._group)
                _put(state, taken)
            return entry.step
        return None

    def _candidates(self) -> list[CheckpointEntry]:
        mine = files.candidates(self.folder, self._place.checkpoint) if self._rank == 0 else []
        agreed: list[CheckpointEntry] = self._agreed(mine)
        return agreed

    def _damage(self, path: Path) -> str:
        """Damage in this rank's share of the files."""
        try:
            named = files.read_manifest(path)
        except ValueError as error:
            return str(error)
        return files.damage(path, {name: named[name] for name in sorted(named)[self._rank :: self._world]})

    # -- all ranks

    def _agreed(self, mine: Any, group: Any = None) -> Any:
        """Rank 0's value, on all ranks. ``group``: by default the main thread's."""
        group = group or self._talk
        if group is None:
            return mine
        shared = [mine]
        dist.broadcast_object_list(shared, src=0, group=group)
        return shared[0]

    def _gathered(self, mine: Any, group: Any = None) -> list[Any]:
        group = group or self._talk
        if group is None:
            return [mine]
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, mine, group=group)
        return found


def resume(state: TrainingState, checkpoints: Checkpoints) -> int:
    """Load the newest state: from memory, else from disk. Returns its step; 0 if there is none, and then nothing was
    changed. Every rank calls it once, before its first step."""
    newest = checkpoints.newest() if context().checkpoint else None
    since = (newest.generation, newest.step) if newest is not None else (0, 0)
    found = own_snapshots().load(state, since)
    if found is None:
        found = checkpoints.load(state)
    return found or 0


def _described(rank: int, error: BaseException) -> str:
    return f"rank {rank}: {type(error).__name__}: {error}".partition("\n")[0]


def _first_failure(error: CheckpointException) -> str:
    """The failure in one line. DCP wraps each rank's error together with its stack."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return _described(rank, cause)


def _taken(state: TrainingState) -> dict[str, Any]:
    """The parts that DCP saves and loads: their names do not depend on how the model is wrapped or sharded."""
    taken: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            taken[name] = get_model_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            taken[name] = get_optimizer_state_dict(_model_of(state, value), value)
        else:
            taken[name] = value
    return taken


def _put(state: TrainingState, loaded: Mapping[str, Any]) -> None:
    for name, value in list(state.items()):
        if isinstance(value, torch.nn.Module):
            set_model_state_dict(value, loaded[name])
        elif isinstance(value, torch.optim.Optimizer):
            set_optimizer_state_dict(_model_of(state, value), value, loaded[name])
        else:
            state[name] = loaded[name]


def _model_of(state: TrainingState, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """The module in the state that has the optimizer's parameters."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for value in state.values():
        if isinstance(value, torch.nn.Module) and wanted <= {id(p) for p in value.parameters()}:
            return value
    raise ValueError("an optimizer can be saved only together with the module whose parameters it has")
