"""What the lease process makes of a server's bytes, good and bad."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nodeagent.lease import resp
from nodeagent.lease.order import Server, StoreScript
from nodeagent.lease.resp import Reply, Talk, TalkError
from nodeagent.osutil.linux import boottime
from tests.unit.lease.build import done

INFO = b"role:master\r\nrun_id:r1\r\nmaster_replid:h1\r\n"
STEP = StoreScript("a" * 40, Path("nowhere"))
BOUND = 30.0
"""Seconds for a server that answers: a busy machine may take some."""
PATIENCE = 0.3
"""Seconds that are waited for one that says nothing more."""


def opened(talk: Talk, bound: float = BOUND) -> None:
    done(talk.greet(boottime() + bound))


def asked(talk: Talk, *words: str, bound: float = BOUND, step: StoreScript = STEP) -> Reply:
    return done(talk.evaluate(boottime() + bound, step, *words))


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


class Liar:
    """Listens on a unix socket and answers whatever arrives with the next of ``answers``; after the last it closes, or
    says nothing more (``silent``)."""

    def __init__(self, path: Path, answers: list[bytes], *, silent: bool = False) -> None:
        self.received: list[bytes] = []
        self._answers, self._silent = answers, silent
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        link, _ = self._listener.accept()
        with link, suppress(OSError):  # it hangs up on a liar
            for answer in self._answers:
                if not (data := link.recv(1 << 16)):
                    return
                self.received.append(data)
                link.sendall(answer)
            if self._silent:
                self._end.wait()

    def close(self) -> None:
        self._end.set()
        self._listener.close()
        self._thread.join()


Lie = Callable[..., tuple[Talk, Liar]]


@pytest.fixture
def lie(tmp_path: Path) -> Iterator[Lie]:
    made: list[Liar] = []
    talks: list[Talk] = []

    def make(*answers: bytes, greeting: tuple[tuple[str, ...], ...] = (), silent: bool = False) -> tuple[Talk, Liar]:
        path = tmp_path / f"s{len(made)}"
        made.append(Liar(path, list(answers), silent=silent))
        talks.append(Talk(Server(str(path), "", 0, greeting, None)))
        return talks[-1], made[-1]

    yield make
    for talk in talks:
        talk.close()
    for liar in made:
        liar.close()


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (b":7\r\n", 7),
        (b":-7\r\n", -7),
        (b"+OK\r\n", "OK"),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", ""),
        (b"$4\r\n\r\n\r\n\r\n", "\r\n\r\n"),
        (b"$700000\r\n" + b"x" * 700_000 + b"\r\n", "x" * 700_000),
        (b"$1\r\n\xff\r\n", "\\xff"),
        (b"*0\r\n", []),
        (b"*3\r\n:1\r\n:12345\r\n$5\r\njob a\r\n", [1, 12345, "job a"]),
        (b"*2\r\n*1\r\n:1\r\n$-1\r\n", [[1], None]),
    ],
)
def test_replies(lie: Lie, sent: bytes, reply: resp.Reply) -> None:
    talk, liar = lie(bulk(INFO), sent)
    opened(talk)
    assert asked(talk, "na:{c}:", "6", "{}") == reply
    talk.close()
    words = (b"EVALSHA", STEP.sha.encode(), b"1", b"na:{c}:", b"r1-h1", b"6", b"{}")
    assert liar.received == [b"*1\r\n" + bulk(b"INFO"), b"*7\r\n" + b"".join(map(bulk, words))]


def test_the_source_is_read_and_sent_only_where_it_is_not_known(lie: Lie, tmp_path: Path) -> None:
    talk, liar = lie(bulk(INFO), b"-NOSCRIPT No matching script.\r\n", b":1\r\n", b":2\r\n")
    step = STEP._replace(file=tmp_path / "script")
    step.file.write_text("return 1")
    opened(talk)
    assert asked(talk, "p", "é", step=step) == 1
    step.file.unlink()
    assert asked(talk, "p", step=step) == 2
    words = (b"EVAL", b"return 1", b"1", b"p", b"r1-h1", "é".encode())
    assert liar.received[2] == b"*6\r\n" + b"".join(map(bulk, words))
    assert liar.received[3].startswith(b"*5\r\n$7\r\nEVALSHA")


def test_a_source_that_cannot_be_read_is_a_trouble_as_another(lie: Lie) -> None:
    talk, _ = lie(bulk(INFO), b"-NOSCRIPT No matching script.\r\n", silent=True)
    opened(talk)
    with pytest.raises(TalkError, match=r"lacks a script that cannot be read from nowhere either \(No such file"):
        asked(talk, "p")
    with pytest.raises(TalkError, match="there is no connection"):
        asked(talk, "p")


def test_the_greeting_and_the_question_who_it_is_take_one_round_trip(lie: Lie) -> None:
    talk, liar = lie(b"+OK\r\n+OK\r\n" + bulk(INFO), greeting=(("AUTH", "pw"), ("SELECT", "3")), silent=True)
    opened(talk)
    assert len(liar.received) == 1
    assert liar.received[0].startswith(b"*2\r\n$4\r\nAUTH\r\n$2\r\npw\r\n*2\r\n$6\r\nSELECT")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "closed the connection"),
        (b":1", "closed the connection"),
        (b"$5\r\nab", "closed the connection"),
        (b"-ERR it broke\r\n", "ERR it broke"),
        (b"*2\r\n:1\r\n-ERR in it\r\n", "ERR in it"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no reply of Redis: b'HTTP/1.1"),
        (b"\r\n", "no reply of Redis"),
        (b":\r\n", "no reply of Redis"),
        (b":1_0\r\n", "no reply of Redis"),
        (b": 1\r\n", "no reply of Redis"),
        (b":" + b"1" * 40 + b"\r\n", "no reply of Redis"),
        (b"$-2\r\n", "no reply of Redis"),
        (b"$3\r\nabcde\r\n", "no reply of Redis"),
        (b"$99999999999999999999\r\n", "more than 1048576 bytes"),
        (b"$1048577\r\n" + b"x" * 100, "more than 1048576 bytes"),
        (b"+" + b"x" * (1 << 21), "more than 1048576 bytes"),
        (b"*99999999999999999999\r\n" + b":1\r\n" * 300_000, "more than 1048576 bytes"),
        (b"*1\r\n" * 100, "no reply of Redis"),
        (b"%1\r\n+a\r\n:1\r\n", "no reply of Redis"),
    ],
)
def test_hostile_replies(lie: Lie, sent: bytes, message: str) -> None:
    talk, _ = lie(bulk(INFO), sent)
    opened(talk)
    with pytest.raises(TalkError, match=f"^the store at .*/s0 cannot be used: .*{message}"):
        asked(talk, "p")
    with pytest.raises(TalkError, match="there is no connection"):
        asked(talk, "p")


def test_who_says_more_than_was_asked_is_not_asked_again(lie: Lie) -> None:
    talk, liar = lie(bulk(INFO), b":1\r\n:2\r\n", silent=True)
    opened(talk)
    assert asked(talk, "p") == 1
    with pytest.raises(TalkError, match="says more than it was asked"):
        asked(talk, "p")
    assert len(liar.received) == 2


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (bulk(INFO.replace(b"master\r", b"slave\r") + b"master_host:h\r\nmaster_port:1\r\n"), "is a replica of h:1"),
        (bulk(b"role:master\r\n"), "does not say which process it is"),
        (bulk(b""), "is a replica of"),
        (b"$-1\r\n", "its INFO is no text"),
        (b"-NOAUTH Authentication required.\r\n", "NOAUTH"),
    ],
)
def test_who_is_not_talked_to(lie: Lie, info: bytes, message: str) -> None:
    talk, _ = lie(info)
    with pytest.raises(TalkError, match=message):
        opened(talk)
    with pytest.raises(TalkError, match="there is no connection"):
        asked(talk, "p")


@pytest.mark.parametrize("sent", [b"", b":1", b"$10\r\nabc", b"*2\r\n:1\r\n"])
def test_silence_is_bounded(lie: Lie, sent: bytes) -> None:
    talk, _ = lie(bulk(INFO), sent, silent=True)
    opened(talk)
    with pytest.raises(TalkError, match="did not answer in time"):
        asked(talk, "p", bound=PATIENCE)
    talk, _ = lie(sent, silent=True)
    with pytest.raises(TalkError, match="did not answer in time"):
        opened(talk, PATIENCE)


@pytest.mark.parametrize("host", ["localhost", "", "no such place"])
def test_a_name_is_never_looked_up(host: str) -> None:
    with pytest.raises(TalkError, match="cannot be used"):
        opened(Talk(Server("", host or "localhost.", 6379, (), None)))


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(TalkError, match="absent cannot be used: No such file"):
        opened(Talk(Server(str(tmp_path / "absent"), "", 0, (), None)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(TalkError, match=r"127\.0\.0\.1:\d+ cannot be used: Connection refused"):
            opened(Talk(Server("", "127.0.0.1", taken.getsockname()[1], (), None)))
    with pytest.raises(TalkError, match=r"255\.255\.255\.255:6379 cannot be used: (Network is unreachable|Permission)"):
        opened(Talk(Server("", "255.255.255.255", 6379, (), None)))
