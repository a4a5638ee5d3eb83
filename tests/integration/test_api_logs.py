"""Output over the API: merged over the nodes of a machine, followed over generations, with what is missing named."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import locallogs
from nodeagent.api.server import ApiServer
from nodeagent.ctl.client import Client
from nodeagent.ctl.logs import Printer, print_logs
from nodeagent.ctl.main import cli
from nodeagent.pods import logs
from nodeagent.pods.folder import log_folder
from tests.unit.api.fakes import BOUND, LiveAgent, PeerView, live_agent, spec


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, allow_root=True) as started:
        yield started


@contextmanager
def peer(agent: LiveAgent, folder: Path) -> Iterator[PeerView]:
    """The API of n2, in the same loop."""
    view = PeerView(folder, agent.view)
    server = ApiServer(view, MetricsPage(Metrics()))
    agent.do(server.__aenter__)
    try:
        yield view
    finally:
        agent.do(server.close)


def started(agent: LiveAgent) -> None:
    agent.submit(spec())
    agent.until(lambda: bool(agent.view.cluster().jobs) and agent.view.job("digits").phase == "running")


def write(logs: Path, second: int, text: str, rank: int = 0, generation: int = 1, stream: str = "stdout F") -> None:
    folder = log_folder(logs, "digits", "uid-digits") / f"g{generation}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{rank}.log").open("a") as file:
        file.write(f"2026-01-01T00:00:{second:02d}.000000Z {stream} {text}\n")


def ctl(agent: LiveAgent, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words])


def test_two_nodes_in_the_order_of_time(agent: LiveAgent, tmp_path: Path) -> None:
    with peer(agent, tmp_path) as second:
        started(agent)
        mine, theirs = agent.view.config.dirs.logs, second.config.dirs.logs
        write(mine, 1, "one")
        write(theirs, 2, "two", rank=2)
        write(mine, 3, "three", rank=1, stream="stderr F")
        write(theirs, 4, "four", rank=3)
        result = ctl(agent, "logs")
        assert result.stdout == "[0]<stdout>: one\n[2]<stdout>: two\n[3]<stdout>: four\n"
        assert result.stderr == "[1]<stderr>: three\n"
        assert ctl(agent, "logs", "--rank", "2").stdout == "[2]<stdout>: two\n"
        assert ctl(agent, "logs", "--tail", "1").output == "[3]<stdout>: four\n"
        refused = ctl(agent, "logs", "--generation", "7")
        assert (refused.exit_code, "no generation 7" in refused.output) == (3, True)


def test_a_node_whose_disk_hangs_is_named_and_the_others_go_on(
    agent: LiveAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, gate, mine = logs.generations, threading.Event(), agent.view.config.dirs.logs

    def generations(folder: Path) -> list[int]:
        if folder.is_relative_to(mine):
            gate.wait(BOUND)
        return known(folder)

    with peer(agent, tmp_path) as second:
        started(agent)
        write(second.config.dirs.logs, 2, "two", rank=2)
        write(second.config.dirs.logs, 3, "three", rank=2)
        monkeypatch.setattr(logs, "READ_LIMIT", 2.0)
        monkeypatch.setattr(locallogs, "generations", generations)
        for words in ([], ["--tail", "2"]):
            result = ctl(agent, "logs", *words)
            assert result.stdout == "[2]<stdout>: two\n[2]<stdout>: three\n"
            assert "node n1 cannot read the rest of its part of the output" in result.stderr
        gate.set()


def test_generations(agent: LiveAgent, tmp_path: Path) -> None:
    with peer(agent, tmp_path):
        started(agent)
        logs = agent.view.config.dirs.logs
        write(logs, 1, "old")
        assert ctl(agent, "restart").exit_code == 0
        write(logs, 2, "new", generation=2)
        assert ctl(agent, "logs").stdout == "[0]<stdout>: new\n"
        assert ctl(agent, "logs", "--generation", "1").stdout == "[0]<stdout>: old\n"


def test_missing_nodes_are_named_and_the_others_go_on(agent: LiveAgent) -> None:
    """n2's agent does not listen; n3 is another machine."""
    started(agent)
    assert ctl(agent, "scale", "3").exit_code == 0
    write(agent.view.config.dirs.logs, 1, "one", generation=2)
    result = ctl(agent, "logs")
    assert result.exit_code == 0
    assert result.stdout == "[0]<stdout>: one\n"
    assert "node n2 did not send its part" in result.stderr
    assert "node n3 is another machine (n3) whose agent serves nobody over https" in result.stderr


def test_following_joins_new_generations_and_ends_with_the_job(agent: LiveAgent, tmp_path: Path) -> None:
    with peer(agent, tmp_path) as second:
        started(agent)
        mine, theirs = agent.view.config.dirs.logs, second.config.dirs.logs
        write(mine, 1, "one")
        out = (tmp_path / "out").open("w+")
        err = (tmp_path / "err").open("w+")
        client = Client([agent.socket])
        reading = threading.Thread(
            target=lambda: print_logs(client, "digits", Printer(out, err), follow=True, first=1), daemon=True
        )
        reading.start()

        def printed(text: str) -> bool:
            return text in (tmp_path / "out").read_text()

        agent.until(lambda: printed("one"))
        write(theirs, 2, "two", rank=2)
        agent.until(lambda: printed("[2]<stdout>: two\n"))
        assert ctl(agent, "restart").exit_code == 0
        write(mine, 3, "three", generation=2)
        write(theirs, 4, "four", rank=2, generation=2)
        agent.until(lambda: printed("three") and printed("four"))
        assert ctl(agent, "stop", "digits").exit_code == 0
        write(mine, 5, "last words", generation=2)
        reading.join(15)
        assert not reading.is_alive()
        text = (tmp_path / "out").read_text()
        assert sorted(text.splitlines()) == sorted(
            ["[0]<stdout>: one", "[2]<stdout>: two", "[0]<stdout>: three", "[2]<stdout>: four"]
            + (["[0]<stdout>: last words"] if "last words" in text else [])
        )
        out.close()
        err.close()


def test_a_lost_connection_repeats_and_drops_nothing(agent: LiveAgent, tmp_path: Path) -> None:
    """The agent's server is replaced in the middle; the reader goes on where it was."""
    started(agent)
    logs = agent.view.config.dirs.logs
    for number in range(50):
        write(logs, number // 10, f"line {number}")
    out = (tmp_path / "out").open("w+")
    client = Client([agent.socket], patience=10.0)
    reading = threading.Thread(
        target=lambda: print_logs(client, "digits", Printer(out, out), follow=True, first=1), daemon=True
    )
    reading.start()
    path = tmp_path / "out"
    agent.until(lambda: "line 49" in path.read_text())

    async def replace() -> None:
        assert agent.server is not None
        await agent.server.close()
        write(logs, 4, "line 50")
        await asyncio.sleep(0.1)
        await agent.server.__aenter__()

    agent.do(replace)
    write(logs, 6, "line 51")
    agent.until(lambda: "line 51" in path.read_text())
    assert ctl(agent, "stop", "digits").exit_code == 0
    reading.join(15)
    assert not reading.is_alive()
    lines = [line for line in path.read_text().splitlines() if line.startswith("[")]
    assert lines == [f"[0]<stdout>: line {n}" for n in range(52)]
    out.close()


def test_pieces_of_a_long_line_are_joined(agent: LiveAgent) -> None:
    started(agent)
    logs = agent.view.config.dirs.logs
    write(logs, 1, "a" * 16384, stream="stdout P")
    write(logs, 1, "b", stream="stdout F")
    write(logs, 2, "progress 10%", stream="stdout P")
    write(logs, 3, "c" * 16384, stream="stdout P")
    assert ctl(agent, "logs").stdout.splitlines() == [
        "[0]<stdout>: " + "a" * 16384 + "b",
        "[0]<stdout>: progress 10%" + "c" * 16384,
    ]
