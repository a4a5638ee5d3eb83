"""What is said of a machine on which no agent answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nodeagent.doctor.cluster import report
from nodeagent.doctor.machine import how_to_start, without_agent
from nodeagent.plan.findings.cluster import Placed
from nodeagent.trust.key import make

WHY = "no agent runs on this machine"


def environ(folder: Path) -> dict[str, str]:
    return {f"NODEAGENT__DIRS__{k}": str(folder / k.lower()) for k in ("RUN", "STATE", "LOGS")}


def reported(folder: Path, config: str | None, peers: bool = False) -> list[Placed]:
    """What is said where the config has this text."""
    file = None
    if config is not None:
        file = folder / "nodeagent.yaml"
        file.write_text(config)
    return asyncio.run(without_agent(WHY, file, environ(folder), peers))


def test_without_a_config_the_store_is_not_asked(tmp_path: Path) -> None:
    found = reported(tmp_path, None)
    assert (found[0][0], found[0][1].severity, found[0][1].what) == ("agent", "error", WHY)
    assert {where for where, _ in found} <= {"agent", "this machine"}
    assert not report(found)["ok"]


def test_every_mistake_in_the_config_is_reported(tmp_path: Path) -> None:
    found = reported(tmp_path, "node:\n  adress: 10.0.0.1\nports: {api: many}\n")
    file = tmp_path / "nodeagent.yaml"
    assert [where for where, _ in found] == ["agent", f"{file}:2:3", f"{file}:3:14"]
    assert "unknown key 'adress'" in found[1][1].what
    assert "did you mean 'address'" in found[1][1].fix


def test_a_store_that_cannot_be_reached_is_reported(tmp_path: Path) -> None:
    found = reported(tmp_path, f"redis: {{url: 'unix://{tmp_path}/none.sock'}}\n", peers=True)
    (store,) = [f for where, f in found if where == "store"]
    assert store.severity == "error"
    assert "cannot be reached" in store.what
    assert any("no peer is known" in f.what for _, f in found)


def test_a_missing_key_is_reported_with_the_command_that_makes_one(tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    text = f"cluster_key: {key}\nredis: {{url: 'unix://{tmp_path}/none.sock'}}\n"
    (found,) = [f for where, f in reported(tmp_path, text) if where == "cluster_key"]
    assert found.what == f"there is no cluster key at {key}"
    assert f"nodeagent keygen {key}" in found.fix
    make(key)
    assert "cluster_key" not in [where for where, _ in reported(tmp_path, text)]


def test_how_an_agent_is_started_here(tmp_path: Path) -> None:
    unit, file = tmp_path / "nodeagent.service", Path("/etc/n.yaml")
    assert how_to_start(file, tmp_path, (unit,)).startswith("nodeagent run --config /etc/n.yaml;")
    assert how_to_start(None, tmp_path, (unit,)).startswith("nodeagent run; or, for development")
    unit.touch()
    assert how_to_start(file, tmp_path, (unit,)).startswith("systemctl start nodeagent")
    assert how_to_start(file, tmp_path / "no-systemd", (unit,)).startswith("nodeagent run")
