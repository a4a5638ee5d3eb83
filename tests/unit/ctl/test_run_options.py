"""What ``run`` makes of its command line before anything is asked of an agent."""

from __future__ import annotations

import re

import pytest

from nodeagent.ctl.run import default_name


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
