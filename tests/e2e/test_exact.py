"""What a training that was disturbed has learned: bit for bit what one left alone has, each image used exactly once.

Kills at one size, then changes of size; then all of it together, with the example that has all that there is for it.
``NODEAGENT_TEST_KILLS`` sets how many kills of the first (3 in `make test`, 6 else).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import DIGITS, ROOT, Cluster, check_complete, check_steps, digits_job, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(600)]

NODES = 4
KILLS = int(os.environ.get("NODEAGENT_TEST_KILLS", "6"))
"""Of the longer run."""
IMAGES = 1437
"""Of one pass of the digits; 15 steps, the last one smaller."""
STEPS_OF_PASS = 15
SAMPLES, SNAPSHOT_EVERY = 2000, 5
"""Of the whole example."""
PASSES = 12


def learned(folder: Path, steps: int) -> tuple[list[Any], bytes]:
    """Weights and the optimizer's state after the last step: as numbers to look at, and as bytes to compare."""
    torch = pytest.importorskip("torch")
    state = torch.load(folder / f"step-{steps:08d}.pt", weights_only=True)
    tensors = [*state["model"].values()]
    for moments in state["optimizer"]["state"].values():
        tensors += moments.values()
    return tensors, b"".join(t.contiguous().numpy().tobytes() for t in tensors)


RECORD = """
import json, os, runpy, sys
from nodeagent.train import batches

out = os.open({file!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
generation, share = int(os.environ["NODEAGENT_GENERATION"]), batches.Plan.share

def recorded(plan, batch, *where):
    parts = share(plan, batch, *where)
    images = [i for part in parts if part.used for i in part.indices]
    row = {{"after": batch.after, "epoch": batch.epoch, "generation": generation, "images": images}}
    os.write(out, (json.dumps(row) + "\\n").encode())
    return parts

batches.Plan.share = recorded
runpy.run_path({digits!r}, run_name="__main__")
"""


def recording(work: Path, name: str) -> Path:
    """The digits, each rank writing down the images of a step before it begins it: so whatever step ends, its images
    are known, also of a rank that is killed before it can log the step."""
    script = work / f"{name}.py"
    script.write_text(RECORD.format(file=str(work / f"{name}.images"), digits=str(DIGITS)))
    return script


RECORD_LOADED = """
import json, os, runpy
from nodeagent.train import sampler

out = os.open({file!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
generation, iterate = int(os.environ["NODEAGENT_GENERATION"]), sampler.SampledStep.__iter__

def recorded(step):
    images = [i for part in step.share if part.used for i in part.indices]
    row = {{"after": step.batch.after, "epoch": step.batch.epoch, "generation": generation, "images": images}}
    os.write(out, (json.dumps(row) + "\\n").encode())
    return iterate(step)

sampler.SampledStep.__iter__ = recorded
runpy.run_path({script!r}, run_name="__main__")
"""


def bit_exact(job_file: str) -> str:
    return job_file.replace('"--step-delay"', '"--bit-exact", "--step-delay"')


def used_images(work: Path, name: str) -> list[dict[str, Any]]:
    """What each rank has recorded of each step; the last line may be half written."""
    file = work / f"{name}.images"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def check_images(work: Path, name: str, *, redone: bool, images: int = IMAGES) -> int:
    """Each image of each pass was used exactly once. ``redone``: steps after a lost checkpoint were made again; what
    counts is the history that the weights come from, which is each step's newest generation. How many steps were begun
    again."""
    rows = used_images(work, name)
    newest: dict[int, int] = {}
    for row in rows:
        newest[row["after"]] = max(row["generation"], newest.get(row["after"], 0))
    if not redone:
        assert all(row["generation"] == newest[row["after"]] for row in rows), "a step was made twice"
    used: dict[int, Counter[int]] = {}
    for row in rows:
        if row["generation"] == newest[row["after"]]:
            used.setdefault(row["epoch"], Counter()).update(row["images"])
    assert max(newest) == len(used) * images, "only whole passes"
    for epoch, counts in sorted(used.items()):
        assert counts == Counter(range(images)), f"pass {epoch}"
    return len({(row["after"], row["generation"]) for row in rows}) - len(newest)


@pytest.mark.parametrize("kills", dict.fromkeys((3, KILLS)))
def test_kills_at_one_size_change_not_one_bit(calm: Cluster, kills: int) -> None:
    for spare in ("n3", "n4"):  # it would import torch for either job
        calm.ctl("cordon", spare, "--reason", "two nodes are enough")
    steps, alone, killed = STEPS_OF_PASS * (4 + 2 * kills), f"alone{kills}", f"killed{kills}"
    calm.submit(bit_exact(digits_job(calm.work, alone, nodes="2", steps=steps, delay=0)))
    calm.until_phase(alone, "succeeded", 180)
    more = "restarts: {max: 60, window: 1h, backoff: 0s}\n"
    script = recording(calm.work, killed)
    job_file = digits_job(calm.work, killed, nodes="2", steps=steps, delay=0.05, more=more, script=script)
    calm.submit(bit_exact(job_file))
    chance, generation = random.Random(f"kills {kills}"), 0
    for _ in range(kills):
        generation = calm.until_running(killed, 2, above=generation)["generation"]
        calm.until_steps(killed, chance.randrange(2, 12))
        os.kill(chance.choice(sorted(calm.until_workers(killed, 4).values())), signal.SIGKILL)
    job = calm.until_phase(killed, "succeeded", 180)
    assert (job["restarts"], job["budget"]["used"]) == (kills, kills)
    rows = read_steps(calm.work, killed)
    check_complete(rows, steps)
    check_images(calm.work, killed, redone=True)
    _, undisturbed = learned(calm.work / f"{alone}.ckpt", steps)
    tensors, disturbed = learned(calm.work / f"{killed}.ckpt", steps)
    assert all(t.isfinite().all() for t in tensors)
    assert len(disturbed) > 100_000
    assert disturbed == undisturbed


def test_sizes_4_2_3_4_use_each_image_once_at_the_same_losses(calm: Cluster, reference: dict[int, float]) -> None:
    steps = 20 * STEPS_OF_PASS
    calm.submit(
        digits_job(
            calm.work,
            "sized",
            nodes="{min: 1, max: 4, target: 4}",
            steps=steps,
            delay=0.1,
            workers=1,
            script=recording(calm.work, "sized"),
        )
    )
    first = generation = calm.until_running("sized", 4)["generation"]
    for size in (2, 3, 4):
        calm.until_steps("sized", 10)
        calm.ctl("scale", "sized", str(size), "--timeout", "60s")
        generation = calm.until_running("sized", size, above=generation)["generation"]
    calm.until_phase("sized", "succeeded", 120)
    rows = read_steps(calm.work, "sized")
    sizes = list(dict.fromkeys((row["generation"], row["world"]) for row in rows))
    assert [world for made_by, world in sizes if made_by >= first] == [4, 2, 3, 4]
    check_steps(rows, reference)
    check_complete(rows, steps)
    check_images(calm.work, "sized", redone=False)


def test_the_whole_example_uses_each_sample_once_whatever_happens(calm: Cluster) -> None:
    """Killed, scaled, drained, paused: a kill costs the steps since the last snapshot, all else costs none."""
    name, work = "whole", calm.work
    script = work / "whole.py"
    script.write_text(
        RECORD_LOADED.format(file=str(work / f"{name}.images"), script=str(ROOT / "examples/exact/train.py"))
    )
    command = [sys.executable, str(script), "--passes", str(PASSES), "--step-delay", "0.05"]
    calm.submit(
        f"name: {name}\ncommand: {json.dumps(command)}\nnodes: {{min: 1, max: 3, target: 3}}\nworkers_per_node: 1\n"
        f"checkpoint_dir: {work / 'whole.ckpt'}\ngrace: 60s\nrestarts: {{max: 60, window: 1h, backoff: 0s}}\n"
        "preload: [torch, torch.distributed, torch.distributed.checkpoint, torch.optim, torch._dynamo]\n"
    )
    generation = calm.until_running(name, 3)["generation"]

    def goes_on() -> None:
        def steps() -> int:
            return len({row["after"] for row in used_images(work, name) if row["generation"] == generation})

        before = steps()
        calm.until(lambda: steps() >= before + 8, 60, f"generation {generation} makes 8 steps")

    def killed() -> None:
        os.kill(calm.until_workers(name, 3)[1], signal.SIGKILL)

    def drained() -> None:
        calm.ctl("drain", calm.job(name)["pods"][0]["node"], "--reason", "test", "--timeout", "60s")

    def paused() -> None:
        calm.ctl("pause", name, "--timeout", "60s")
        calm.ctl("resume", name, "--timeout", "60s")

    def scaled(size: int) -> None:
        calm.ctl("scale", name, str(size), "--timeout", "60s")

    for happens, size in (
        (killed, 3), (lambda: scaled(2), 2), (drained, 2), (paused, 2), (lambda: scaled(3), 3), (killed, 3),
    ):  # fmt: skip
        goes_on()
        happens()
        generation = calm.until_running(name, size, above=generation)["generation"]
    job = calm.until_phase(name, "succeeded", 180)
    assert job["budget"]["used"] == 2, "the kills"
    again = check_images(work, name, redone=True, images=SAMPLES)
    assert again <= 2 * (SNAPSHOT_EVERY + 1)
