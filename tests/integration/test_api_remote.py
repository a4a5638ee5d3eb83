"""The API over https: who is let in, who may do what, and who is shown out."""

from __future__ import annotations

import contextlib
import grp
import pwd
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from nodeagent.api.https import ServerBounds
from nodeagent.ctl.main import cli
from tests.descriptors import few_files
from tests.integration.remote_support import (
    ADDRESS,
    TOKENS,
    Door,
    https,
    make_ca,
    sign,
    token,
    trusting,
    write_tokens,
)
from tests.ports import free_port
from tests.unit.api.fakes import LiveAgent, live_agent, spec

USER, UID = "nobody", pwd.getpwnam("nobody").pw_uid
BOUNDS_OF_TOKENS = ServerBounds(tokens=0.05)
ALL = TOKENS | {"users": f"user: {USER}", "strangers": "user: nobody-here-has-this-name"}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, allow_root=False) as started:
        yield started


@pytest.fixture
def door(agent: LiveAgent, tmp_path: Path) -> Iterator[Door]:
    with https(agent, agent.view, tokens=str(write_tokens(tmp_path / "tokens.yaml", ALL))) as open_door:
        yield open_door


def ctl(door: Door, folder: Path, *words: str, given: str | None = None, who: str = "reads") -> Result:
    trust = ["--agent", door.url, "--fingerprint", door.certificate]
    let_in = ["--token-file", token(folder, who)] if who else []
    return CliRunner().invoke(cli, [*trust, *let_in, *words], input=given)


def ask(door: Door, path: str, *headers: str, context: ssl.SSLContext | None = None) -> str:
    lines = [f"GET {path} HTTP/1.1", f"Host: {ADDRESS}", "Connection: close", *headers, "", ""]
    with door.speak("\r\n".join(lines).encode(), context) as secure:
        return b"".join(iter(lambda: secure.recv(65536), b"")).decode()


# --- tokens


def test_a_known_token_reads(agent: LiveAgent, door: Door, tmp_path: Path) -> None:
    agent.submit(spec())
    result = ctl(door, tmp_path, "get", "-o", "name")
    assert (result.exit_code, result.stdout) == (0, "job/digits\n")
    assert "nodeagent_jobs" in ask(door, "/metrics", "Authorization: Bearer reads-secret")


@pytest.mark.parametrize("path", ["/v1/jobs", "/metrics", "/healthz", "/readyz", "/nothing"])
@pytest.mark.parametrize("header", ["X-Nothing: 1", "Authorization: Bearer wrong", "Authorization: Basic cm9vdDo="])
def test_nobody_else_gets_anything(door: Door, path: str, header: str) -> None:
    answer = ask(door, path, header)
    assert answer.startswith("HTTP/1.1 401 ")
    assert "nodeagent_jobs" not in answer and "n1" not in answer


@pytest.mark.parametrize(
    "given", [b"Bearer \xff", b"Nodeagent-Ticket YQ==.\xff", b"Nodeagent-Ticket \xff.a", b"Basic \xff"]
)
def test_credentials_that_are_no_text_are_unknown(door: Door, given: bytes) -> None:
    lines = [b"GET /v1/jobs HTTP/1.1", b"Host: " + ADDRESS.encode(), b"Connection: close", b"Authorization: " + given]
    with door.speak(b"\r\n".join([*lines, b"", b""])) as secure:
        answer = b"".join(iter(lambda: secure.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 401 "), answer


def test_refusals_speak(agent: LiveAgent, door: Door, tmp_path: Path) -> None:
    missing = ctl(door, tmp_path, "get", who="")
    assert missing.exit_code == 6
    assert "--token-file" in missing.stderr
    wrong = ctl(door, tmp_path, "get", who="unknown")
    assert wrong.exit_code == 6
    assert "does not know the token" in wrong.stderr and "unknown-secret" not in wrong.stderr
    agent.submit(spec())
    reads = ctl(door, tmp_path, "stop", "digits")
    assert reads.exit_code == 6
    assert "token reads may read, not change" in reads.stderr
    strangers = ctl(door, tmp_path, "get", who="strangers")
    assert strangers.exit_code == 6
    assert "is no user of this node" in strangers.stderr


def test_a_token_has_its_users_rights(agent: LiveAgent, door: Door, tmp_path: Path) -> None:
    agent.submit(spec("theirs"), owner=UID)
    agent.submit(spec("others"), owner=UID + 1)
    other = ctl(door, tmp_path, "stop", "others", who="users")
    assert other.exit_code == 6
    assert f"{USER} may read it, not change it" in other.stderr
    assert ctl(door, tmp_path, "stop", "theirs", who="users").exit_code == 0
    assert ctl(door, tmp_path, "cordon", "n2", "--reason", "disk", who="users").exit_code == 6


def test_an_operators_token(agent: LiveAgent, door: Door, tmp_path: Path) -> None:
    agent.submit(spec("others"), owner=UID + 1)
    assert ctl(door, tmp_path, "stop", "others", who="operates").exit_code == 0
    assert ctl(door, tmp_path, "cordon", "n2", "--reason", "disk", who="operates").exit_code == 0
    assert "by token operates" in ctl(door, tmp_path, "describe", "node/n2").stdout
    submit = ctl(door, tmp_path, "submit", "-", given=FILE, who="operates")
    assert submit.exit_code == 6
    assert "acts as no user" in submit.stderr


def test_operators_that_a_reload_names_are_some_at_once(agent: LiveAgent, door: Door, tmp_path: Path) -> None:
    agent.submit(spec("others"), owner=UID + 1)
    assert ctl(door, tmp_path, "stop", "others", who="users").exit_code == 6
    group = grp.getgrgid(pwd.getpwnam(USER).pw_gid).gr_name
    config = agent.view.config
    jobs = config.jobs.model_copy(update={"operators": group})
    agent.view.config = config.model_copy(update={"jobs": jobs})
    assert ctl(door, tmp_path, "stop", "others", who="users").exit_code == 0


FILE = "{name: remote, command: [python3, train.py], nodes: 1, workers_per_node: 1}"


def test_a_job_is_the_tokens_users(agent: LiveAgent, door: Door, tmp_path: Path) -> None:
    result = ctl(door, tmp_path, "submit", "-", given=FILE, who="users")
    assert result.exit_code == 0, result.stderr
    job = agent.view.job("remote")
    assert (job.owner, job.spec.user, job.spec.submitter.user) == (UID, USER, USER)


def test_no_token_makes_a_job_roots(agent: LiveAgent, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.yaml", {"roots": "user: root"})
    with https(agent, agent.view, tokens=str(tokens)) as door:
        result = ctl(door, tmp_path, "submit", "-", given=FILE, who="roots")
        assert result.exit_code == 6
        assert "jobs.allow_root is false" in result.stderr


def test_the_file_is_read_anew_and_a_broken_one_lets_nobody_in(agent: LiveAgent, tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.yaml", TOKENS)
    with https(agent, agent.view, tokens=str(file)) as door:
        assert ctl(door, tmp_path, "get").exit_code == 0
        write_tokens(file, {"operates": "may: operate"})
        assert ctl(door, tmp_path, "get").exit_code == 6
        assert ctl(door, tmp_path, "get", who="operates").exit_code == 0
        file.chmod(0o644)
        assert ctl(door, tmp_path, "get", who="operates").exit_code == 6
        file.chmod(0o600)
        assert ctl(door, tmp_path, "get", who="operates").exit_code == 0
        file.write_text("tokens: {")
        assert ctl(door, tmp_path, "get", who="operates").exit_code == 6


# --- certificates


def test_another_fingerprint_gets_no_token(door: Door, tmp_path: Path) -> None:
    words = ["--agent", door.url, "--fingerprint", "0" * 64, "--token-file", token(tmp_path, "reads"), "get"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 5
    assert f"another fingerprint: {door.certificate}; nothing was sent" in result.stderr


def test_one_of_several_fingerprints_is_enough(door: Door, tmp_path: Path) -> None:
    """A tool that goes to another agent when one is down pins them all."""
    words = ["--agent", door.url, "--token-file", token(tmp_path, "reads"), "get"]
    result = CliRunner().invoke(cli, ["--fingerprint", f"{'0' * 64},{door.certificate}", *words])
    assert result.exit_code == 0, result.stderr


def test_a_self_signed_certificate_is_not_trusted_by_itself(door: Door) -> None:
    result = CliRunner().invoke(cli, ["--agent", door.url, "get"])
    assert result.exit_code == 5
    assert "is not trusted" in result.stderr and "--fingerprint" in result.stderr


def test_a_configured_certificate(agent: LiveAgent, tmp_path: Path) -> None:
    ca, other = make_ca(tmp_path, "ca"), make_ca(tmp_path, "other")
    mine = sign(tmp_path, ca, "n1")
    elsewhere = sign(tmp_path, ca, "n9", names="DNS:n9.example")
    tokens = str(write_tokens(tmp_path / "tokens.yaml", TOKENS))
    let_in = ["--token-file", token(tmp_path, "reads")]
    with https(agent, agent.view, tokens=tokens, tls={"cert": str(mine.cert), "key": str(mine.key)}) as door:
        right = CliRunner().invoke(cli, ["--agent", door.url, "--cacert", str(ca.cert), *let_in, "nodes"])
        assert right.exit_code == 0, right.stderr
        wrong = CliRunner().invoke(cli, ["--agent", door.url, "--cacert", str(other.cert), *let_in, "nodes"])
        assert wrong.exit_code == 5
        assert "is not trusted" in wrong.stderr
    with https(agent, agent.view, tokens=tokens, tls={"cert": str(elsewhere.cert), "key": str(elsewhere.key)}) as door:
        host = CliRunner().invoke(cli, ["--agent", door.url, "--cacert", str(ca.cert), *let_in, "nodes"])
        assert host.exit_code == 5
        assert "IP address mismatch" in host.stderr


def test_a_client_certificate_of_the_ca_reads(agent: LiveAgent, tmp_path: Path) -> None:
    ca, other = make_ca(tmp_path, "ca"), make_ca(tmp_path, "other")
    known, unknown = trusting(), trusting()
    good, bad = sign(tmp_path, ca, "prometheus"), sign(tmp_path, other, "mallory")
    known.load_cert_chain(good.cert, good.key)
    unknown.load_cert_chain(bad.cert, bad.key)
    with https(agent, agent.view, tls={"client_ca": str(ca.cert)}) as door:
        assert "nodeagent_jobs" in ask(door, "/metrics", context=known)
        assert ask(door, "/metrics").startswith("HTTP/1.1 401 ")
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert ask(door, "/metrics", context=unknown) == "", "hung up on"
        agent.submit(spec())
        post = b"POST /v1/jobs/digits/stop HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        with door.speak(post, known) as secure:
            answer = secure.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 403 ") and "certificate prometheus may read" in answer


def test_what_follows_with_a_token_ends_soon_after_the_token_is_removed(agent: LiveAgent, tmp_path: Path) -> None:
    """The caller asked once, long before the administrator took the token out of the file."""
    tokens = write_tokens(tmp_path / "tokens.yaml", TOKENS)
    with https(agent, agent.view, BOUNDS_OF_TOKENS, tokens=str(tokens)) as door:
        kept, removed = (
            f"GET /v1/events?follow=true HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {name}-secret\r\n\r\n"
            for name in ("operates", "reads")
        )
        with door.speak(kept.encode()) as stays, door.speak(removed.encode()) as goes:
            assert stays.recv(12) == goes.recv(12) == b"HTTP/1.1 200"
            write_tokens(tokens, {"operates": TOKENS["operates"]})
            end = time.monotonic() + 20
            while goes.recv(65536):
                assert time.monotonic() < end, "it goes on"
            stays.setblocking(False)
            with contextlib.suppress(ssl.SSLWantReadError):
                assert stays.recv(65536), "hung up on, too"


# --- bounds


def test_plain_http_is_not_served(door: Door) -> None:
    with socket.create_connection((ADDRESS, door.port), 5) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        plain.settimeout(5)
        answer = b""
        try:
            while more := plain.recv(4096):
                answer += more
        except ConnectionResetError:
            pass
    assert b"HTTP" not in answer


def ended(connection: socket.socket) -> float:
    """Seconds until the other side closes."""
    start = time.monotonic()
    connection.settimeout(30)
    try:
        while connection.recv(4096):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    return time.monotonic() - start


def test_what_keeps_it_from_listening_is_tried_again(agent: LiveAgent, tmp_path: Path) -> None:
    """A port that another has, then a certificate that is not there: it listens when both are mended."""
    cert, late, view = tmp_path / "n1.pem", threading.Event(), agent.view
    with socket.socket() as other:
        other.bind((ADDRESS, 0))
        other.listen()
        ports = view.config.ports.model_copy(update={"api": other.getsockname()[1]})
        view.config = view.config.model_copy(update={"ports": ports})

        def restore() -> None:
            late.wait(0.3)
            other.close()
            late.wait(0.3)
            pair = sign(tmp_path, make_ca(tmp_path, "ca"), "made")
            cert.write_text(pair.key.read_text() + pair.cert.read_text())

        repair_state = threading.Thread(target=restore)
        repair_state.start()
        with https(agent, view, ServerBounds(retry=0.05), tls={"cert": str(cert)}) as door:
            repair_state.join()
            assert door.port == ports.api
            assert ask(door, "/healthz").startswith("HTTP/1.1 401 ")


def test_who_stays_silent_is_shown_out(agent: LiveAgent, tmp_path: Path) -> None:
    """Half a handshake, no request, half a request, a request without a token: none of them keeps a place."""
    bounds = ServerBounds(connections=4, handshake=2.0, silent=2.0, body=2.0, keepalive=2.0)
    tokens = str(write_tokens(tmp_path / "tokens.yaml", TOKENS))
    with https(agent, agent.view, bounds, tokens=tokens) as door:
        idle = [
            socket.create_connection((ADDRESS, door.port), 30),
            door.speak(b""),
            door.speak(b"GET /v1/jobs HTTP/1.1\r\nX-Slow: "),
            door.speak(b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\n\r\n"),
        ]
        start = time.monotonic()
        assert ctl(door, tmp_path, "get").exit_code == 0, "served when a place is free again"
        assert time.monotonic() - start < 30
        assert select.select(idle[:1], [], [], 0)[0], "it waited for the place of the one that came first"
        assert all(ended(connection) < 30 for connection in idle)
        for connection in idle:
            connection.close()
        head = b"Host: a\r\nAuthorization: Bearer operates-secret\r\n"
        known = door.speak(b"GET /v1/jobs HTTP/1.1\r\n" + head + b"\r\nGET /v1/jobs H")
        slow = door.speak(b"POST /v1/jobs HTTP/1.1\r\n" + head + b"Content-Length: 9\r\n\r\n{")
        assert ended(known) < 30, "nor does half of the next request"
        assert b"did not arrive within 2 s" in slow.recv(4096)
        known.close()
        slow.close()


CHALLENGE = b"GET /v1/challenge HTTP/1.1\r\nHost: a\r\n\r\n"


def everything(connection: ssl.SSLSocket) -> bytes:
    """What comes until the other side hangs up."""
    connection.settimeout(30)
    found = b""
    with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
        while more := connection.recv(1 << 16):
            found += more
    return found


def test_a_refusal_ends_the_connection_and_so_do_many_requests_without_credentials(door: Door) -> None:
    jobs = b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\n\r\n"
    with door.speak(jobs * 20) as refused, door.speak(CHALLENGE * 20) as asking:
        answer = everything(refused)
        assert (answer.count(b"HTTP/1.1 401 "), answer.count(b"Connection: close")) == (1, 1)
        assert everything(asking).count(b"HTTP/1.1 200 ") == ServerBounds().anonymous
    known = b"GET /v1/version HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer reads-secret\r\n\r\n"
    with door.speak(known + CHALLENGE * 20 + jobs) as both:
        assert everything(both).count(b"HTTP/1.1 200 ") == 21, "of who is known on this connection, as many as it likes"


def test_a_compressed_body_is_refused(door: Door) -> None:
    """It is not unpacked, whoever sends it: before, a caller without a credential had 40 MB made of 40 KB."""
    body = ("Content-Encoding: gzip", "Content-Length: 0")
    assert ask(door, "/v1/jobs", "Authorization: Bearer reads-secret", *body).startswith("HTTP/1.1 415 ")
    assert ask(door, "/v1/jobs", *body).startswith("HTTP/1.1 401 ")


def test_what_follows_a_refusal_is_not_read(door: Door) -> None:
    """For 10 s it was, as fast as it came: of 120 connections it took 0.67 of a core."""
    most, count = 1 << 28, 0
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n"
    with door.speak(head) as connection, contextlib.suppress(OSError):
        while count < most:
            connection.sendall(bytes(1 << 16))
            count += 1 << 16
    assert count < most


def test_who_comes_too_often_is_hung_up_on_before_tls_and_keeps_no_place(agent: LiveAgent, tmp_path: Path) -> None:
    bounds = ServerBounds(connections=6, at_once=3, per_second=0.001)
    tokens = str(write_tokens(tmp_path / "tokens.yaml", TOKENS))
    with https(agent, agent.view, bounds, tokens=tokens) as door, contextlib.ExitStack() as stack:
        for _ in range(8):
            assert ctl(door, tmp_path, "get").exit_code == 0, "what a known caller's took is given back"
        for _ in range(3):
            stack.enter_context(door.speak(b""))
        for _ in range(8):
            with pytest.raises(OSError):
                door.speak(b"").close()


def test_who_comes_while_there_is_no_descriptor_ends_nobody_and_others_are_served_after(
    agent: LiveAgent, tmp_path: Path
) -> None:
    tokens, config = str(write_tokens(tmp_path / "tokens.yaml", TOKENS)), agent.view.config
    ports = config.ports.model_copy(update={"api": free_port()})  # the same when it listens again
    agent.view.config = config.model_copy(update={"ports": ports})
    with capture_logs() as logged, https(agent, agent.view, ServerBounds(retry=0.05), tokens=tokens) as door:
        with few_files(1), socket.socket() as caller:
            caller.connect((ADDRESS, door.port))
            agent.until(lambda: any("not served over https" in line["event"] for line in logged))
        agent.until(lambda: ctl(door, tmp_path, "get").exit_code == 0)


def test_one_caller_has_half_of_the_connections_at_most(agent: LiveAgent, tmp_path: Path) -> None:
    bounds = ServerBounds(connections=6, silent=1.0)
    tokens = str(write_tokens(tmp_path / "tokens.yaml", TOKENS))
    with https(agent, agent.view, bounds, tokens=tokens) as door, contextlib.ExitStack() as stack:

        def answered(who: str) -> bytes:
            head = f"GET /v1/version HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {who}-secret\r\n\r\n"
            held = stack.enter_context(door.speak(head.encode()))
            return held.recv(4096)

        assert all(answered("reads").startswith(b"HTTP/1.1 200 ") for _ in range(3))
        refused = answered("reads")
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"token reads has 3 connections over https to this agent" in refused
        assert answered("operates").startswith(b"HTTP/1.1 200 ")
