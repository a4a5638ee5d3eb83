"""Containers and environment modules in a job file: what is written, and each mistake by name."""

from __future__ import annotations

import pytest

from nodeagent.model.jobspec import Container
from nodeagent.spec.jobcheck import check_spec
from tests.unit.spec.helpers import check_marked, job, problems

LEAST = "name: a\ncommand: x\nnodes: 1\n"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("localhost/torch:2.6", Container(image="localhost/torch:2.6")),
        ("torch", Container(image="torch")),
        ("/images/torch.sif", Container(runtime="apptainer", image="/images/torch.sif")),
        ("torch.sif", Container(runtime="apptainer", image="/shared/me/torch.sif")),
        ("./root", Container(image="/shared/me/root")),
        ("{image: root, runtime: apptainer}", Container(runtime="apptainer", image="/shared/me/root")),
        ("{image: a/b@sha256:0f, runtime: podman}", Container(image="a/b@sha256:0f")),
        ("{image: t, binds: [/data]}", Container(image="t", binds=("/data:/data",))),
        ('{image: t, binds: ["/data:ro", "/a:/b", "/a:/b:ro"]}',
         Container(image="t", binds=("/data:/data:ro", "/a:/b", "/a:/b:ro"))),
    ],
)  # fmt: skip
def test_containers(written: str, found: Container) -> None:
    spec = job(f"{LEAST}container: {written}")
    assert spec.container == found
    assert spec.fork_server is False
    assert check_spec(spec) == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("container: >>docker://ubuntu", "is not on the nodes, and nodeagent fetches no images"),
        ("container: >>--privileged", "is not an image's name"),
        ('container: >>"t; rm -rf /"', "is not an image's name"),
        ("container: >>{}", "the key 'image' is missing"),
        ("container: {image: t, runtime: >>docker}", "is not a runtime that is known here"),
        ("container: {image: t, >>bind: [/a]}", "unknown key 'bind', did you mean 'binds'"),
        ("container: {image: t, binds: >>/a}", "is not a list"),
        ("container: {image: t, binds: [>>a]}", "is not a bind"),
        ('container: {image: t, binds: [>>"/a:/b:rw,suid"]}', "is not a bind"),
        ('container: {image: t, binds: [>>"/a:/b,/c:/d"]}', "is not a bind"),
        ("container: >>$HOME/t.sif", "is not a path"),
        ("container: t\npreload: >>[torch]", "preload has no meaning in a container"),
        ("container: t\nfork_server: >>on", "fork_server: on has no meaning in a container"),
        ("container: t\nlimits: {as: >>1}", "podman knows no such limit"),
        ("modules: >>cuda", "is not a list of modules, write [cuda]"),
        ("modules: [>>-h]", "is not an environment module's name"),
        ('modules: [>>"a;b"]', "is not an environment module's name"),
        ('modules: [>>"$(x)"]', "is not an environment module's name"),
    ],
)
def test_mistakes(lines: str, says: str) -> None:
    check_marked(LEAST + lines, job, says)


def test_a_worker_in_a_container_cannot_be_started_again_alone() -> None:
    text = (
        "name: a\ncontainer: t\nroles:\n  s: {command: x, nodes: 1, restart: alone}\n"
        "  p: {command: x, nodes: 1, policies: [{on: WorkerFailed, do: RestartPod}]}\n  t: {command: x, nodes: 1}\n"
    )
    found = [str(p) for p in problems(lambda: job(text))]
    assert len(found) == 2
    assert all("a worker in a container cannot be started again alone yet" in one for one in found)


def test_what_was_written_by_hand_is_checked_too() -> None:
    spec = job(f"{LEAST}container: t")
    worse = spec.model_copy(
        update={
            "container": Container(image="--privileged", binds=("/a:/b:suid",)), "modules": ("-x",),
            "fork_server": True, "working_dir": "/a:b",
        }
    )  # fmt: skip
    found = " ".join(check_spec(worse))
    for text in ("not an image's name", "not a bind", "not an environment module's name", "fork server has no meaning",
                 "cannot be seen in a container"):  # fmt: skip
        assert text in found


def test_modules() -> None:
    assert job(f"{LEAST}modules: [gcc/13.2, cuda/12.4+x, spack@0.21/abc]").modules == (
        "gcc/13.2", "cuda/12.4+x", "spack@0.21/abc",
    )  # fmt: skip
