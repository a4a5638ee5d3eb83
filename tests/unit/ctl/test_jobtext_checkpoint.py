"""What people read of a job's checkpoints."""

from __future__ import annotations

from nodeagent.ctl.jobtext import job_lines
from nodeagent.model.job import Checkpoint
from tests.unit.ctl import samples


def test_describe_says_what_is_committed() -> None:
    spec = samples.job().spec.model_copy(update={"checkpoint_dir": "/shared/ckpt"})
    assert "Checkpoints: /shared/ckpt" in job_lines(samples.detail(samples.job(spec=spec)))
    pointer = Checkpoint(name="ckpt-7", step=700, number=2, order=7)
    job = samples.detail(samples.job(spec=spec, checkpoint=pointer))
    assert "Checkpoints: /shared/ckpt; step 700 is committed (ckpt-7)" in job_lines(job)
    assert job["checkpoint"] == {"name": "ckpt-7", "step": 700, "generation": 2}
