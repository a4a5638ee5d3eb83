"""Output of another machine's node, over https: merged, followed, and never from somebody who is not that node."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nodeagent.ctl.client import Client
from nodeagent.ctl.logs import Printer, print_logs
from nodeagent.ctl.main import cli
from nodeagent.model.node import HttpsAddress
from nodeagent.pods.folder import log_folder
from nodeagent.trust.certificate import vouch
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.ticket import SCHEME, Ticket, subject
from nodeagent.trust.ticket import write as sign
from tests.integration.remote_support import ADDRESS, Door, https
from tests.unit.api.fakes import LiveAgent, PeerView, live_agent, spec


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path) as started:
        started.view.near = {"n1": started.socket}  # n2 is another machine
        yield started


def tell(agent: LiveAgent, door: Door, key: ClusterKey | None = None, **other: str) -> None:
    """n2's facts say that it is found there, by that certificate."""
    view = agent.view
    reported = {"url": door.url, "certificate": door.certificate, "life": view.lives["n2"].life} | other
    https = vouch(
        key or view.key, view.config.cluster, "n2", reported["life"], reported["url"], reported["certificate"]
    )
    publish(agent, https)


def publish(agent: LiveAgent, https: HttpsAddress) -> None:
    agent.view.unlike["n2"] = {"https": https}
    agent.do(agent.view.join)


@contextmanager
def second(agent: LiveAgent, folder: Path) -> Iterator[tuple[PeerView, Door]]:
    """n2, served over https alone, from files of its own."""
    view = PeerView(folder, agent.view)
    with https(agent, view) as door:
        yield view, door


def started(agent: LiveAgent) -> None:
    agent.submit(spec())
    agent.until(lambda: bool(agent.view.cluster().jobs) and agent.view.job("digits").phase == "running")


def write(logs: Path, second: int, text: str, rank: int = 0, generation: int = 1) -> None:
    folder = log_folder(logs, "digits", "uid-digits") / f"g{generation}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{rank}.log").open("a") as file:
        file.write(f"2026-01-01T00:00:{second:02d}.000000Z stdout F {text}\n")


def ctl(agent: LiveAgent, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words])


def test_lines_of_another_machine(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (view, door):
        tell(agent, door)
        started(agent)
        write(agent.view.config.dirs.logs, 1, "one")
        write(view.config.dirs.logs, 2, "two", rank=2)
        write(agent.view.config.dirs.logs, 3, "three", rank=1)
        result = ctl(agent, "logs")
        assert result.stderr == ""
        assert result.stdout == "[0]<stdout>: one\n[2]<stdout>: two\n[1]<stdout>: three\n"
        assert ctl(agent, "logs", "--rank", "2", "--tail", "5").stdout == "[2]<stdout>: two\n"
        assert ctl(agent, "logs", "--generation", "1", "--tail", "1").stdout == "[1]<stdout>: three\n"


def test_following_over_a_restart_of_the_other_agent(agent: LiveAgent, tmp_path: Path) -> None:
    """It comes back at another port, and tells so; no line is lost or told twice."""
    out = tmp_path / "out"
    with out.open("w+") as file:
        client = Client([agent.socket])
        reading = threading.Thread(
            target=lambda: print_logs(client, "digits", Printer(file, file), follow=True, first=1), daemon=True
        )
        with second(agent, tmp_path) as (view, door):
            tell(agent, door)
            started(agent)
            logs = view.config.dirs.logs
            write(logs, 1, "before", rank=2)
            reading.start()
            agent.until(lambda: "before" in out.read_text())
        write(logs, 2, "meanwhile", rank=2)
        with second(agent, tmp_path) as (_, door):
            tell(agent, door)
            agent.until(lambda: "meanwhile" in out.read_text())
            write(logs, 3, "after", rank=2)
            agent.until(lambda: "after" in out.read_text())
            assert ctl(agent, "stop", "digits").exit_code == 0
            reading.join(15)
            assert not reading.is_alive()
    lines = [line for line in out.read_text().splitlines() if line.startswith("[")]
    assert lines == [f"[2]<stdout>: {text}" for text in ("before", "meanwhile", "after")]


def refused(agent: LiveAgent) -> str:
    """What is said of n2, whose part must be missing while n1's is there."""
    started(agent)
    write(agent.view.config.dirs.logs, 1, "mine")
    began = time.monotonic()
    result = ctl(agent, "logs")
    assert time.monotonic() - began < 10
    assert result.exit_code == 0
    assert result.stdout == "[0]<stdout>: mine\n"
    assert "n2" in result.stderr
    return result.stderr


def test_who_has_no_key_cannot_say_where_a_node_is(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (view, door):
        tell(agent, door, ClusterKey(bytes([9]) * 32))
        write(view.config.dirs.logs, 1, "theirs", rank=2)
        assert "not signed with this cluster's key" in refused(agent)


def test_nor_use_what_another_life_or_another_node_published(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (_, door):
        tell(agent, door, life="life-before")
        assert "not signed with" in refused(agent)
        view = agent.view
        n3 = vouch(view.key, view.config.cluster, "n3", view.lives["n2"].life, door.url, door.certificate)
        publish(agent, n3)
        assert "not signed with" in ctl(agent, "logs").stderr


def test_another_certificate_is_not_spoken_to(agent: LiveAgent, tmp_path: Path) -> None:
    """As somebody between them would show it."""
    with second(agent, tmp_path) as (view, door):
        tell(agent, door, certificate="0" * 64)
        write(view.config.dirs.logs, 1, "theirs", rank=2)
        assert "it showed another certificate than it published" in refused(agent)


def test_another_clusters_key_over_there(agent: LiveAgent, tmp_path: Path) -> None:
    view = PeerView(tmp_path, agent.view)
    view.key = ClusterKey(bytes([9]) * 32)
    with https(agent, view) as door:
        tell(agent, door)
        write(view.config.dirs.logs, 1, "theirs", rank=2)
        assert "ticket is not accepted: it is not signed with this cluster's key" in refused(agent)


def test_nobody_there(agent: LiveAgent) -> None:
    with socket.socket() as closed:
        closed.bind((ADDRESS, 0))
        tell(agent, Door(f"https://{ADDRESS}:{closed.getsockname()[1]}", "0" * 64))
        assert "Connection refused" in refused(agent)


def test_somebody_who_never_answers(agent: LiveAgent) -> None:
    with socket.socket() as mute:
        mute.bind((ADDRESS, 0))
        mute.listen()
        tell(agent, Door(f"https://{ADDRESS}:{mute.getsockname()[1]}", "0" * 64))
        assert "no answer within 4 s" in refused(agent)


def test_a_ticket_is_no_good_for_changes_nor_without_a_signature(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (_, door):
        for method, path in (("POST", "/v1/jobs/digits/stop"), ("GET", "/v1/jobs/digits/logs")):
            head = [f"{method} {path} HTTP/1.1", "Host: a", "Connection: close", f"Authorization: {SCHEME} e30=.00"]
            with door.speak("\r\n".join([*head, "", ""]).encode()) as secure:
                answer = b"".join(iter(lambda: secure.recv(4096), b"")).decode()
            assert answer.startswith("HTTP/1.1 403" if method == "POST" else "HTTP/1.1 401")


def test_a_ticket_serves_once(agent: LiveAgent, tmp_path: Path) -> None:
    """Somebody who has seen it all cannot ask again, nor ask for anything else."""
    with second(agent, tmp_path) as (view, door):
        started(agent)
        path = "/v1/jobs/digits/logs?local_only=1"

        def ask(path: str, *headers: str) -> str:
            lines = [f"GET {path} HTTP/1.1", "Host: a", "Connection: close", *headers, "", ""]
            with door.speak("\r\n".join(lines).encode()) as secure:
                return b"".join(iter(lambda: secure.recv(4096), b"")).decode()

        challenge = json.loads(ask("/v1/challenge").partition("\r\n\r\n")[2])["challenge"]
        ticket = Ticket(
            challenge=challenge, node="n2", certificate=door.certificate, path=subject("GET", path), uid=1000,
            name="alice", operator=True, by="n1",
        )  # fmt: skip
        header = f"Authorization: {sign(view.key, ticket)}"
        assert "it is for something else" in ask("/v1/jobs/digits/logs", header)
        assert ask(path, header).startswith("HTTP/1.1 200 ")
        assert "it was used before" in ask(path, header)
