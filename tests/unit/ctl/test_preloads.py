"""What a script is seen to import and preloaded for it: by reading it, and only where nobody said what to preload."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.ctl.preloads import MOST_SOURCE, guess_preload, module_of, script_of
from nodeagent.ctl.submit import _guessed
from nodeagent.spec.jobargs import capture_submitter
from nodeagent.spec.jobfile import parse_jobs

SCRIPTS = [
    (("python", "train.py", "--lr", "1"), "train.py"),
    (("python3.12", "-u", "train.py"), "train.py"),
    (("/opt/venv/bin/python3", "-X", "dev", "-W", "error", "a/train.py"), "a/train.py"),
    (("python", "-m", "train"), None),
    (("python", "-c", "pass"), None),
    (("bash", "train.sh"), None),
    (("python",), None),
    ((), None),
]


@pytest.mark.parametrize(("command", "script"), SCRIPTS)
def test_script_of(command: tuple[str, ...], script: str | None) -> None:
    assert script_of(command) == (None if script is None else Path(script))


IMPORTS: list[tuple[str, tuple[str, ...]]] = [
    ("import torch", ("torch",)),
    ("import torch.distributed as dist", ("torch",)),
    ("def f():\n    from torch.nn import Linear", ("torch",)),
    ("from torchvision import models", ()),
    ("from .torch import x", ()),
    ("text = 'import torch'", ()),
    ("import (", ()),
    ("from transformers import Trainer\nimport os, torch", ("torch", "transformers")),
    ("import lightning.pytorch as pl\nfrom accelerate import Accelerator", ("lightning", "accelerate")),
    ("import jax.numpy as jnp", ("jax",)),
    ("import paddle\nfrom tensorflow import keras\nimport deepspeed", ("deepspeed", "paddle", "tensorflow")),
    ("import mindspore as ms\nfrom mindspore import nn", ("mindspore",)),
    ("import torch\n" + "#" * MOST_SOURCE, ()),
]


@pytest.mark.parametrize(("source", "found"), IMPORTS, ids=range(len(IMPORTS)))
def test_what_is_slow_to_import_is_preloaded_where_it_is_imported(
    tmp_path: Path, source: str, found: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert guess_preload(("python", str(script))) == found


def test_a_script_that_is_not_there_or_no_file_is_the_workers_matter(tmp_path: Path) -> None:
    assert guess_preload(("python", str(tmp_path / "none.py"))) == ()
    os.mkfifo(tmp_path / "pipe.py")
    assert guess_preload(("python", str(tmp_path / "pipe.py"))) == (), "and nobody waits for a writer"
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "link.py").symlink_to("train.py")
    assert guess_preload(("python", str(tmp_path / "link.py"))) == ("torch",)


def test_a_module_is_read_where_its_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack" / "main").mkdir(parents=True)
    (tmp_path / "pack" / "train.py").write_text("import torch")
    (tmp_path / "pack" / "main" / "__main__.py").write_text("import torch")
    script, package = (("python", "-u", "-m", f"pack.{name}", "-m") for name in ("train", "main"))
    assert guess_preload(script, tmp_path) == guess_preload(package, tmp_path) == ("torch",)
    assert guess_preload(script) == (), "there is none in this folder"
    monkeypatch.chdir(tmp_path)
    assert module_of(script) == Path("pack/train.py")
    assert module_of(package) == Path("pack/main/__main__.py")
    assert guess_preload(script) == guess_preload(package) == ("torch",)
    assert guess_preload(("python", "-m", "nowhere")) == ()
    assert module_of(("python", "train.py", "-m", "x")) is None


def guessed(folder: Path, text: str) -> list[tuple[str, ...]]:
    """What ``submit`` adds to each job of a file in this folder."""
    jobs = parse_jobs(text, "job.yaml", capture_submitter({"PATH": "/bin"}, str(folder)))
    return [_guessed(job).spec.guessed for job in jobs]


def test_a_job_file_that_says_nothing_gets_a_guess(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("import jax")
    (tmp_path / "src" / "server.py").write_text("import paddle")
    one = "name: a\nworking_dir: src\ncommand: [python, train.py]\nnodes: 1\n"
    assert guessed(tmp_path, one) == [("jax",)]
    assert guessed(tmp_path, f"{one}---\n{one.replace('name: a', 'name: b').replace('train', 'none')}") == [
        ("jax",),
        (),
    ]
    several = """
name: c
working_dir: src
roles:
  server: {command: [python, server.py], replicas: 1}
  trainer: {command: [python, train.py], nodes: 1}
"""
    assert guessed(tmp_path, several) == [("paddle", "jax")], "one interpreter forks the workers of all roles"


@pytest.mark.parametrize("line", ["preload: []", "preload: [numpy]", "fork_server: off"])
def test_a_job_file_that_says_what_it_wants_gets_no_guess(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").write_text("import jax")
    assert guessed(tmp_path, f"name: a\ncommand: [python, train.py]\nnodes: 1\n{line}\n") == [()]
