"""What becomes of workers whose container cannot be started, by real shims and a podman that only seems to be one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.model.jobspec import Container, JobSpec
from tests.integration.shim_support import make_spec, open_bench, wait_for

PIDFILE = 'for word; do case "$word" in --pidfile=*) echo 1 >"${word#--pidfile=}";; esac; done\n'
"""What podman does when a container is there."""


def contained(folder: Path, script: str) -> JobSpec:
    """A job in a folder as image. ``script``: what podman does; its words are in ``"$@"``."""
    programs, image = folder / "bin", folder / "image"
    image.mkdir()
    programs.mkdir()
    for name, text in (("podman", script), ("catatonit", "")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin"}
    spec = make_spec(("true",), folder, environ=environ, fork_server=False)
    return spec.model_copy(update={"container": Container(image=str(image))})


@pytest.mark.parametrize("code", [125, 126, 127])
async def test_a_container_that_podman_cannot_start_is_no_failure_of_its_worker(tmp_path: Path, code: int) -> None:
    spec = contained(tmp_path, f'case "$*" in *" run "*) echo one >&2; echo Error: no space >&2; exit {code};; esac')
    async with open_bench(tmp_path) as bench:
        await bench.ready(spec)
        status = await bench.run(1, ({}, {}))
        assert (status.refused, status.runtime_failed) == ("podman failed: Error: no space", True)
        status = await bench.run(2)
        assert status.runtime_failed, "it is told of each generation"


async def test_a_podman_that_cannot_tell_what_earlier_pods_left_keeps_no_node_from_being_ready(tmp_path: Path) -> None:
    spec = contained(tmp_path, 'case "$1" in ps) exec sleep 600;; esac')
    async with open_bench(tmp_path) as bench:
        status = await bench.ready(spec)
        assert (status.phase, status.reason) == ("ready", "")


async def test_all_that_earlier_pods_left_is_removed_while_the_node_is_ready(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.write_text("".join(f"id{i} {os.uname().nodename}:/nowhere/{i}\n" for i in range(3)))
    spec = contained(tmp_path, f'case "$1" in ps) cat {left};; rm) : >{left};; esac')
    async with open_bench(tmp_path) as bench:
        assert (await bench.ready(spec)).phase == "ready"
        await wait_for(lambda: left.read_text() == "")


async def test_what_a_killed_worker_left_is_removed_in_silence_before_the_next(tmp_path: Path) -> None:
    words = f'echo "$@" >>{tmp_path}/asked; case "$*" in rm*|*--replace*) echo nodeagent-1-0; echo no >&2;; esac'
    async with open_bench(tmp_path) as bench:
        await bench.ready(contained(tmp_path, f'{words}; case "$*" in *" run "*) echo mine;; esac'))
        await bench.run()
        await bench.printed("mine")
        assert bench.output(stream="stderr") == []
        asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
        (removed,) = (words for words in asked if words[0] == "rm")
        (run,) = (words for words in asked if "run" in words)
        assert asked.index(removed) < asked.index(run) and f"--name={removed[-1]}" in run


@pytest.mark.parametrize(("script", "code"), [(f"{PIDFILE} exit 125", 125), ("exit 124", 124)])
async def test_what_a_command_ends_with_is_its_own(tmp_path: Path, script: str, code: int) -> None:
    spec = contained(tmp_path, f'case "$*" in *" run "*) {script};; esac')
    async with open_bench(tmp_path) as bench:
        await bench.ready(spec)
        status = await bench.run()
        assert (status.refused, status.runtime_failed, status.exits[0].code) == ("", False, code)
