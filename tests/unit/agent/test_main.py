"""The daemon's command line: what it says before it is a daemon."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from nodeagent.agent.main import EXIT_CONFIG, main
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
    result = nodeagent("run", "--config", str(file))
    assert result.exit_code == EXIT_CONFIG
    assert f"there is no cluster key at {key}: make one with `nodeagent keygen {key}`" in result.output
    assert "copy it to every node" in result.output
    assert not (tmp_path / "run").exists()
