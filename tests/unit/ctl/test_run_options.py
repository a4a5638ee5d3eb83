"""What ``run`` makes of its command line before anything is asked of an agent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nodeagent.ctl.run import default_name, guess_preload, script_of

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


IMPORTS = [
    ("import torch", True),
    ("import torch.distributed as dist", True),
    ("def f():\n    from torch.nn import Linear", True),
    ("from torchvision import models", False),
    ("from .torch import x", False),
    ("text = 'import torch'", False),
    ("import (", False),
]


@pytest.mark.parametrize(("source", "torch"), IMPORTS)
def test_torch_is_preloaded_where_it_is_imported(tmp_path: Path, source: str, torch: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert guess_preload(("python", str(script))) == (("torch",) if torch else ())


def test_a_script_that_is_not_there_is_the_workers_matter(tmp_path: Path) -> None:
    assert guess_preload(("python", str(tmp_path / "none.py"))) == ()


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
