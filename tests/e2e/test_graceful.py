"""Planned stops with ``nodeagent.train``: the step that training stopped after is the step that it goes on from."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import ROOT, Cluster, bounded, check_complete, check_steps, digits_job, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 3
PAUSE = 0.25
"""Seconds between steps: a job must outlast several starts of the tool, and 600 steps are what can be checked."""


def saves_when_asked(text: str) -> str:
    """The digits job without checkpoints of its own, and with time for the one that it makes as it leaves."""
    return text.replace('"--ckpt-every", "5"', '"--ckpt-every", "10000"').replace("grace: 5s", "grace: 30s")


def running_on(job: dict[str, Any]) -> list[str]:
    pods = [p for p in job["pods"] if p["generation"] == job["generation"]]
    return [p["node"] for p in pods if any(w["state"] == "running" for w in p["workers"])]


def check_no_step_lost(rows: list[dict[str, Any]], record_property: Any, job: dict[str, Any]) -> None:
    """Every rank of each generation left after one and the same step, and the next generation began with the next."""
    made: dict[int, dict[int, list[int]]] = {}
    for row in rows:
        made.setdefault(row["generation"], {}).setdefault(row["rank"], []).append(row["step"])
    next_step = 1
    for generation, ranks in sorted(made.items()):
        first, last = min(map(min, ranks.values())), max(map(max, ranks.values()))
        assert first == next_step, f"generation {generation} began with step {first}, not {next_step}"
        for rank, steps in ranks.items():
            assert steps == list(range(first, last + 1)), f"rank {rank} of generation {generation} made {steps}"
        next_step = last + 1
    still = {g["number"]: g["downtime"] for g in job["generations"]}
    record_property("downtime", still)
    print(f"stood still, in seconds before each generation: {still}")


def test_scaled_drained_joined_paused_and_restarted_without_losing_a_step(
    calm: Cluster, reference: dict[int, float], record_property: Any
) -> None:
    """One job through all planned stops that it goes on after."""
    nodes = "{min: 1, max: 3, target: 3}"
    calm.submit(saves_when_asked(digits_job(calm.work, "kept", nodes=nodes, steps=600, delay=PAUSE, workers=1)))
    first = calm.until_running("kept", 3)["generation"]  # 2 where a node was ready later than the others
    calm.until_steps("kept", 4)
    before = len(calm.happened("WorkersLeft", "kept"))
    calm.ctl("scalein", "kept", "--count", "1", "--timeout", "60s")
    job = calm.until_running("kept", 2, above=first)
    calm.until_steps("kept", 4)
    left = calm.happened("WorkersLeft", "kept")
    assert len(left) == before + 3, "each node told how its workers left"
    story = calm.ctl("describe", "kept").stdout
    assert "Last stopped as planned:" in story
    assert story.count("checkpoint at step") == 3
    calm.ctl("scale", "kept", "3", "--timeout", "60s")
    job = calm.until_running("kept", 3, above=first + 1)
    assert job["cause"]["kind"] == "scale"
    assert len(calm.happened("WorkersLeft", "kept")) == before + 5, "two had notice of the third one's coming"
    calm.until_steps("kept", 4)
    leaves = running_on(job)[0]
    calm.ctl("drain", leaves, "--reason", "a fan", "--timeout", "60s")
    calm.until_running("kept", 2, above=first + 2)
    calm.until_steps("kept", 4)
    calm.ctl("uncordon", leaves)
    job = calm.until_running("kept", 3, above=first + 3)
    assert job["cause"]["kind"] == "join"
    calm.until_steps("kept", 4)
    calm.ctl("pause", "kept", "--timeout", "60s")
    calm.ctl("resume", "kept", "--timeout", "60s")
    calm.until_running("kept", 3, above=first + 4)
    calm.until_steps("kept", 4)
    calm.ctl("restart", "kept", "--timeout", "60s")
    calm.until_running("kept", 3, above=first + 5)
    calm.until_steps("kept", 4)
    job = calm.job("kept")
    calm.ctl("stop", "kept", "--timeout", "60s")
    assert (job["generation"], job["budget"]["used"]) == (first + 6, 0)
    rows = read_steps(calm.work, "kept")
    check_no_step_lost(rows, record_property, job)
    check_steps(rows, reference)
    check_complete(rows, max(row["step"] for row in rows))


def test_a_stopped_job_goes_on_where_it_was_when_it_is_submitted_again(
    calm: Cluster, reference: dict[int, float], record_property: Any
) -> None:
    text = saves_when_asked(digits_job(calm.work, "again", nodes="2", steps=600))
    calm.submit(text)
    calm.until_running("again", 2)
    calm.until_steps("again", 10)
    calm.ctl("stop", "again", "--timeout", "60s")
    before = read_steps(calm.work, "again")
    last = max(r["step"] for r in before)
    assert f"checkpoint at step {last} in" in calm.ctl("describe", "again").stdout
    calm.submit(text)
    calm.until_running("again", 2)
    calm.until_steps("again", 10)
    calm.ctl("stop", "again", "--timeout", "60s")
    rows = read_steps(calm.work, "again")
    after = rows[len(before) :]
    assert min(r["step"] for r in after) == last + 1
    check_complete(rows, max(r["step"] for r in after))
    check_steps(after, reference)


SLOW = """
import os, sys, time
import torch, torch.distributed as dist
from nodeagent.train.leaving import Leaving

folder, slow, sleepers, bound = {folder!r}, {slow}, {sleepers}, 400
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
leaving, step = Leaving(), 0

def save():
    with open(os.path.join(folder, f"saved.{{rank}}"), "w") as out:
        out.write(str(step))

while step < bound:
    if leaving.at(step):
        leaving.leave(step, save)
    step += 1
    if step == 5:
        open(os.path.join(folder, f"slow.{{rank}}"), "w").close()
        if rank in sleepers:
            time.sleep(slow)  # others sit in the collective meanwhile
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
"""


def slow_job(
    calm: Cluster, name: str, slow: float, grace: str, fork_server: str = "on", sleepers: tuple[int, ...] = (1,)
) -> Path:
    folder, script = calm.work / name, calm.work / f"{name}.py"
    folder.mkdir()
    script.write_text(SLOW.format(folder=str(folder), slow=slow, sleepers=sleepers))
    calm.submit(
        f"name: {name}\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: 2\nworkers_per_node: 1\n"
        f"preload: [torch, torch.distributed]\ngrace: {grace}\nfork_server: {fork_server}\n"
    )
    calm.until_running(name, 2)
    calm.until(lambda: len(list(folder.glob("slow.*"))) == 2, 30, "the slow ones are at it")
    return folder


@pytest.mark.parametrize("fork_server", ["on", "off"])
def test_ranks_in_a_collective_and_in_a_slow_step_leave_after_it(calm: Cluster, fork_server: str) -> None:
    """Without a fork server rank 0 hosts the store in which they agree, and must not leave before the others have
    saved."""
    name = f"slow-{fork_server}"
    folder = slow_job(calm, name, slow=5, grace="30s", fork_server=fork_server)
    calm.ctl("pause", name, "--timeout", "60s")
    assert [(folder / f"saved.{rank}").read_text() for rank in (0, 1)] == ["5", "5"]
    assert "checkpoint at step 5 in" in calm.ctl("describe", name).stdout
    calm.ctl("stop", name)


def test_where_grace_runs_out_that_is_reported(calm: Cluster) -> None:
    # Both sleep: one in the collective would see the other's connection close, and end by itself.
    folder = slow_job(calm, "late", slow=60, grace="1s", sleepers=(0, 1))
    calm.ctl("stop", "late", "--timeout", "60s")
    assert not list(folder.glob("saved.*"))
    story = calm.ctl("describe", "late").stdout
    assert "grace of 1 s ran out: rank 0 killed" in story
    assert "grace of 1 s ran out: rank 1 killed" in story
    assert len(calm.happened("WorkersLeft", "late")) == 2


STEPS_ALONE = """
import os, time
import torch, torch.distributed as dist
from nodeagent.train.leaving import Leaving

dist.init_process_group("gloo")
leaving, step = Leaving(), 0
while True:
    if leaving.at(step):
        leaving.leave(step, lambda: False)
    step += 1
    time.sleep(0.02)
    open({folder!r} + "/up." + os.environ["NODEAGENT_GENERATION"] + os.environ["RANK"], "w").close()
"""


def test_a_gang_that_grows_does_not_wait_for_a_worker_that_died_as_it_left(calm: Cluster) -> None:
    """One that was stopped before it could say its step: the others cannot know what is in its way, but its death."""
    folder, script = calm.work / "alone", calm.work / "alone.py"
    folder.mkdir()
    script.write_text(STEPS_ALONE.format(folder=str(folder)))
    calm.submit(
        f"name: alone\ncommand: {json.dumps([sys.executable, str(script)])}\n"
        "nodes: {min: 1, max: 3, target: 2}\nworkers_per_node: 1\n"
        "preload: [torch, torch.distributed]\ngrace: 60s\n"
    )
    first = calm.until_running("alone", 2)["generation"]
    calm.until(lambda: len(list(folder.glob(f"up.{first}*"))) == 2, 30, "both step")
    victim = calm.until_workers("alone", 2)[1]
    os.kill(victim, signal.SIGSTOP)
    with bounded(calm.start("scale", "alone", "3", "--timeout", "80s")) as scale:
        calm.until(lambda: calm.job("alone")["phase"] == "forming", 30, "the two are to leave for the third")
        os.kill(victim, signal.SIGKILL)
        job = calm.until_running("alone", 3, limit=30, above=first)
        assert scale.wait(30) == 0
    assert (job["generation"], job["cause"]["kind"], job["budget"]["used"]) == (first + 1, "scale", 0)
    assert "ranks lived to make it" in calm.ctl("describe", "alone").stdout
    calm.ctl("stop", "alone")


def test_a_checkpoint_of_the_helpers_is_committed_within_the_grace(calm: Cluster, record_property: Any) -> None:
    """Pods that are being stopped may still commit; ranks then go on from it in another number."""
    words = [
        *(sys.executable, str(ROOT / "examples/snapshots/train.py"), "--steps", "2000", "--snapshot-every", "0"),
        *("--ckpt-every", "0", "--step-delay", "0.05", "--step-log", str(calm.work / "helped.steps")),
    ]
    calm.submit(
        f"name: helped\ncommand: {json.dumps(words)}\nnodes: {{min: 1, max: 3, target: 2}}\nworkers_per_node: 1\n"
        f"checkpoint_dir: {calm.work / 'helped.ckpt'}\ngrace: 60s\n"
        "preload: [torch, torch.distributed, torch.distributed.checkpoint, torch.optim, torch._dynamo]\n"
    )
    first = calm.until_running("helped", 2)["generation"]
    calm.until_steps("helped", 10)
    before = len(calm.happened("WorkersLeft", "helped"))
    calm.ctl("scalein", "helped", "--count", "1", "--timeout", "60s")
    calm.until_running("helped", 1, above=first)
    calm.until_steps("helped", 5)
    calm.ctl("pause", "helped", "--timeout", "60s")
    calm.ctl("resume", "helped", "--timeout", "60s")
    calm.until_running("helped", 1, above=first + 1)
    calm.until_steps("helped", 5)
    assert len(calm.happened("WorkersLeft", "helped")) == before + 3
    calm.ctl("stop", "helped", "--timeout", "60s")
    check_no_step_lost(read_steps(calm.work, "helped"), record_property, calm.job("helped"))


TELLS = """
import json, os, time
from nodeagent.train import context
place = context()
file = os.path.join({folder!r}, f"{{place.generation}}.{{place.rank}}")
with open(file + ".draft", "w") as out:
    json.dump([place.reason, dict(place.faulty)], out)
os.rename(file + ".draft", file)
while True:
    time.sleep(0.05)
"""


def test_workers_learn_why_they_were_formed_and_who_was_left_out(calm: Cluster) -> None:
    folder, script = calm.work / "told", calm.work / "told.py"
    folder.mkdir()
    script.write_text(TELLS.format(folder=str(folder)))
    calm.submit(
        f"name: told\ncommand: {json.dumps([sys.executable, str(script)])}\n"
        "nodes: {min: 1, max: 3, target: 3}\nworkers_per_node: 1\n"
    )

    def until_reported(generation: int, ranks: int) -> None:
        calm.until(lambda: len(list(folder.glob(f"{generation}.?"))) == ranks, 30, f"generation {generation} has told")

    job = calm.until_running("told", 3)
    whole, (first, second, third) = job["generation"], running_on(job)
    until_reported(whole, 3)
    calm.ctl("drain", second, "--reason", "a fan", "--timeout", "60s")
    two = calm.until_running("told", 2, above=whole)["generation"]
    until_reported(two, 2)
    calm.ctl("local", "kill", third)
    one = calm.until_running("told", 1, above=two)["generation"]
    until_reported(one, 1)
    reported = {file.name: json.loads(file.read_text()) for file in folder.iterdir()}
    calm.ctl("stop", "told")
    assert reported[f"{whole}.0"][1] == {"nodes": {}, "devices": {}}
    assert reported[f"{two}.0"] == reported[f"{two}.1"]
    reason, faulty = reported[f"{two}.0"]
    assert (reason, list(faulty["nodes"])) == (f"node {second} is being drained", [second])
    assert "a fan" in faulty["nodes"][second]
    reason, faulty = reported[f"{one}.0"]
    assert reason == f"node {third} lost"
    assert set(faulty["nodes"]) == {second, third}
    assert first not in faulty["nodes"]


OWN_HANDLER = """
import os, signal, sys, time
def leave(*_):
    with open({file!r}, "w") as out:
        out.write("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open({file!r} + ".up", "w").close()
while True:
    time.sleep(0.05)
"""


def test_a_script_with_its_own_handler_is_served_as_well(calm: Cluster) -> None:
    file, script = calm.work / "own", calm.work / "own.py"
    script.write_text(OWN_HANDLER.format(file=str(file)))
    calm.submit(f"name: own\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: 1\nworkers_per_node: 1\n")
    calm.until((calm.work / "own.up").exists, 30, "its handler is there")
    calm.ctl("pause", "own", "--timeout", "60s")
    assert file.read_text() == "saved"
    job = calm.job("own")
    assert (job["phase"], job["budget"]["used"]) == ("paused", 0), "an exit with 0 is no success here"
    assert "Last stopped as planned" not in calm.ctl("describe", "own").stdout, "nothing is known of it"
    calm.ctl("stop", "own")


def test_borrowed_nodes_go_back_without_losing_a_step(
    calm: Cluster, reference: dict[int, float], record_property: Any
) -> None:
    """A job of one node borrows two that are idle, gives one back to a job that comes, and has it again after that."""
    nodes = "{min: 1, max: 3, target: auto}"
    calm.submit(saves_when_asked(digits_job(calm.work, "wide", nodes=nodes, steps=600, delay=PAUSE, workers=1)))
    first = calm.until_running("wide", 3)["generation"]
    calm.until_steps("wide", 4)
    assert calm.job("wide")["borrowed"] == 2
    assert "2 borrowed on top of it" in calm.ctl("describe", "wide").stdout
    slots = calm.node("n1")["cpu_slots"]
    calm.submit(f"name: narrow\ncommand: [sleep, '600']\nnodes: 1\nworkers_per_node: {slots}\n")
    calm.until_running("narrow", 1)
    job = calm.until_running("wide", 2, above=first)
    assert job["cause"]["kind"] == "share"
    assert job["cause"]["text"].endswith(" given back: job narrow needs it")
    assert not set(running_on(job)) & set(running_on(calm.job("narrow")))
    calm.until_steps("wide", 4)
    calm.ctl("stop", "narrow")
    calm.until_running("wide", 3, above=job["generation"])
    calm.until_steps("wide", 4)
    calm.ctl("stop", "wide")
    rows = read_steps(calm.work, "wide")
    check_steps(rows, reference)
    check_no_step_lost(rows, record_property, calm.job("wide"))
    assert calm.job("wide")["budget"]["used"] == 0
