"""What ``run`` makes of its command line before anything is asked of an agent."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nodeagent.ctl.errors import CtlError
from nodeagent.ctl.run import MOST_SOURCE, _check_local, default_name, guess_preload, script_of
from tests.sim.parts import sim_spec

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


@pytest.mark.parametrize(("local", "nodes", "says"), [
    (2, (3, 3), "the job needs 3 nodes and --local 2 brings up 2: it would wait for ever"),
    (900, (1, 900), "--local 900 starts 900 agents and their workers on this machine"),
    (2, (2, 4), ""),
])  # fmt: skip
def test_a_local_cluster_that_cannot_do_is_refused(local: int, nodes: tuple[int, int], says: str) -> None:
    """Found by strangers: one waited for ever, the other brought the machine down, and neither said a word."""
    spec = sim_spec("train", nodes[0], nodes[1], nodes[1])
    if not says:
        _check_local(local, spec)
        return
    with pytest.raises(CtlError, match=says):
        _check_local(local, spec)


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


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        (("python", "My Train_Script.py"), "my-train-script"),
        (("/bin/true",), "true"),
        (("./--.sh",), "job"),
        (("x" * 200,), "x" * 40),
    ],
)
def test_default_names_are_valid_and_differ(command: tuple[str, ...], begins: str) -> None:
    one, two = default_name(command), default_name(command)
    assert re.fullmatch(rf"{begins}-[0-9a-f]{{6}}", one)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", one)
    assert one != two
