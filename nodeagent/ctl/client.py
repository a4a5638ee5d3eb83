"""Finds an agent and sends it requests: HTTP over its unix socket, or https if the user named one so. Uses only the
standard library, so it starts fast.

The restart of an agent, or its end while other agents run on this machine, does not end a long command: with
``patience`` the client looks for any agent of the same cluster here. Must never send a change without a request id: if
the answer to a change was lost, the change is sent again. Nor anything to another user's process whose socket nobody
but a node's record names, which nobody signs.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import select
import socket
import ssl
import struct
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from nodeagent.ctl.terminal import BY_STATUS, BrokeOffError, CtlError, Exit, NoAgentError, echo, local_failures
from nodeagent.ctl.where import ENV, ENV_CACERT, ENV_FINGERPRINT, Where

Json = dict[str, Any]

ENDED = ("succeeded", "failed", "stopped")
"""Phases of a job that has ended, as agents answer them."""

CONNECT_TIMEOUT = 3.0
ANSWER_TIMEOUT = 30.0
"""Seconds for one answer, and the longest silence of a stream (agents send a sign of life every 10 s)."""
SLOW = 5.0
"""Seconds without an answer until the person who waits sees a line about it."""
SYSTEM_SOCKET = "/run/nodeagent/api.sock"
NOT_JOINED = "not_joined"
"""The agent has only just started, or was refused: another agent may be able to answer, or the same one in a moment."""
HOW_TO_START = (
    "start one: `nodeagentctl local up --nodes 2` (here, for development) or `systemctl start nodeagent`; "
    f"or say where it is: --agent PATH|https://HOST:PORT or {ENV}"
)

HOW_TO_WAKE = (
    "it hangs, or its machine is overloaded; workers go on meanwhile. See its log: journalctl -u nodeagent -n 50; "
    "start it again: systemctl restart nodeagent; or ask another one: --agent PATH|https://HOST:PORT"
)
HOW_TO_GET_IN = (
    "somebody makes connections without end (an operator sees who: ss -xp), which the agent hangs up on; ask again, or "
    "another agent: --agent PATH|https://HOST:PORT"
)
HOW_TO_REACH = "see that it runs, that its api.listen is on, and that no firewall is between; or ask another agent"


class _LostError(Exception):
    """The request was sent, at least in part, and its answer did not come: the agent may have done what it says."""

    def __init__(self, what: str, *, silent: bool = False) -> None:
        super().__init__(what)
        self.silent = silent
        """The agent is connected, and says nothing."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float, *, vouched: bool) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path, self._seconds, self._vouched = path, timeout, vouched

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A blocking call waits in the kernel's line where that is full; one with Python's timeout fails at once.
        whole, rest = divmod(self._seconds, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(rest * 1e6)))
        self.sock.connect(self._path)
        if not self._vouched:
            from nodeagent.osutil.linux import peer_credentials

            if (uid := peer_credentials(self.sock)[1]) not in (0, os.geteuid()):
                raise PermissionError(f"user {uid} listens there, who is neither root nor you")
        self.sock.settimeout(self._seconds)


def usual_sockets() -> list[str]:
    """The usual sockets of an agent of this machine, or of this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = f"{runtime}/nodeagent" if runtime.startswith("/") else f"/tmp/nodeagent-{os.getuid()}"
    return [SYSTEM_SOCKET, f"{own}/api.sock"]


def local_clusters() -> dict[str, list[str]]:
    """Name to sockets of each of this user's running development clusters. Raises ``CtlError``."""
    from nodeagent.local.registry import find

    with local_failures():
        return {name: [str(path) for path in sockets] for name, sockets in find().items()}


def _strangers(path: str) -> str:
    """Why this usual place is not trusted: another user may have made it in /tmp; empty if it is trusted."""
    folder = os.path.dirname(path)  # noqa: PTH120 (this module starts fast)
    try:
        owner = os.lstat(folder).st_uid
    except OSError:
        return ""
    if owner in (0, os.getuid()):
        return ""
    return f"{folder} belongs to uid {owner}, not to you, and was passed over: have it removed, or set XDG_RUNTIME_DIR"


def _path_of(agent: str) -> str:
    if agent.startswith("unix://"):
        return agent.removeprefix("unix://")
    if "://" in agent:
        raise CtlError(
            f"cannot talk to {agent}: agents speak https, and HTTP on their unix socket alone",
            Exit.USAGE,
            "give https://HOST:PORT, or the path of a unix socket",
        )
    return str(Path(agent).absolute())


def find(where: Where | str | None = None) -> Client:
    """The agent that options or environment name, else the first that answers here.

    Raises ``NoAgentError``; ``CtlError`` if several local clusters run here, since a command could reach the wrong one.
    """
    from nodeagent.osutil.linux import listens

    named = (where if isinstance(where, Where) else Where(where)).complete(os.environ)
    if named.remote:
        named.place()
        return Client([], remote=named)
    if named.agent:
        path = _path_of(named.agent)
        if not listens(path, CONNECT_TIMEOUT):
            raise NoAgentError(f"no agent listens on {path}", HOW_TO_START)
        return Client([path])
    usual, strange = usual_sockets(), []
    for path in usual:
        if not (stranger := _strangers(path)):
            if listens(path, CONNECT_TIMEOUT):
                return Client([path])
        else:
            strange.append(stranger)
    if local := local_clusters():
        if len(local) > 1:
            raise CtlError(
                f"{len(local)} local clusters run here ({', '.join(local)}); which one is meant?",
                Exit.USAGE,
                f"name an agent of it, by {ENV} or by --agent; or end what is not needed: "
                "nodeagentctl local down --name NAME",
                [f"{name}: --agent {sockets[0]}" for name, sockets in local.items()],
            )
        return Client(next(iter(local.values())))
    looked = f"looked at {', '.join(usual)} and for local clusters"
    raise NoAgentError("; ".join([f"no agent runs on this machine ({looked})", *strange]), HOW_TO_START)


SAME_REQUEST = "the same request id"
"""The words with which agents report that a change may or may not have been done."""
UNKNOWN_OUTCOME = "unknown_outcome"
"""The store, or the agent, stopped answering in the middle of a change; sent again with the same request id, it happens
once."""
ASK_AGAIN_FOR = 10.0
"""Seconds to send such a change again before a person is asked to: a store that is restarted is back by then."""
ASK_AGAIN_EVERY = 0.5
"""Seconds between two attempts."""
ASK_FOR_SAVED = 5.0
"""Seconds to send a change again that was done, but is not on enough disks yet: on nodes that are busy it soon is."""


def new_request_id() -> str:
    """A new id for one change that a person requests; every repetition of the change has the same id."""
    return uuid.uuid4().hex


class Client:
    """Sends requests to one agent at a time, over its unix socket, or to an agent of another machine."""

    def __init__(self, sockets: list[str], patience: float = 0.0, remote: Where | None = None) -> None:
        self.sockets = sockets
        self.patience = patience
        """Seconds to look for an agent that answers before giving up."""
        self.remote = remote
        """The agent to ask over https; then no socket is used."""
        self.near: frozenset[str] = frozenset()
        """Sockets that nodes' records alone name."""
        self._slow = set[str]()
        """Agents that were reported as slow."""

    def twin(self) -> Client:
        """A copy of this client, for another thread."""
        twin = Client(list(self.sockets), self.patience, self.remote)
        twin.near = self.near
        return twin

    def endure(self, patience: float) -> None:
        """From now on survive the loss of this agent, if another agent on this machine can replace it."""
        self.patience = patience
        if self.remote is not None:
            return
        near = [n["api_socket"] for n in self.pages("/v1/nodes")["items"] if _is_near(n)]
        new = [path for path in near if path not in self.sockets]
        self.sockets, self.near = [*self.sockets, *new], self.near.union(new)

    def get(self, path: str, **query: object) -> Json:
        """The answer to a GET. Raises ``CtlError`` for every answer that is not a success."""
        return self._call("GET", path + _query(query), None)

    def pages(self, path: str) -> Json:
        """A list that comes in pages, as one answer: the first page's, with the items of all, and what of all could not
        be read."""
        whole = page = self.get(path)
        while after := page["next"]:
            page = self.get(path, after=after)
            for name in ("items", "unread"):
                if name in page:
                    whole[name] += page[name]
        del whole["next"]
        return whole

    def change(self, method: str, path: str, request_id: str | None = None, **body: object) -> Json:
        """Sends a change, which is done at most once however often it is sent: again for ``ASK_AGAIN_FOR`` seconds
        while it is unknown whether it was done. If it still is, the error names the request id for another attempt.
        Then again for ``ASK_FOR_SAVED`` seconds until it is on enough disks: the answer is the first one, with what
        the last one says of that."""
        asked = request_id or new_request_id()
        try:
            done = self._until_saved(method, path, {"request_id": asked, **body})
        except CtlError as error:
            error.next_step = error.next_step.replace(SAME_REQUEST, f"{SAME_REQUEST} (--request-id {asked})")
            raise
        done["request_id"] = asked
        return done

    def _until_saved(self, method: str, path: str, body: Json) -> Json:
        try:
            done = self._until_known(method, path, body)
        except KeyboardInterrupt:
            raise _unknown("interrupted", code=Exit.INTERRUPTED) from None
        give_up = time.monotonic() + ASK_FOR_SAVED
        try:
            while done.get("saved", {}).get("text") and time.monotonic() < give_up:
                time.sleep(ASK_AGAIN_EVERY)
                try:
                    done["saved"] = self._call(method, path, body)["saved"]
                except CtlError as error:
                    if method == "DELETE" and error.code == Exit.NOT_FOUND:  # more than asked for: it is done
                        done["saved"]["text"] = ""
                    break  # the answer stands; what has changed since is not what was asked
        except KeyboardInterrupt:
            again = f"ask again with {SAME_REQUEST}: it happens once, and counts as done when it is saved"
            raise CtlError(f"interrupted: {done['saved']['text']}", Exit.INTERRUPTED, again) from None
        return done

    def _until_known(self, method: str, path: str, body: Json) -> Json:
        unknown: CtlError | None = None
        give_up = 0.0
        while True:
            try:
                return self._call(method, path, body)
            except CtlError as error:
                if error.kind == UNKNOWN_OUTCOME:
                    give_up = give_up or time.monotonic() + ASK_AGAIN_FOR
                    unknown = error
                if unknown is None or error.code != Exit.UNREACHABLE:
                    error.retried = unknown is not None
                    raise
            # The later refusals say that *they* changed nothing, which is no word about the first attempt.
            if time.monotonic() >= give_up:
                raise unknown
            time.sleep(ASK_AGAIN_EVERY)

    def _call(self, method: str, path: str, body: Json | None) -> Json:
        response = self._open(method, path, body)
        try:
            value = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            broken = f"the agent's answer broke off: {error}"
            raise (NoAgentError(broken, "ask again") if body is None else _unknown(broken)) from error
        finally:
            response.close()
        if not isinstance(value, dict):
            raise _no_answer(path, value)
        return value

    def stream(self, path: str, **query: object) -> Generator[Json, None, None]:
        """JSON lines as they come. Raises ``BrokeOffError`` when the connection breaks before its orderly end."""
        response = self._open("GET", path + _query(query), None)
        try:
            while True:
                line = response.readline()
                if not line:
                    raise BrokeOffError("the agent hung up", "ask again")
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise _no_answer(path, value)
                if "end" in value:
                    return
                if value:
                    yield value
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BrokeOffError(f"the connection to the agent broke: {error}", "ask again") from error
        finally:
            response.close()

    def _open(self, method: str, path: str, body: Json | None) -> http.client.HTTPResponse:
        give_up = time.monotonic() + self.patience
        away = HOW_TO_START if self.remote is None else HOW_TO_REACH
        failed, step = "no agent's socket was found on this machine", away
        while True:
            for at in list(self.sockets) if self.remote is None else [self.remote]:
                try:
                    response = _send(at, method, path, body, self._report_slow, vouched=at not in self.near)
                except _LostError as error:
                    failed, step = f"the agent at {_name(at)} {error}", HOW_TO_WAKE if error.silent else away
                    if body is None:
                        continue
                    if isinstance(at, str):  # the next attempt begins with another one
                        self.sockets.remove(at)
                        self.sockets.append(at)
                    raise _unknown(failed, HOW_TO_WAKE if error.silent else "") from error
                except BlockingIOError:
                    failed = f"the agent at {_name(at)} took no connection for {ANSWER_TIMEOUT:g} s: too many wait"
                    step = HOW_TO_GET_IN
                    continue
                except (OSError, http.client.HTTPException) as error:
                    why = str(error) or type(error).__name__
                    failed, step = f"no answer from the agent at {_name(at)}: {why}", away
                    continue
                if isinstance(at, str):
                    self.sockets.remove(at)
                    self.sockets.insert(0, at)
                if response.status < 400:
                    return response
                refusal = _refusal(response)
                if refusal.kind != NOT_JOINED:
                    raise refusal
                failed, step = refusal.message, refusal.next_step
            if time.monotonic() >= give_up:
                raise NoAgentError(failed, step)
            time.sleep(0.2)

    def _report_slow(self, name: str) -> None:
        """Once."""
        if name not in self._slow:
            self._slow.add(name)
            text = f"the agent at {name} has not answered yet; waiting up to {ANSWER_TIMEOUT:g} s"
            echo(f"nodeagentctl: {text}", err=True)


def _is_near(node: Json) -> bool:
    """Returns whether the socket of the node's agent is on this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return bool(node["boot_id"] == boot and node["api_socket"])


def _name(at: str | Where) -> str:
    return str(at.agent) if isinstance(at, Where) else at


def _no_answer(path: str, value: object) -> CtlError:
    """The failure when JSON came, but not an agent's."""
    what = f"the answer to {path} is not an agent's: {json.dumps(value)[:60]} is not a JSON object"
    return CtlError(what, Exit.FAILED, f"is it an agent, and of this version? See --agent and {ENV}")


def _unknown(what: str, more: str = "", code: int = Exit.UNREACHABLE) -> CtlError:
    """The failure when a change was sent and its answer did not come. ``more`` to do than to ask again."""
    again = f"ask again with {SAME_REQUEST}: it happens once" + (f"; {more}" if more else "")
    error = CtlError(f"{what}; it is not known whether the change was done", code, again)
    error.kind = UNKNOWN_OUTCOME
    return error


def _send(
    at: str | Where, method: str, path: str, body: Json | None, slow: Callable[[str], None], *, vouched: bool
) -> http.client.HTTPResponse:
    """``slow`` is called with the agent's name when it takes long. ``vouched``: whoever listens there is asked. Raises
    OSError, HTTPException as long as nothing was sent, then ``_LostError``."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection: http.client.HTTPConnection
    if isinstance(at, Where):
        connection = TlsConnection(at, ANSWER_TIMEOUT)
        if token := at.token():
            headers["Authorization"] = f"Bearer {token}"
    else:
        connection = _UnixConnection(at, ANSWER_TIMEOUT, vouched=vouched)
    try:
        payload = None if body is None else json.dumps(body)
        connection.connect()
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # who is refused is answered before that
                connection.request(method, path, payload, headers)
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(SLOW * 1000):
                slow(_name(at))
            return connection.getresponse()
        except TimeoutError as error:
            raise _LostError(f"did not answer within {ANSWER_TIMEOUT:g} s", silent=True) from error
        except (OSError, http.client.HTTPException) as error:
            raise _LostError(f"hung up: {str(error) or type(error).__name__}") from error
    except BaseException:
        connection.close()
        raise


def _refusal(response: http.client.HTTPResponse) -> CtlError:
    code = BY_STATUS.get(response.status, Exit.FAILED)
    try:
        error = json.loads(response.read())["error"]
        refusal = CtlError(error["message"], code, error.get("next", ""), error.get("problems", ()))
        refusal.kind = error["code"]
        return refusal
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return CtlError(f"the agent answered {response.status} {response.reason}", code, "see the agent's log")
    finally:
        response.close()


def _query(query: dict[str, object]) -> str:
    chosen = {k: int(v) if isinstance(v, bool) else v for k, v in query.items() if v is not None and v is not False}
    return f"?{urlencode(chosen)}" if chosen else ""


def look_up(client: Client, path: str) -> Json | None:
    """The answer to a GET; None where there is no such thing. Raises ``CtlError`` as ``Client.get`` does."""
    try:
        return client.get(path)
    except CtlError as error:
        if error.code != Exit.NOT_FOUND:
            raise
        return None


def job_path(job: str) -> str:
    """The path of a job, by name or uid."""
    return f"/v1/jobs/{quote(job, safe='')}"


def array_path(array: str) -> str:
    """The path of an array, by name or id."""
    return f"/v1/arrays/{quote(array, safe='')}"


def node_path(node: str) -> str:
    """The path of a node."""
    return f"/v1/nodes/{quote(node, safe='')}"


CONNECT_BOUND = 5.0
"""Seconds to connect, and for the handshake."""


class TlsConnection(http.client.HTTPConnection):
    """A connection to the named agent. ``connect`` raises ``NoAgentError`` for an agent that is not trusted."""

    def __init__(self, where: Where, timeout: float) -> None:
        self._host, self._port = where.place()
        super().__init__(self._host, self._port, timeout=timeout)
        self._digests = where.digests()
        self._context = _context(where)

    def connect(self) -> None:
        plain = socket.create_connection((self._host, self._port), CONNECT_BOUND)
        try:
            secure = self._context.wrap_socket(plain, server_hostname=self._host)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise _untrusted(
                f"the certificate of {self._host}:{self._port} is not trusted: {error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            plain.close()
            what = f"{self._host}:{self._port} does not speak TLS as an agent does: {error.reason or error}"
            raise NoAgentError(what, "is it the agent's https port (ports.api), and api.listen on?") from None
        except BaseException:
            plain.close()
            raise
        shown = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").digest()
        if self._digests and not any(hmac.compare_digest(shown, digest) for digest in self._digests):
            secure.close()
            raise _untrusted(f"the certificate of {self._host}:{self._port} has another fingerprint: {shown.hex()}")
        secure.settimeout(self.timeout)
        self.sock = secure


def _untrusted(what: str) -> NoAgentError:
    return NoAgentError(
        f"{what}; nothing was sent",
        "give the CA that signed it (--cacert FILE), or the fingerprint that `nodeagentctl describe node/NAME` shows "
        f"where the agent is known (--fingerprint HEX); or {ENV_CACERT}, {ENV_FINGERPRINT}",
    )


def _context(where: Where) -> ssl.SSLContext:
    if where.fingerprint is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is the stronger check
        return context
    try:
        return ssl.create_default_context(cafile=where.cacert)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CtlError(f"cannot use the CA {where.cacert}: {why}", Exit.USAGE, "give a PEM file") from None
