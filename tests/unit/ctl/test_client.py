"""Finding an agent: in which order, and what is said when there is none."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import ClassVar

import pytest
from click.testing import CliRunner

from nodeagent.ctl import client
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import CtlError, Exit, NoAgentError
from nodeagent.ctl.where import ENV, Where
from nodeagent.local import registry
from nodeagent.local.layout import LocalTimedOutError


@pytest.fixture
def listeners() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listen(stack: ExitStack, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(path))
    server.listen()
    return str(path)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No agent of this machine is found."""
    monkeypatch.setattr(client, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    monkeypatch.setattr(client, "local_clusters", dict)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    monkeypatch.delenv(ENV, raising=False)
    return tmp_path


def test_the_order(nowhere: Path, listeners: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    local = listen(listeners, nowhere / "local.sock")
    monkeypatch.setattr(client, "local_clusters", lambda: {"default": [local]})
    assert client.find().sockets == [local]
    own = listen(listeners, nowhere / "xdg" / "nodeagent" / "api.sock")
    assert client.find().sockets == [own]
    system = listen(listeners, nowhere / "system.sock")
    assert client.find().sockets == [system]
    by_env = listen(listeners, nowhere / "env.sock")
    monkeypatch.setenv(ENV, by_env)
    assert client.find().sockets == [by_env]
    found = listen(listeners, nowhere / "said.sock")
    assert client.find(found).sockets == [found]
    assert client.find("unix://" + found).sockets == [found]


def test_of_two_local_clusters_none_is_chosen(nowhere: Path, listeners: ExitStack) -> None:
    """A command must not reach another cluster than the one that its user thinks of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            client, "local_clusters", lambda: {"default": ["/a/n1.sock", "/a/n2.sock"], "dev": ["/b/n1.sock"]}
        )
        with pytest.raises(CtlError, match=r"2 local clusters run here \(default, dev\)") as raised:
            client.find()
        assert raised.value.code == 2
        assert raised.value.problems == ("default: --agent /a/n1.sock", "dev: --agent /b/n1.sock")
        assert ENV in raised.value.next_step
        own = listen(listeners, nowhere / "named.sock")
        assert client.find(own).sockets == [own]


def test_no_socket_to_ask() -> None:
    with pytest.raises(NoAgentError, match="no agent's socket"):
        client.Client([]).get("/v1/nodes")


def test_an_agent_that_hangs_is_named_while_one_waits_and_at_the_end(
    listeners: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not: there is none, start one."""
    monkeypatch.setattr(client, "SLOW", 0.1)
    monkeypatch.setattr(client, "ANSWER_TIMEOUT", 0.2)
    hung = listen(listeners, tmp_path / "api.sock")
    asking = client.Client([hung])
    for _ in range(2):
        with pytest.raises(NoAgentError, match=rf"the agent at {hung} did not answer within 0\.2 s") as raised:
            asking.get("/v1/nodes")
        assert "systemctl restart nodeagent" in raised.value.next_step and "local up" not in raised.value.next_step
    assert capsys.readouterr().err.count(f"the agent at {hung} has not answered yet; waiting up to 0.2 s") == 1


def test_a_list_in_pages_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose last page is empty, as the history's is."""
    pages = {"": (["a", "b"], "b"), "b": (["c"], "c"), "c": (list[str](), "")}

    def answer(_client: client.Client, path: str, after: str = "") -> dict[str, object]:
        names, more = pages[after]
        return {"apiVersion": path, "items": list(names), "next": more}

    monkeypatch.setattr(client.Client, "get", answer)
    assert client.Client([]).pages("/v1/nodes") == {"apiVersion": "/v1/nodes", "items": ["a", "b", "c"]}


@pytest.mark.parametrize("code", [Exit.NOT_FOUND, Exit.REFUSED])
def test_only_what_is_not_there_is_nothing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def answer(_client: client.Client, path: str) -> dict[str, object]:
        raise CtlError(f"not {path}", code)

    monkeypatch.setattr(client.Client, "get", answer)
    if code == Exit.NOT_FOUND:
        assert client.look_up(client.Client([]), "/v1/jobs/a") is None
        return
    with pytest.raises(CtlError, match="not /v1/jobs/a"):
        client.look_up(client.Client([]), "/v1/jobs/a")


def test_nobody(nowhere: Path) -> None:
    with pytest.raises(NoAgentError) as raised:
        client.find()
    assert raised.value.code == 5
    assert str(nowhere / "system.sock") in raised.value.message
    assert "local up" in raised.value.next_step


def test_a_dead_socket_is_passed_over(nowhere: Path, listeners: ExitStack) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(nowhere / "system.sock"))
    own = listen(listeners, nowhere / "xdg" / "nodeagent" / "api.sock")
    assert client.find().sockets == [own]


class Away(BaseHTTPRequestHandler):
    """An agent that loses the store in the middle of a change, and then answers as ``answers`` say, one by one. At
    ``hang up`` it ends in the middle, at ``break off`` while it answers, and at ``ctrl-c`` we are interrupted. At
    ``unsaved`` the change is done, and on no disk."""

    asked: ClassVar[list[str]] = []
    answers: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request_id"])
        kind = self.answers.pop(0)
        if kind == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        if kind in ("hang up", "ctrl-c"):
            return
        error = {"code": kind, "message": kind, "next": "ask again with the same request id: it happens once"}
        self.send_response(200 if kind in ("done", "break off", "unsaved") else 409 if kind == "state" else 503)
        self.end_headers()
        text = json.dumps({"error": error, "saved": {"text": "on no disk" if kind == "unsaved" else ""}}).encode()
        self.wfile.write(text[:-9] if kind == "break off" else text)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def away(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[client.Client]:
    monkeypatch.setattr(client, "ASK_AGAIN_EVERY", 0.0)
    monkeypatch.setattr(Away, "asked", [])
    path = str(nowhere / "api.sock")
    with UnixStreamServer(path, Away) as server:
        agent = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        agent.start()
        try:
            yield client.Client([path])
        finally:
            server.shutdown()
            agent.join()


UNKNOWN = ("unknown_outcome", "hang up", "break off")


@pytest.mark.parametrize("first", UNKNOWN)
@pytest.mark.parametrize("later", [["done"], ["unknown_outcome", "store_away", "not_joined", "done"]])
def test_a_change_of_unknown_outcome_is_sent_again_under_its_id(
    away: client.Client, monkeypatch: pytest.MonkeyPatch, first: str, later: list[str]
) -> None:
    monkeypatch.setattr(Away, "answers", [first, *later])
    assert away.change("POST", "/v1/jobs/a/stop")["error"]["code"] == "done"
    assert len(Away.asked) == 1 + len(later)
    assert len(set(Away.asked)) == 1


class Clock:
    """Every sleep lasts as long as changes are sent again."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += client.ASK_AGAIN_FOR


@pytest.mark.parametrize("first", UNKNOWN)
@pytest.mark.parametrize("last", ["unknown_outcome", "store_away"])
def test_the_request_id_is_named_while_the_outcome_stays_unknown(
    away: client.Client, monkeypatch: pytest.MonkeyPatch, first: str, last: str
) -> None:
    """The last refusal says that nothing was changed by it; the first attempt may have changed something."""
    monkeypatch.setattr(Away, "answers", [first, last])
    monkeypatch.setattr(client, "time", Clock())
    with pytest.raises(CtlError) as refusal:
        away.change("POST", "/v1/jobs/a/stop")
    (own,) = set(Away.asked)
    assert refusal.value.kind == "unknown_outcome"
    assert refusal.value.code == Exit.UNREACHABLE
    assert refusal.value.next_step == f"ask again with the same request id (--request-id {own}): it happens once"
    assert Away.answers == []


def test_an_interrupt_names_the_request_id_too(away: client.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Away, "answers", ["ctrl-c"])
    with pytest.raises(CtlError, match="interrupted; it is not known whether the change was done") as raised:
        away.change("POST", "/v1/jobs/a/scaleout")
    assert raised.value.code == Exit.INTERRUPTED
    assert f"(--request-id {Away.asked[0]})" in raised.value.next_step


def test_an_interrupt_while_a_change_is_saved_says_that_it_is_done(
    away: client.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Away, "answers", ["unsaved", "unsaved", "ctrl-c"])
    with pytest.raises(CtlError, match=r"^interrupted: on no disk$") as raised:
        away.change("POST", "/v1/jobs/a/stop")
    assert (raised.value.code, len(set(Away.asked)), Away.answers) == (Exit.INTERRUPTED, 1, [])
    assert f"(--request-id {Away.asked[0]}): it happens once" in raised.value.next_step


def test_a_change_that_an_agent_does_not_answer_is_sent_to_another_one(
    away: client.Client, listeners: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_TIMEOUT", 0.2)
    monkeypatch.setattr(Away, "answers", ["done"] * 100)  # the other one, too, may answer too late
    away.sockets.insert(0, listen(listeners, tmp_path / "hung.sock"))
    assert away.change("POST", "/v1/jobs/a/stop")["error"]["code"] == "done"


@pytest.mark.parametrize("answers", [["store_away"], ["unknown_outcome", "state"]])
def test_what_is_known_is_reported_at_once(
    away: client.Client, monkeypatch: pytest.MonkeyPatch, answers: list[str]
) -> None:
    monkeypatch.setattr(Away, "answers", [*answers, "done"])
    with pytest.raises(CtlError, match=answers[-1]):
        away.change("POST", "/v1/jobs/a/stop")
    assert Away.answers == ["done"]


def test_other_machines(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By https alone; options before variables."""
    with pytest.raises(CtlError, match="agents speak https") as raised:
        client.find("http://n7:9470")
    assert raised.value.code == 2
    monkeypatch.setenv(ENV, "https://n7:9470")
    monkeypatch.setenv("NODEAGENTCTL_CACERT", "/ca.pem")
    named = client.find(Where(token_file="/token")).remote
    assert named == Where("https://n7:9470", "/token", "/ca.pem", None)
    assert named.place() == ("n7", 9470)
    assert Where("https://[fd00::7]").place() == ("fd00::7", 9470)


@pytest.mark.parametrize("url", ["https://", "https://n7:port", "https://n7/v1", "https://user@n7", "https://n7?x"])
def test_urls_that_are_no_agents(url: str) -> None:
    with pytest.raises(CtlError, match="is not the URL of an agent"):
        client.find(url)


def test_fingerprints() -> None:
    one, other = bytes([0xAB]) * 32, bytes([0xCD]) * 32
    for written in ("ab" * 32, "AB" * 32, "sha256:" + "ab" * 32, ":".join(["ab"] * 32)):
        assert Where(fingerprint=written).digests() == (one,)
    for written in (f"{'ab' * 32},sha256:{'cd' * 32}", f" {'ab' * 32} {'cd' * 32},\n", f"{'ab' * 32}, {'cd' * 32}"):
        assert Where(fingerprint=written).digests() == (one, other), "of several agents"
    assert Where().digests() == ()
    for wrong in ("ab", f"{'ab' * 32},cd", ",", " "):
        with pytest.raises(CtlError, match="is not a fingerprint"):
            Where(fingerprint=wrong).digests()


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(CtlError, match="No such file"):
        Where(token_file=str(file)).token()
    for text, what in (
        ("", "does not hold one token"),
        ("two words", "does not hold one token"),
        ("ä", "not plain text"),
    ):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(CtlError, match=what):
            Where(token_file=str(file)).token()
    file.write_text("secret\n")
    assert Where(token_file=str(file)).token() == "secret"
    file.chmod(0o644)
    with pytest.raises(CtlError, match="everybody here can use"):
        Where(token_file=str(file)).token()


def test_local_clusters_that_cannot_be_looked_at_are_a_failure_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that another command is clearing away."""

    def find() -> dict[str, list[Path]]:
        raise LocalTimedOutError("another command has been cleaning up")

    monkeypatch.setattr(registry, "find", find)
    with pytest.raises(CtlError, match="another command has been cleaning up") as raised:
        client.local_clusters()
    assert raised.value.code == Exit.TIMED_OUT


class Stranger(BaseHTTPRequestHandler):
    """Speaks HTTP and JSON, but is no agent."""

    text: ClassVar[str] = ""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.text}\n".encode())

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize("text", ["[]", "5", "null", '"text"'])
def test_json_of_a_wrong_kind_is_no_answer(nowhere: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(Stranger, "text", text)
    path = str(nowhere / "api.sock")
    with UnixStreamServer(path, Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for verb in ("get", "events", "nodes", "stop a"):
                result = CliRunner().invoke(cli, [*verb.split(), "--agent", path])
                assert (result.exit_code, type(result.exception)) == (1, SystemExit), verb
                first, step = result.stderr.splitlines()
                assert f"is not an agent's: {text} is not a JSON object" in first
                assert "--agent" in step
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[socket.socket]:
    """Somebody listens there, and as many wait to be taken as the kernel lets."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as first:
        server.bind(str(tmp_path / "api.sock"))
        server.listen(0)
        first.connect(str(tmp_path / "api.sock"))
        yield server


def test_where_too_many_wait_the_tool_waits_in_line(full: socket.socket) -> None:
    """It said that no agent listens there."""
    path, got = full.getsockname(), list[object]()
    asks = threading.Thread(target=lambda: got.append(client.find(path).get("/v1/version")))
    asks.start()
    asks.join(0.3)
    full.settimeout(30)
    before, _ = full.accept()
    link, _ = full.accept()
    with before, link:
        assert link.recv(1 << 16).startswith(b"GET /v1/version")
        link.sendall(b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 8\r\n\r\n{"v": 1}')
        asks.join()
    assert got == [{"v": 1}]


def test_who_waited_in_vain_learns_why(full: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_TIMEOUT", 0.2)
    result = CliRunner().invoke(cli, ["--agent", full.getsockname(), "get"])
    assert result.exit_code == Exit.UNREACHABLE
    assert "took no connection for 0.2 s: too many wait" in result.stderr
    assert "makes connections without end" in result.stderr


def test_an_answer_that_came_before_the_request_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an agent that one connects to too often. It was "hung up: Broken pipe"."""
    body = b'{"error": {"code": "limit", "message": "too often", "next": "wait"}}'
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "api.sock"))
        server.listen()

        def refuse(connection: client._UnixConnection) -> None:
            connect(connection)
            link, _ = server.accept()
            with link:
                link.sendall(b"HTTP/1.1 429 No\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        connect = client._UnixConnection.connect
        monkeypatch.setattr(client._UnixConnection, "connect", refuse)
        with pytest.raises(CtlError, match="too often") as refused:
            client.Client([str(tmp_path / "api.sock")]).get("/v1/version")
    assert refused.value.code == Exit.REFUSED
