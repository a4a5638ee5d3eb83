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

from benchmarks import faults
from benchmarks.faults import TIMEOUT, Trial, lose_node, settle, stood
from benchmarks.ours import JOB, Ours
from benchmarks.steplog import Gang, NotReachedError, longest_pause, steps_lost
from nodeagent.ctl.client import job_path, node_path

WATCHED = 6.0
"""Seconds after an agent's death in which training must not stand still: two leases."""
OTHER = "other"
"""The job for which a borrowed node is given back."""
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
    settle()
    old = training.log.newest()
    file = training.folder / "other.yaml"
    file.write_text(f"name: {OTHER}\ncommand: [sleep, infinity]\nnodes: 1\nworkers_per_node: {training.slots('n1')}\n")
    training.ctl("submit", str(file))
    new = _next(training, old, left)
    settle()
    trial = stood(training, old, new)
    training.ctl("delete", OTHER)
    _next(training, new, full)
    return trial


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
