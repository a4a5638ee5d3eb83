"""What `run` takes along from the shell where it brings up nodes of its own."""

from __future__ import annotations

import os

import pytest

from nodeagent.ctl.run import _with_shell
from nodeagent.ctl.submit import readable_shell
from nodeagent.spec.jobargs import capture_submitter, job_from_args
from nodeagent.spec.jobvalues import RECORDED


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


def test_variables_that_are_no_text_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job's record is JSON, which cannot hold them: the agent refused the whole job."""
    spec = job_from_args(name="a", command=("true",), submitter=capture_submitter({"PATH": "/bin"}, "/"))
    monkeypatch.setitem(os.environb, b"GREETING", b"caf\xe9")
    monkeypatch.setitem(os.environb, b"LANG", b"\xff")
    monkeypatch.setitem(os.environb, b"HF_HOME", "/caf\u00e9".encode())
    env = _with_shell(spec).env
    assert ("GREETING" in env, env["HF_HOME"]) == (False, "/caf\u00e9")
    assert capsys.readouterr().err == "nodeagentctl: warning: left out, since its value is not UTF-8 text: GREETING\n"
    assert "LANG" not in capture_submitter(readable_shell(RECORDED.__contains__), "/").environ
    assert capsys.readouterr().err == "nodeagentctl: warning: left out, since its value is not UTF-8 text: LANG\n"
