"""What `run` takes along from the shell where it brings up nodes of its own."""

from __future__ import annotations

import pytest

from nodeagent.ctl.run import _with_shell
from nodeagent.spec.jobargs import capture_submitter, job_from_args


def test_the_shells_variables_go_along_but_never_over_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    submitter = capture_submitter({"PATH": "/bin"}, "/")
    spec = job_from_args(name="a", command=("true",), submitter=submitter, env=("OMP_NUM_THREADS=2",))
    for name, value in {
        "OMP_NUM_THREADS": "4", "HF_HOME": "/hf", "RANK": "7", "NODEAGENT_JOB": "x", "PATH": "/elsewhere",
        "BASH_FUNC_f%%": "() { :; }",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    env = _with_shell(spec).env
    assert (env["OMP_NUM_THREADS"], env["HF_HOME"]) == ("2", "/hf")
    assert not {"RANK", "NODEAGENT_JOB", "PATH", "BASH_FUNC_f%%"} & set(env)
