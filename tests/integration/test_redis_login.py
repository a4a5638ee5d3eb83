"""How an agent is let in: TLS with a throw-away CA, ACL users, password files, a unix socket. Real servers."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from nodeagent.doctor.cluster import store_problem
from nodeagent.model.timing import Timing
from nodeagent.plan.findings.store import judge
from nodeagent.spec.configfile import parse_config
from nodeagent.spec.storeconfig import RedisConfig, SentinelConfig, TlsConfig
from nodeagent.store.base import StoreUnavailableError
from nodeagent.store.client import connect
from nodeagent.store.endpoint import AccessError
from nodeagent.store.inspect import inspect
from nodeagent.store.wire import Connection
from tests.contract.bench import FAST, Bench, spec
from tests.integration.redis_support import BOUND, Authority, Server, Yard, ask, yard
from tests.ports import free_port
from tests.submitting import submit_one

pytestmark = pytest.mark.redis
PASSWORD = "a-long-secret/with?odd@letters"
ACL = (
    "~na:{test}:* -@all +@read +@write +@scripting +@connection -@dangerous +info +wait +time",
    "+config|get",
)
"""As docs/config.md gives it, for the cluster ``test``."""


@pytest.fixture
def servers() -> Iterator[Yard]:
    with yard() as found:
        yield found


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


async def works(config: RedisConfig) -> None:
    store = connect(config, "test", 5.0)
    try:
        assert (await submit_one(store, "u1", spec(), 0, 1.0, "ann", "r1")).name == "train"
    finally:
        await store.close()


async def fails(config: RedisConfig) -> str:
    store = connect(config, "test", 5.0)
    try:
        with pytest.raises(StoreUnavailableError) as caught:
            await store.remove("u1")
    finally:
        await store.close()
    return str(caught.value)


def secret(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / f"password-{mode:o}"
    path.write_text(text)
    path.chmod(mode)
    return path


# --- TLS


def tls_lines(authority: Authority, names: str, port: int, clients: str = "no") -> list[str]:
    cert, key = authority.issue("server", names)
    files = [f"tls-cert-file {cert}", f"tls-key-file {key}", f"tls-ca-cert-file {authority.ca}"]
    return ["port 0", f"tls-port {port}", f"tls-auth-clients {clients}", *files]


async def tls_server(servers: Yard, authority: Authority, names: str, clients: str) -> Server:
    port = free_port()
    return await servers.server(*tls_lines(authority, names, port, clients), port=port)


async def test_tls_with_our_ca_and_the_servers_name(servers: Yard, authority: Authority) -> None:
    server = await tls_server(servers, authority, "DNS:localhost", "no")
    url = f"rediss://localhost:{server.port}/0"
    ours = TlsConfig(ca_file=authority.ca)
    await works(RedisConfig(url=url, tls=ours))
    assert "do not agree on TLS" in await fails(RedisConfig(url=url)), "the system knows nothing of our CA"
    by_address = f"rediss://127.0.0.1:{server.port}/0"
    text = await fails(RedisConfig(url=by_address, tls=ours))
    assert "do not agree on TLS" in text
    assert "127.0.0.1" in text
    await works(RedisConfig(url=by_address, tls=ours.model_copy(update={"check_hostname": False})))
    assert "cannot be reached" in await fails(RedisConfig(url=f"redis://localhost:{server.port}/0"))


async def test_with_a_ca_of_our_own_the_systems_are_not_trusted(
    servers: Yard, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await tls_server(servers, authority, "DNS:localhost", "no")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    url = f"rediss://localhost:{server.port}/0"
    await works(RedisConfig(url=url))
    other = Authority(tmp_path)
    assert "do not agree on TLS" in await fails(RedisConfig(url=url, tls=TlsConfig(ca_file=other.ca)))


async def test_tls_with_a_certificate_of_our_own(servers: Yard, authority: Authority) -> None:
    server = await tls_server(servers, authority, "DNS:localhost,IP:127.0.0.1", "yes")
    url = f"rediss://127.0.0.1:{server.port}/0"
    cert, key = authority.issue("node", "DNS:n1")
    await works(RedisConfig(url=url, tls=TlsConfig(ca_file=authority.ca, cert_file=cert, key_file=key)))
    both = authority.folder / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    await works(RedisConfig(url=url, tls=TlsConfig(ca_file=authority.ca, cert_file=both)))
    assert str(server.port) in await fails(RedisConfig(url=url, tls=TlsConfig(ca_file=authority.ca)))


async def test_new_certificates_need_no_restart(servers: Yard, authority: Authority, tmp_path: Path) -> None:
    server = await tls_server(servers, authority, "DNS:localhost", "no")
    file = secret(tmp_path, Authority(tmp_path).ca.read_text())
    config = RedisConfig(url=f"rediss://localhost:{server.port}/0", tls=TlsConfig(ca_file=file))
    store = connect(config, "test", 5.0)
    with pytest.raises(StoreUnavailableError, match="do not agree on TLS"):
        await store.remove("u1")
    file.write_text(authority.ca.read_text())
    await store.remove("u1")
    await store.close()


async def test_tls_through_a_sentinel_too(servers: Yard, authority: Authority) -> None:
    """The sentinel names an address, and the certificate must be for it."""
    server = await tls_server(servers, authority, "IP:127.0.0.1", "no")
    port = free_port()
    lines = tls_lines(authority, "DNS:localhost,IP:127.0.0.1", port)
    watch = f"sentinel monitor gpus 127.0.0.1 {server.port} 1"
    await servers.server(*lines, "tls-replication yes", watch, port=port, sentinel=True)
    url = f"rediss+sentinel://localhost:{port}/gpus/0"
    await works(RedisConfig(url=url, tls=TlsConfig(ca_file=authority.ca), replicas=0))
    assert "none of its 1 sentinels names a primary" in await fails(RedisConfig(url=url))


async def test_a_link_to_a_server_that_hangs_is_closed_at_once(servers: Yard, authority: Authority) -> None:
    """With TLS it took half a minute: each try to reach a frozen store held one more descriptor for so long."""
    server = await tls_server(servers, authority, "DNS:localhost", "no")
    before = sockets()
    link = Connection(("localhost", server.port), ssl.create_default_context(cafile=authority.ca))
    await link.open()
    assert len(sockets()) == len(before) + 1
    server.signal(signal.SIGSTOP)
    await link.close()
    for _ in range(3):  # turns of the loop
        await asyncio.sleep(0)
    assert sockets() == before


def sockets() -> set[str]:
    """That this process has open."""
    links = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return {link for link in links if link.startswith("socket:")}


@pytest.mark.parametrize("broken", ["ca_file", "cert_file"])
def test_a_certificate_that_cannot_be_read_is_reported_at_once(tmp_path: Path, broken: str) -> None:
    for path in (tmp_path / "absent.pem", secret(tmp_path, "no certificate")):
        config = RedisConfig(url="rediss://h", tls=TlsConfig.model_validate({broken: path}))
        with pytest.raises(AccessError, match=str(path)):
            connect(config, "test", 1.0)


# --- passwords and users


async def test_an_acl_user_needs_no_more_than_the_document_says(servers: Yard, tmp_path: Path) -> None:
    server = await servers.server("user default off", f"user nodeagent on >{PASSWORD} {' '.join(ACL)}")
    file = secret(tmp_path, PASSWORD + "\n")
    login = RedisConfig(url=f"redis://nodeagent@127.0.0.1:{server.port}/0", password_file=file)
    store = connect(login, "test", 5.0)
    bench = Bench(store)
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    assert await store.wait("0-0", 1.0) != "0-0"
    assert await store.events("0-0", 10)
    assert await store.pods({job.uid: ["n1"]}) == {job.uid: ()}
    await bench.store.leave("n1", bench.lives["n1"])
    other = connect(login, "elsewhere", 5.0)
    with pytest.raises(StoreUnavailableError, match="refused this agent"):
        await other.remove("u1")
    for one in (store, other):
        await one.close()
    facts = await inspect(login, 5.0)
    assert facts.problem == ""
    assert (facts.appendfsync, facts.min_replicas) == ("everysec", 0)
    assert "user and password" in await fails(RedisConfig(url=server.url))


async def test_config_that_may_not_be_asked_is_unknown(servers: Yard) -> None:
    server = await servers.server(f"user nodeagent on >pw {ACL[0]}", "appendonly yes")
    facts = await inspect(RedisConfig(url=f"redis://nodeagent:pw@127.0.0.1:{server.port}/0"), 5.0)
    assert (facts.problem, facts.appendonly, facts.policy) == ("", True, "noeviction")
    assert (facts.appendfsync, facts.min_replicas, facts.max_lag) == (None, None, None)
    (finding,) = judge(facts, FAST)
    assert "unknown: appendfsync" in finding.what


async def test_a_new_password_needs_no_restart(servers: Yard, tmp_path: Path) -> None:
    server = await servers.server("requirepass old")
    file = secret(tmp_path, "old")
    store = connect(RedisConfig(url=server.url, password_file=file), "test", 5.0)
    await store.remove("u1")
    await ask(server, "CONFIG", "SET", "requirepass", "new", password="old")
    await ask(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password="new")
    for _ in range(2):  # the first finds its link dead, the second logs in with what the file says
        with pytest.raises(StoreUnavailableError) as caught:
            await store.remove("u1")
    assert "password" in str(caught.value)
    file.write_text("new\n")
    await store.remove("u1")
    await store.close()


async def test_check_config_says_whether_the_store_lets_an_agent_in(servers: Yard, tmp_path: Path) -> None:
    server = await servers.server("requirepass right")
    config = tmp_path / "nodeagent.yaml"
    config.write_text(f"redis: {{url: {server.url}, password_file: {secret(tmp_path, 'right')}}}\n")

    async def checked() -> tuple[int | None, str]:
        words = (sys.executable, "-m", "nodeagent.agent.main", "check-config", "--store", str(config))
        child = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=STDOUT)
        async with asyncio.timeout(BOUND):
            out, _ = await child.communicate()
        return child.returncode, out.decode()

    first = await checked()
    assert first == (0, f"{config}: ok\n")
    secret(tmp_path, "guess")
    code, text = await checked()
    assert code == 1
    assert text.startswith(f"{config}: the store cannot be used: ") and "password" in text
    assert "guess" not in text
    server.stop()
    code, text = await checked()
    assert (code, "the store cannot be used" in text) == (1, True)


async def test_check_config_says_that_the_cluster_has_another_timing(servers: Yard, tmp_path: Path) -> None:
    """It said that all is well: the agent that was then restarted was refused, and what trained on its node ended."""
    server = await servers.server()
    config = RedisConfig(url=server.url)
    text = f"redis: {{url: {server.url}}}\ncluster: test\n"
    assert await store_problem(parse_config(text, "test", {}, uid=0)) == "", "there is no such cluster yet"
    store = connect(config, "test", 5.0)
    bench = Bench(store)
    bench.timing = Timing(lease=4.0)
    await bench.up("n1")
    why = await store_problem(parse_config(text, "test", {}, uid=0))
    assert why.startswith("the cluster's timing differs from this agent's: lease is 4.0 there and 3.0 here.")
    assert await store_problem(parse_config(f"{text}timing: {{lease: 4s}}\n", "test", {}, uid=0)) == ""
    await ask(server, "HSET", "na:{test}:meta", "version", "999")
    assert (await store_problem(parse_config(text, "test", {}, uid=0))).startswith("its records have version 999")
    await store.close()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("pw", 0o604, "has mode 0604.*chmod 0600"),
        ("pw", 0o620, "has mode 0620"),
        ("", 0o600, "does not hold one line"),
        ("two\nlines", 0o600, "does not hold one line"),
        ("x" * 5000, 0o600, "does not hold one line"),
    ],
)
def test_a_password_file_that_will_not_do_is_reported_at_once(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    for section in (
        RedisConfig(password_file=secret(tmp_path, text, mode)),
        RedisConfig(
            url="redis+sentinel://h/m", sentinel=SentinelConfig(password_file=secret(tmp_path, text, mode))
        ),
    ):  # fmt: skip
        with pytest.raises(AccessError, match=message):
            connect(section, "test", 1.0)


def test_a_password_file_may_be_read_by_its_group(tmp_path: Path) -> None:
    connect(RedisConfig(password_file=secret(tmp_path, "pw", 0o640)), "test", 1.0)
    with pytest.raises(AccessError, match="absent cannot be read: No such file"):
        connect(RedisConfig(password_file=tmp_path / "absent"), "test", 1.0)


async def test_a_password_file_that_vanishes_is_reported_with_the_next_connection(
    servers: Yard, tmp_path: Path
) -> None:
    server = await servers.server("requirepass pw")
    file = secret(tmp_path, "pw")
    store = connect(RedisConfig(url=server.url, password_file=file), "test", 5.0)
    file.unlink()
    with pytest.raises(StoreUnavailableError, match=f"{file} cannot be read"):
        await store.remove("u1")
    await store.close()


async def test_a_unix_socket_with_user_password_and_database(servers: Yard) -> None:
    server = await servers.server("user ann on >pw ~* +@all")
    await works(RedisConfig(url=f"unix://ann:pw@{server.socket}?db=3"))
    assert str(await ask(server, "INFO", "keyspace")).splitlines()[1].startswith("db3:")


async def test_links_that_connect_when_no_name_is_resolved_go_where_the_others_went(
    servers: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await servers.server()
    store = connect(f"redis://localhost:{server.port}/0", "test", 5.0)
    assert (await submit_one(store, "u1", spec(), 0, 1.0, "ann", "r1")).name == "train"

    def unknown(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert await store.history_bytes([0]) == {0: 0}
    other = connect(f"redis://localhost:{server.port}/0", "test", 5.0)
    with pytest.raises(StoreUnavailableError, match="the name localhost is not resolved: Temporary failure"):
        await other.history_bytes([0])
    await store.close()
    await other.close()
