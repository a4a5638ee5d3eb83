"""What only nodeagent can be asked for, or survives: a drain, a scale, a pause, the death of an agent alone, a
sick GPU.

Each function takes a training that steps and leaves it as it was. Seconds are of training's standstill as the steps
show it, so the start of a command is not in them.
"""

from __future__ import annotations

import os
import random
import signal
import time

import yaml

from benchmarks import faults
from benchmarks.faults import TIMEOUT, Trial, lose_node, settle, stood
from benchmarks.ours import JOB, OTHER_QUEUE, Ours
from benchmarks.steplog import Gang, NotReachedError, longest_pause, steps_lost
from nodeagent.ctl.client import job_path, node_path

WATCHED = 6.0
"""Seconds after an agent's death in which training must not stand still: two leases."""
OTHER = "other"
"""The job that comes, for which a training gives up a node, or all of them."""
LEFT_ALONE = 61.0
"""Seconds for which no job is stopped after it has got its nodes, and a little more."""
PAUSED = 4.0
"""Seconds that a paused job stays so."""
OFF_THE_BUS = 79
"""The Xid."""


def drain(training: Ours, full: int, left: int) -> Trial:
    """A random node is drained, and takes work again afterwards."""
    settle()
    old = training.log.newest()
    node = random.choice(training.killable())
    training.change(f"{node_path(node)}/drain", reason="bench")
    new = _next(training, old, left)
    settle()
    trial = stood(training, old, new)
    training.change(f"{node_path(node)}/uncordon")
    _next(training, new, full)
    return trial


def scale_down(training: Ours, full: int, left: int) -> Trial:
    """From two nodes to one, and back."""
    settle()
    old = training.log.newest()
    training.change(f"{job_path(JOB)}/scale", target=1)
    new = _next(training, old, left)
    settle()
    trial = stood(training, old, new)
    training.change(f"{job_path(JOB)}/scale", target=2)
    _next(training, new, full)
    return trial


def scale_up(training: Ours, before: int, after: int) -> Trial:
    """From one node to three. One of the newcomers was kept ready as a spare; the other has to get ready first."""
    training.change(f"{job_path(JOB)}/scale", target=1)
    _next(training, training.log.newest(), before)
    settle()
    old = training.log.newest()
    training.change(f"{job_path(JOB)}/scale", target=3)
    new = _next(training, old, after)
    settle()
    return stood(training, old, new)


def give_back(training: Ours, full: int, left: int) -> Trial:
    """A job comes that needs a whole node; the training has borrowed one, and does so again when that job is gone."""
    return _shrink(training, full, left, "default", training.slots("n1"))


def shrink(training: Ours, full: int, left: int) -> Trial:
    """The same of a training that has borrowed nothing: its queue has more than its part, and the job that comes is
    another queue's. The training grows again when that job is gone."""
    return _shrink(training, full, left, OTHER_QUEUE, 1)


def _shrink(training: Ours, full: int, left: int, queue: str, workers: int) -> Trial:
    settle()
    old = training.log.newest()
    _submit_other(training, queue, workers, "sleep", "infinity")
    new = _next(training, old, left)
    settle()
    trial = stood(training, old, new)
    training.ctl("delete", OTHER)
    _next(training, new, full)
    return trial


def preempt(training: Ours, world: int) -> Trial:
    """A job of another queue comes, for which a training that cannot shrink is stopped whole. Seconds from the job's
    submission until its worker runs. The training goes on when that job is gone."""
    old, runs = training.log.newest(), training.folder / "runs"
    runs.unlink(missing_ok=True)
    time.sleep(max(0.0, old.first_step + LEFT_ALONE - time.monotonic()))
    script = f"date +%s.%N > {runs}.tmp; mv {runs}.tmp {runs}; exec sleep infinity"
    _submit_other(training, OTHER_QUEUE, 1, "sh", "-c", script)
    submitted = float(training.job(OTHER)["submitted"])
    training.until_phase("running", TIMEOUT, OTHER)
    settle()
    training.until_phase("holding", TIMEOUT)
    seconds = float(runs.read_text()) - submitted
    training.ctl("delete", OTHER)
    return Trial(seconds, steps_lost(training.log.gangs(), old, _next(training, old, world)))


def _submit_other(training: Ours, queue: str, workers: int, *command: str) -> None:
    """A job for which no node has room beside the training."""
    job = {"name": OTHER, "command": [*command], "nodes": 1, "workers_per_node": workers, "queue": queue}
    file = training.folder / "other.yaml"
    file.write_text(yaml.safe_dump(job))
    training.ctl("submit", str(file))


def resume(training: Ours, world: int) -> Trial:
    """The job is paused; seconds from the wish to go on to the first step."""
    settle()
    old = training.log.newest()
    training.change(f"{job_path(JOB)}/pause")
    training.until_phase("paused", TIMEOUT)
    time.sleep(PAUSED)
    at = time.monotonic()
    training.change(f"{job_path(JOB)}/resume")
    new = _next(training, old, world)
    return Trial(new.first_step - at, steps_lost(training.log.gangs(), old, new))


def hang_worker(training: Ours, world: int) -> Trial:
    """As of any launcher; but each worker's stacks must have been saved as well."""
    before = training.stacks()
    trial = faults.hang_worker(training, world)
    if (saved := training.stacks() - before) < world:
        raise NotReachedError(f"the stacks of {saved} of {world} workers were saved")
    return trial


def kill_agent(training: Ours) -> Trial:
    """kill -9 of an agent alone, which is started again as systemd would. Seconds by which training's longest pause
    in the time after it is longer than a normal step."""
    settle()
    gang = training.log.newest()
    agents = {node["name"]: node["agent_pid"] for node in training.status()["nodes"]}
    victim = random.choice(sorted(agents))
    at = time.monotonic()
    os.kill(agents[victim], signal.SIGKILL)
    time.sleep(WATCHED)
    now = training.log.newest()
    if now.number != gang.number:
        raise NotReachedError(f"training was re-formed when the agent of {victim} was killed")
    if agents[victim] == next(node["agent_pid"] for node in training.status()["nodes"] if node["name"] == victim):
        raise NotReachedError(f"the agent of {victim} did not end")
    return Trial(longest_pause(now, at, at + WATCHED), 0)


def lose_first_node(training: Ours, full: int, left: int) -> Trial:
    """Power cut of rank 0's node, which also hosts the workers' rendezvous."""
    settle()
    return lose_node(training, training.node_of(0), full, left)


def evict_gpu(training: Ours, full: int) -> Trial:
    """Xid 79 on a random GPU. Seconds from its event to the first step of the gang without that GPU, before which the
    old gang's workers are dead. Then an operator says that it is repaired, and the gang takes it again."""
    assert training.driver is not None
    settle()
    old = training.log.newest()
    at = time.monotonic()
    training.driver.xid(OFF_THE_BUS, random.randrange(full))
    new = _next(training, old, full - 1)
    trial = Trial(new.first_step - at, steps_lost(training.log.gangs(), old, new))
    training.driver.set()
    training.ctl("health", "ack", training.job()["cause"]["node"])
    _next(training, new, full)
    return trial


def _next(training: Ours, old: Gang, world: int) -> Gang:
    return training.log.wait(world, TIMEOUT, after=old.number, check=training.check)
