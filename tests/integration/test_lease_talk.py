"""How the lease process is let in by real servers: TLS, users and passwords, a unix socket, a replica."""

from __future__ import annotations

import hashlib
import io
import os
import select
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.lease.order import Server as Place
from nodeagent.lease.order import StoreScript, Tls
from nodeagent.lease.resp import Certificates, Reply, Talk, TalkError
from nodeagent.osutil.linux import boottime
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store import whois
from nodeagent.store.endpoint import StoreEndpoint
from nodeagent.store.link import StoreLink
from tests.integration.redis_support import Authority, Server, Yard, frozen, yard
from tests.ports import free_port
from tests.unit.lease.build import done

pytestmark = pytest.mark.redis
BOUND = 5.0
ECHO = Path(__file__).with_name("echo.lua")
STEP = StoreScript(hashlib.sha1(ECHO.read_bytes(), usedforsecurity=False).hexdigest(), ECHO)


@pytest.fixture
def servers() -> Iterator[Yard]:
    with yard() as found:
        yield found


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def to() -> Iterator[Callable[..., Talk]]:
    talks: list[Talk] = []

    def make(place: Place, certificates: Certificates | None = None) -> Talk:
        talks.append(Talk(place, certificates))
        return talks[-1]

    yield make
    for talk in talks:
        talk.close()


def at(server: Server, *greeting: tuple[str, ...], tls: Tls | None = None, host: str = "127.0.0.1") -> Place:
    return Place("", host, server.port, greeting, tls)


def opened(talk: Talk, bound: float = BOUND) -> Talk:
    done(talk.greet(boottime() + bound))
    return talk


def evaluated(talk: Talk, bound: float = BOUND) -> Reply:
    return done(talk.evaluate(boottime() + bound, STEP, "na:{test}:", "6"))


def asked(talk: Talk) -> Reply:
    return evaluated(opened(talk))


async def test_it_knows_the_server_by_the_name_that_the_agent_knows(servers: Yard, to: Callable[..., Talk]) -> None:
    server = await servers.server()
    link = StoreLink(StoreEndpoint(RedisConfig(url=server.url)), 1.0)
    await link.open()
    await link.drop()
    for place in (at(server), Place(str(server.socket), "", 0, (), None)):
        assert asked(to(place)) == [1, "na:{test}:", link.run_id, "6"]


async def test_a_user_with_a_password_and_a_database(servers: Yard, to: Callable[..., Talk], tmp_path: Path) -> None:
    server = await servers.server("user default off", "user ann on >pw ~* +@all")
    login, database = ("AUTH", "ann", "pw"), ("SELECT", "3")
    talk = to(at(server, login, database))
    opened(talk)
    step = StoreScript("0" * 40, tmp_path / "step")
    step.file.write_text("redis.call('SET', KEYS[1], 1) return redis.call('INFO', 'keyspace')")
    assert "db3:keys=1" in str(done(talk.evaluate(boottime() + BOUND, step, "k")))
    for greeting in ((), (("AUTH", "ann", "no"),), (database, login)):
        with pytest.raises(TalkError, match=r"NOAUTH|WRONGPASS"):
            opened(to(at(server, *greeting)))


async def test_a_replica_is_not_talked_to(servers: Yard, to: Callable[..., Talk]) -> None:
    primary = await servers.server()
    replica = await servers.replica(primary)
    with pytest.raises(TalkError, match=f"it is a replica of 127.0.0.1:{primary.port}"):
        opened(to(at(replica)))


async def test_a_frozen_server_costs_no_more_than_the_bound(servers: Yard, to: Callable[..., Talk]) -> None:
    server = await servers.server()
    talk = to(at(server))
    asked(talk)
    with frozen(server):
        with pytest.raises(TalkError, match="did not answer in time"):
            evaluated(talk, 1.5)
        with pytest.raises(TalkError, match="did not answer in time"):
            opened(to(at(server)), 1.5)
    assert asked(to(at(server))) is not None


async def test_tls_as_the_agent_checks_it(
    servers: Yard, authority: Authority, to: Callable[..., Talk], tmp_path: Path
) -> None:
    cert, key = authority.issue("server", "DNS:localhost")
    port = free_port()
    files = [f"tls-cert-file {cert}", f"tls-key-file {key}", f"tls-ca-cert-file {authority.ca}"]
    server = await servers.server("port 0", f"tls-port {port}", "tls-auth-clients yes", *files, port=port)
    ours, secret = authority.issue("node", "DNS:n1")
    ca, cert_file, key_file = str(authority.ca), str(ours), str(secret)
    for name in ("localhost", ""):  # without a name it is not checked
        reply = asked(to(at(server, tls=Tls(ca, cert_file, key_file, name))))
        assert isinstance(reply, list) and reply[0] == 1
    for tls, status in (
        (Tls(ca, cert_file, key_file, "elsewhere"), "elsewhere"),
        (Tls("", cert_file, key_file, "localhost"), "CERTIFICATE_VERIFY_FAILED"),
        (Tls(str(Authority(tmp_path).ca), cert_file, key_file, "localhost"), "CERTIFICATE_VERIFY_FAILED"),
        (Tls(ca, "", "", "localhost"), "cannot be used"),
        (Tls(ca, "/absent", "", "localhost"), "/absent: no certificate"),
    ):
        with pytest.raises(TalkError, match=status):
            opened(to(at(server, tls=tls)))
    with pytest.raises(TalkError):
        opened(to(at(server)))


def let_go(fifo: Path) -> None:
    """Who reads it reads nothing."""
    fifo.open("w").close()


def until_refused(connection: Callable[[], Talk], why: str) -> None:
    """One of the next connections is: on a busy machine reading may take longer than a connection waits for it."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            opened(connection())
        except TalkError as error:
            assert why in str(error)
            return
        time.sleep(0.05)
    raise AssertionError("each was taken")


async def test_certificates_are_read_anew_and_a_disk_that_hangs_is_not_waited_for(
    servers: Yard, authority: Authority, to: Callable[..., Talk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whois, "open_plain", lambda _: io.BytesIO())  # which refuses a FIFO
    cert, key = authority.issue("server", "DNS:localhost")
    port, ca = free_port(), tmp_path / "ca.pem"
    files = [f"tls-cert-file {cert}", f"tls-key-file {key}", f"tls-ca-cert-file {authority.ca}"]
    server = await servers.server("port 0", f"tls-port {port}", "tls-auth-clients no", *files, port=port)
    place, certificates = at(server, tls=Tls(str(ca), "", "", "localhost")), Certificates()
    shutil.copy(authority.ca, ca)
    assert asked(to(place, certificates=certificates)) is not None
    ca.unlink()
    os.mkfifo(ca)  # opening it waits for who writes
    for _ in range(3):
        assert asked(to(place, certificates=certificates)) is not None, "with what was read before"
    let_go(ca)
    with pytest.raises(TalkError, match=rf"the disk of its certificates \({ca}\) hangs"):
        opened(to(place), 0.5)  # there is nothing that was read before
    let_go(ca)
    ca.unlink()
    (tmp_path / "other").mkdir()
    shutil.copy(Authority(tmp_path / "other").ca, ca)
    until_refused(lambda: to(place, certificates=certificates), "CERTIFICATE_VERIFY_FAILED")
    shutil.copy(authority.ca, ca)
    assert asked(to(place, certificates=certificates)) is not None, "a renewed one needs no restart"


def test_two_links_wait_for_the_same_certificates(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whois, "open_plain", lambda _: io.BytesIO())
    ca = tmp_path / "ca.pem"
    os.mkfifo(ca)
    certificates, until = Certificates(), boottime() + BOUND
    first, second = (certificates.newest(Tls(str(ca), "", "", ""), until) for _ in range(2))
    look = next(first)
    assert next(second).fd == look.fd
    ca.write_text(authority.ca.read_text())
    assert select.select([look.fd], [], [], BOUND)[0]
    for steps in (first, second):
        with pytest.raises(StopIteration) as end:
            steps.send(True)
        assert end.value.value is not None
