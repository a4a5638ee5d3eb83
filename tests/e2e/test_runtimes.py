"""A podman that starts no container on one node, or on none, on real agents. It only seems to be one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.support import Cluster, cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
SEEMING = """#!/bin/sh
case "$*" in *" run "*) ;; *) exit 0;; esac
if [ -e {home}/broken-$NODEAGENT_NODE ]; then echo Error: no space left >&2; exit 125; fi
for word; do case "$word" in --pidfile=*) echo $$ >"${{word#--pidfile=}}";; esac; done
while [ "$1" != --rootfs ]; do shift; done
shift 2
exec "$@"
"""
JOB = "name: {name}\ncommand: [sleep, '600']\nnodes: {nodes}\nworkers_per_node: 1\ncontainer: {image}\n"


@pytest.fixture
def two() -> Iterator[Cluster]:
    with cluster(0) as one:
        programs = one.home / "bin"
        programs.mkdir()
        for name, text in (("podman", SEEMING.format(home=one.home)), ("catatonit", "")):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        (one.work / "image").mkdir()
        one.environ["PATH"] = f"{programs}:{one.environ['PATH']}"
        one.up(2)
        yield one


def submit(two: Cluster, name: str, nodes: str) -> None:
    two.submit(JOB.format(name=name, nodes=nodes, image=two.work / "image"))


def test_an_elastic_job_goes_on_without_the_node_and_one_that_needs_it_waits(two: Cluster) -> None:
    (two.home / "broken-n2").touch()
    submit(two, "elastic", "1:2")
    submit(two, "fixed", "2")
    words = "podman failed on n2: Error: no space left"
    job = two.until_running("elastic", 1, 90, above=1)
    assert (list(two.workers("elastic", "n1")), job["generation"], job["cause"]["text"]) == ([0], 2, words)
    two.until(lambda: two.job("fixed")["generation"] == 2 and bool(two.job("fixed")["setbacks"]), 90, "it is left out")
    job = two.job("fixed")
    assert job["phase"] == "holding" and f"n2 could not start a container twice in a row ({words})" in job["reason"]
    assert [two.job(name)["budget"]["used"] for name in ("elastic", "fixed")] == [0, 0]


def test_what_starts_on_no_node_ends_the_job(two: Cluster) -> None:
    for node in ("n1", "n2"):
        (two.home / f"broken-{node}").touch()
    submit(two, "never", "2")
    job = two.until_phase("never", "failed", 60)
    assert job["reason"].startswith("no node can run it: podman failed on n1, n2: Error: no space left; look at ")
