"""What a login shell says of the site's modules, with a stand-in for the shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.plan.pods.report import without_output
from nodeagent.shim import environment
from nodeagent.shim.environment import ModulesError, with_modules


def shell(folder: Path, body: str) -> dict[str, str]:
    """An environment whose bash is this script."""
    (folder / "bash").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "bash").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_what_a_profile_prints_is_no_environment(tmp_path: Path) -> None:
    base = shell(tmp_path, "echo WELCOME=1; printf '\\0nodeagent: the environment\\0A=1\\nx\\0SHLVL=2\\0B=\\0'")
    assert with_modules(["m"], base) == {"A": "1\nx", "B": ""}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("exit 90", "knows no command `module`"),
        ("echo first >&2; echo why >&2; echo m/1 >&2; exit 91", r"m/1 cannot be loaded on this node: first why"),
        ("echo why >&2; echo m/1 >&2; echo + exit >&2; exit 91", r"^modules: m/1 cannot be loaded on this node: "),
        ("echo m/1 >&2; exit 91", "m/1 cannot be loaded on this node: module load failed and gave no reason"),
        ("echo broken >&2; exit 3", "ended with exit code 3: broken"),
        ("exit 0", "ended with exit code 0: no word of it"),
        ("printf '\\0nodeagent: the environment\\0'; head -c 2000000 /dev/zero", "ended with exit code 0"),
    ],
)
def test_reasons(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(ModulesError, match=says):
        with_modules(["m/1"], shell(tmp_path, body))


@pytest.mark.parametrize("code", [3, 91])
@pytest.mark.parametrize("last", ["m/1", "s3cret", "+ exit"])
def test_what_the_users_shell_printed_is_not_for_everybody(tmp_path: Path, code: int, last: str) -> None:
    """Of a profile with `set -x`, say: it was in the job's reason, and so in /v1/status and in the events."""
    with pytest.raises(ModulesError) as raised:
        with_modules(["m/1"], shell(tmp_path, f"echo s3cret: x >&2; echo '{last}' >&2; exit {code}"))
    shown, printed = without_output(str(raised.value))
    assert shown.startswith("modules: ")
    assert "s3cret" not in shown
    assert "s3cret" in printed or last in printed


def test_a_shell_that_cannot_be_run_is_no_secret(tmp_path: Path) -> None:
    base = shell(tmp_path, "")
    (tmp_path / "bash").write_bytes(b"\x7fELF nothing")
    with pytest.raises(ModulesError) as raised:
        with_modules(["m/1"], base)
    assert without_output(str(raised.value)) == (str(raised.value), "")


def test_a_shell_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LOAD_BOUND", 0.2)
    with pytest.raises(ModulesError, match=r"did not load m within 0\.2 s"):
        with_modules(["m"], shell(tmp_path, "exec sleep 60"))
