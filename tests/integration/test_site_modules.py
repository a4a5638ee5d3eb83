"""Environment modules, by the real ``module`` command of the package environment-modules."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from nodeagent.shim.environment import ModulesError, with_modules
from tests.integration.shim_support import make_spec, open_bench

INIT = Path("/usr/share/modules/init/bash")
BASE = {"PATH": "/opt/mine:/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", "PYTHONPATH": "/code"}
pytestmark = pytest.mark.skipif(
    not INIT.exists() or shutil.which("bash") is None, reason=f"environment-modules is not installed ({INIT})"
)


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """A login environment in which a site's modules are found."""
    (tmp_path / "modules" / "tool").mkdir(parents=True)
    paths = "prepend-path PATH /site/tool/bin\nprepend-path PYTHONPATH /site/tool/py\n"
    (tmp_path / "modules" / "tool" / "1.2").write_text(f"#%Module1.0\n{paths}setenv TOOL_HOME {{/a b}}\n")
    (tmp_path / "modules" / "needs").write_text("#%Module1.0\nprereq tool/1.2\nsetenv NEEDS met\n")
    return BASE | {"MODULEPATH": str(tmp_path / "modules")}


def test_a_module_goes_before_what_was_recorded(site: dict[str, str]) -> None:
    env = with_modules(["tool/1.2", "needs"], site)
    assert env["PATH"].startswith("/site/tool/bin:/opt/mine:"), "a profile that sets PATH anew takes nothing away"
    assert env["PYTHONPATH"] == "/site/tool/py:/code"
    assert (env["TOOL_HOME"], env["NEEDS"], env["HOME"]) == ("/a b", "met", "/nonexistent")
    assert "PWD" not in env


def test_a_module_that_is_not_there_is_named_with_the_commands_own_words(site: dict[str, str]) -> None:
    with pytest.raises(ModulesError, match=r"^modules: nope/9 cannot be loaded on this node: .*Unable to locate"):
        with_modules(["tool/1.2", "nope/9"], site)


async def test_workers_fork_server_and_hooks_have_the_modules(tmp_path: Path, site: dict[str, str]) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os, sys\nprint(os.environ['TOOL_HOME'], os.environ['TOKEN'], sys.executable)\n")
    recorded = site | {"PATH": os.environ["PATH"]}
    async with open_bench(tmp_path) as bench:
        spec = make_spec((sys.executable, "show.py"), tmp_path, environ=recorded, env={"TOKEN": "jobs"})
        status = await bench.ready(spec.model_copy(update={"modules": ("tool/1.2",)}))
        assert status.phase == "ready", status.reason
        assert status.fork_server_pid is not None
        status = await bench.run(1, ({"TOKEN": "jobs"},))
        await bench.printed(f"/a b jobs {sys.executable}")


async def test_a_node_without_the_module_is_unfit_and_says_why(tmp_path: Path, site: dict[str, str]) -> None:
    async with open_bench(tmp_path) as bench:
        spec = make_spec(("true",), tmp_path, environ=site | {"PATH": os.environ["PATH"]})
        status = await bench.ready(spec.model_copy(update={"modules": ("nope/9",)}))
        assert status.phase == "unfit"
        assert status.reason.startswith("modules: nope/9 cannot be loaded on this node: ")
