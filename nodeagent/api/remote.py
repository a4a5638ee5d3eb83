"""Identifies callers over https: a token, another agent's ticket, or a client certificate of the configured CA.

Each request is checked anew, and the file of tokens is read again when it changes. If the file cannot be used, no token
is accepted: an edit that was meant to exclude somebody must take effect. Must never reveal which part of a wrong secret
was right, accept a caller without a secret, or repeat a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pwd
import re
import ssl
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nodeagent.api import auth
from nodeagent.api.auth import CALLER, NOBODY, Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.loopback import FILES
from nodeagent.api.requests import MAX_BODY
from nodeagent.osutil.linux import open_plain, passing
from nodeagent.osutil.threads import DaemonPool
from nodeagent.spec.agentconfig import JobsConfig
from nodeagent.spec.errors import Problem, SpecError
from nodeagent.spec.sections import ApiConfig, TokenEntry, parse_tokens
from nodeagent.trust.certificate import CertificateError, configured, trust
from nodeagent.trust.ticket import SCHEME, Gate, TicketError, subject

LARGEST = 1024 * 1024
"""The most bytes of a tokens file."""
LOOK_LIMIT = 2.0
"""Seconds that a request waits for the disk of the tokens file."""

KnownTokens = Mapping[str, tuple[str, TokenEntry]]
"""SHA-256 to (name, entry)."""


def read_tokens(path: Path) -> KnownTokens:
    """The tokens in the file. Raises ``SpecError`` with every problem, and for a file that users other than its owner
    can read or change."""
    try:
        with open_plain(path) as file:
            found = os.fstat(file.fileno())
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise _refused(
            path, f"the tokens file cannot be read: {error.strerror}", "see api.tokens in the config"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO) or found.st_uid not in (0, os.geteuid()):
        what = f"the tokens file has mode {mode:04o} and belongs to uid {found.st_uid}"
        raise _refused(path, what, "only root, or the agent's user, may read and change it: chown it, and chmod 0600")
    if len(data) > LARGEST:
        raise _refused(path, f"the tokens file has more than {LARGEST} bytes", "is it the right file?")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _refused(path, "the tokens file is not UTF-8 text", "save it as UTF-8") from None
    return parse_tokens(text, str(path))


def _refused(path: Path, what: str, right: str) -> SpecError:
    return SpecError([Problem(str(path), 0, 0, what, right)])


class TokenBook:
    """One tokens file in its present state."""

    def __init__(self, path: Path | None, complain: Callable[[str], None]) -> None:
        self._path, self._complain = path, complain
        self._known: KnownTokens = {}
        self._version: tuple[int, ...] = ()
        self._thread = DaemonPool(1)
        """One, so that no request sees the new version with the old table; where the disk hangs, it does alone."""

    async def find(self, digest: str) -> tuple[str, TokenEntry] | None:
        """The name and the rights of the token of this SHA-256. Raises ``ApiError`` if the file's disk does not
        answer."""
        path = self._path
        if path is None:
            return None
        try:
            async with asyncio.timeout(LOOK_LIMIT):
                known = await asyncio.get_running_loop().run_in_executor(self._thread, self._newest, path)
        except (TimeoutError, RuntimeError):  # there may be no thread to be had
            what = f"{path}, by which tokens are known here, did not answer within {LOOK_LIMIT:g} s"
            raise ApiError("permission", what, "check that disk, or ask the agent of another node") from None
        return known.get(digest)

    def _newest(self, path: Path) -> KnownTokens:
        version: tuple[int, ...] = (0,)
        with contextlib.suppress(OSError):  # reading the file reports the error
            now = path.stat()
            version = (now.st_mtime_ns, now.st_size, now.st_ino, now.st_mode, now.st_uid)
        if version != self._version:
            self._version, self._known = version, {}
            try:
                self._known = read_tokens(path)
            except SpecError as wrong:
                self._complain(str(wrong))
                if isinstance(wrong.__cause__, OSError) and passing(wrong.__cause__):
                    self._version = ()  # read again at the next request, though the file is the same
        return self._known


CHALLENGE = "/v1/challenge"
PASSED_ON = re.compile(r"/v1/nodes/[^/]+/(diag|health/ack|health/inject)")
"""Changes that agents request from each other: an operator's requests about the asked node's own hardware."""
_HOW = (
    "send `Authorization: Bearer TOKEN` with a token of the agent's api.tokens file (nodeagentctl: --token-file), "
    "or a client certificate of its api.tls.client_ca"
)


class Doorkeeper:
    """Identifies the sender of a request."""

    def __init__(
        self, gate: Gate, certificate: str, tokens: TokenBook, jobs: Callable[[], JobsConfig], body_timeout: float
    ) -> None:
        """``jobs``: the config's section as it is now, since a reload may change who is an operator."""
        self.body_timeout = body_timeout
        """Seconds for a request's body to arrive."""
        self._gate, self._certificate, self._tokens, self._jobs = gate, certificate, tokens, jobs
        self._let_in: dict[asyncio.BaseTransport, tuple[str, tuple[str, TokenEntry]]] = {}
        """By connection: the SHA-256 of the token whose request is being answered, and what the file said of it."""

    async def watch_tokens(self, every: float) -> None:
        """Until cancelled, every so many seconds: closes the connections on which a request is being answered whose
        token has other rights by now, or none. Whoever follows a job's output asks once and reads for weeks."""
        while True:
            await asyncio.sleep(every)
            for transport, (digest, then) in [*self._let_in.items()]:
                with contextlib.suppress(ApiError):  # its disk does not answer now: that takes no right from anybody
                    if await self._tokens.find(digest) != then:
                        transport.close()

    def answered(self, transport: asyncio.BaseTransport | None) -> None:
        """The answer on this connection is complete, or was given up."""
        if transport is not None:
            self._let_in.pop(transport, None)

    def challenge(self) -> str:
        """A challenge for the next ticket."""
        return self._gate.challenge()

    async def who(self, request: web.Request) -> Caller:
        """The sender. Raises ``ApiError``: ``unknown_caller``, or ``permission`` for a known caller without the
        right."""
        given = request.headers.get("Authorization", "")
        if not given.isascii():  # bytes that are no text cannot be hashed, or compared
            raise ApiError("unknown_caller", "this credential is not known here: it is not plain ASCII", _HOW)
        if given.startswith(f"{SCHEME} "):
            return self._by_ticket(request, given)
        if given.startswith("Bearer "):
            found = await self._tokens.find(digest := _digest(given))
            if found is None:
                raise ApiError("unknown_caller", "this agent does not know the token", "see api.tokens in its config")
            if request.transport is not None:
                self._let_in[request.transport] = digest, found
            return await self._by_token(request, *found)
        if given:
            raise ApiError("unknown_caller", "this kind of credential is not known here", _HOW)
        if name := _certificate_name(request):
            return Caller(
                NOBODY, NOBODY, f"certificate {name}", operator=False, trusted=False, reads_only=True, remote=True
            )
        raise ApiError("unknown_caller", "the caller is unknown", _HOW)

    def _by_ticket(self, request: web.Request, given: str) -> Caller:
        reads = request.method == "GET"
        if not reads and not (request.method == "POST" and PASSED_ON.fullmatch(request.path)):
            raise ApiError(
                "permission",
                "agents may ask each other only to read, and about hardware",
                "ask the agent of your own node",
            )
        try:
            ticket = self._gate.take(given, subject(request.method, request.raw_path), self._certificate)
        except TicketError as wrong:
            raise ApiError(
                "unknown_caller", f"the other agent's ticket is not accepted: {wrong}", "try again"
            ) from None
        return Caller(
            ticket.uid, NOBODY, ticket.name, operator=ticket.operator, trusted=False, reads_only=reads, remote=True
        )

    async def _by_token(self, request: web.Request, name: str, token: TokenEntry) -> Caller:
        if token.user is None:
            may = token.may == "operate"
            return Caller(
                NOBODY, NOBODY, f"token {name}", operator=may, trusted=False, reads_only=not may, remote=True
            )  # fmt: skip
        user, jobs = token.user, self._jobs()

        def look() -> Caller | None:
            try:
                found = pwd.getpwnam(user)
            except KeyError:
                return None
            return auth.identify(found.pw_uid, found.pw_gid, jobs, os.geteuid())

        key = ("token", user, jobs.operators)
        who = await auth.database(request).ask(key, look, user)
        if who is None:
            raise ApiError(
                "permission",
                f"token {name} acts as {user}, who is no user of this node",
                "correct it in the agent's tokens file, or ask an agent of a node that knows the user",
            )
        return replace(who, trusted=False, remote=True)


def _digest(given: str) -> str:
    return hashlib.sha256(given.removeprefix("Bearer ").strip().encode()).hexdigest()


def _certificate_name(request: web.Request) -> str:
    """The name in the verified client certificate; empty without one."""
    transport = request.transport
    found = None if transport is None else transport.get_extra_info("ssl_object")
    if not isinstance(found, ssl.SSLObject):
        return ""
    certificate = found.getpeercert()
    if not certificate:
        return ""
    subject = cast("Iterable[Iterable[tuple[str, str]]]", certificate.get("subject", ()))
    names = [value for part in subject for key, value in part if key == "commonName"]
    return names[0] if names else "without a name"


class RemoteConnections(Protocol):
    """The https server's, as far as it matters whose they are."""

    def passed(self, transport: asyncio.BaseTransport, who: Caller) -> None:
        """The caller on this connection has been identified. Raises ``ApiError`` to refuse it."""
        ...

    def may_ask_again(self, transport: asyncio.BaseTransport) -> bool:
        """Whether there may be another request on this connection, after one without credentials."""
        ...


def _for_all(request: web.Request) -> bool:
    """It needs no credentials: a challenge, or one of the status page's files. They say nothing about the cluster."""
    return request.method == "GET" and (request.path == CHALLENGE or request.path in FILES)


@web.middleware
async def farewell_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ends the connection with the answer to a caller who was not let in: each more costs the loop as much."""
    answer = await handler(request)
    if CALLER not in request and not _for_all(request):
        answer.force_close()
    return answer


def door_middleware(keeper: Doorkeeper, connections: RemoteConnections) -> Middleware:
    """Lets only requests of identified callers pass, and those that need no credentials, a few on each connection. The
    body is read here, within its bound."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _for_all(request):
            if request.path == CHALLENGE:
                answer: web.StreamResponse = web.json_response({"challenge": keeper.challenge()})
                answer.headers["Cache-Control"] = "no-store"
            else:
                answer = await handler(request)
            if request.transport is not None and not connections.may_ask_again(request.transport):
                answer.force_close()
            return answer
        transport = request.transport  # None once the caller has gone
        try:
            return await let_in(request, handler)
        finally:
            keeper.answered(transport)

    async def let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
        who = await keeper.who(request)
        if who.reads_only and request.method not in ("GET", "HEAD"):
            raise ApiError(
                "permission", f"{who.name} may read, not change", "use a token that may; nothing was changed"
            )
        if request.transport is not None:
            connections.passed(request.transport, who)
        try:
            async with asyncio.timeout(keeper.body_timeout):
                await request.read()
        except TimeoutError:
            late = f"the request did not arrive within {keeper.body_timeout:g} s"
            raise ApiError("usage", late, "try again; nothing was changed") from None
        except web.HTTPRequestEntityTooLarge:
            raise ApiError(
                "usage", f"the request is larger than {MAX_BODY} bytes", "keep large values in files"
            ) from None
        request[CALLER] = who
        return await handler(request)

    return middleware


def check_files(api: ApiConfig) -> list[str]:
    """A line for each mistake in the configured files."""
    found = []
    if api.tokens is not None:
        try:
            read_tokens(api.tokens)
        except SpecError as wrong:
            found += str(wrong).splitlines()
    try:
        if api.tls.cert is not None:
            configured(api.tls)
        elif api.tls.client_ca is not None:
            trust(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), api.tls.client_ca)
    except CertificateError as wrong:
        found.append(str(wrong))
    return found
