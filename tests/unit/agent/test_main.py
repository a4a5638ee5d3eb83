"""The daemon's command line: what it says before it is a daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from nodeagent.agent.main import EXIT_CONFIG, EXIT_HELD, main
from nodeagent.trust.key import ClusterKey


def nodeagent(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="nodeagent")


def test_keygen_makes_a_key_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    first = nodeagent("keygen", str(path))
    assert first.exit_code == 0
    assert "Copy it to every node" in first.output
    text = path.read_text()
    assert text.strip() not in first.output
    ClusterKey.load(path)
    second = nodeagent("keygen", str(path))
    assert second.exit_code == 1
    assert f"nodeagent: {path} exists already" in second.output
    assert path.read_text() == text


def test_without_a_key_the_agent_does_not_start(tmp_path: Path) -> None:
    file, key = tmp_path / "nodeagent.yaml", tmp_path / "cluster.key"
    dirs = {name: str(tmp_path / name) for name in ("run", "state", "logs")}
    file.write_text(f"cluster_key: {key}\ndirs: {dirs}\n")
    result = subprocess.run(  # a start changes its process: priority, garbage collection
        [sys.executable, "-m", "nodeagent.agent.main", "run", "--config", str(file)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == EXIT_CONFIG
    assert f"there is no cluster key at {key}: make one with `nodeagent keygen {key}`" in result.stderr
    assert "copy it to every node" in result.stderr
    assert not (tmp_path / "run").exists()


def test_an_id_that_another_agent_has_is_tried_again(tmp_path: Path) -> None:
    """It ends with the other agent, so it is no mistake in this one's config, after which nobody starts it again."""
    file = tmp_path / "nodeagent.yaml"
    file.write_text("node: {id: n1}\n")
    code = f"""
from nodeagent.agent import main, membership, serve
async def taken(*_):
    raise ExceptionGroup("tasks", [membership.IdTakenError("node id n1 is held by an agent at n2")])
serve.serve = taken
main.main(["run", "--config", {str(file)!r}])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (EXIT_HELD, "nodeagent: node id n1 is held by an agent at n2\n")


def test_a_run_folder_without_room_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "nodeagent.yaml"
    file.write_text("node: {id: n1}\n")
    code = f"""
from nodeagent.agent import identity, main, serve
async def full(*_):
    raise identity.IdentityNotSavedError("it cannot be kept")
serve.serve = full
main.main(["run", "--config", {str(file)!r}])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (EXIT_HELD, "nodeagent: it cannot be kept\n")


def test_check_config_looks_at_tokens_and_certificates(tmp_path: Path) -> None:
    file, tokens, cert = (tmp_path / name for name in ("nodeagent.yaml", "tokens.yaml", "api.pem"))
    file.write_text(f"api: {{tokens: {tokens}, tls: {{cert: {cert}}}}}\n")
    tokens.touch(mode=0o600)
    tokens.write_text("tokens:\n  ci: {sha256: short, may: red}\n")
    result = nodeagent("check-config", str(file))
    assert result.exit_code == EXIT_CONFIG
    shown = result.output.splitlines()
    assert shown[0].startswith(f"{tokens}:2:16: tokens.ci.sha256: 'short' is not a SHA-256")
    assert shown[1].startswith(f"{tokens}:2:28: tokens.ci.may: 'red' is not known here")
    assert shown[2].startswith(f"the certificate {cert} cannot be used: No such file or directory")
    tokens.write_text("tokens: {}\n")
    tokens.chmod(0o640)
    cert.write_text("no certificate")
    shown = nodeagent("check-config", str(file)).output.splitlines()
    assert "has mode 0640" in shown[0] and "chmod 0600" in shown[0]
    assert f"the certificate {cert} cannot be used" in shown[1]
    tokens.chmod(0o600)
    file.write_text(f"api: {{tokens: {tokens}}}\n")
    assert nodeagent("check-config", str(file)).output == f"{file}: ok\n"
    file.write_text(f"api: {{tls: {{client_ca: {cert}}}}}\n")
    assert f"the CA {cert} cannot be used" in nodeagent("check-config", str(file)).output
