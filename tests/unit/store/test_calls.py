"""What a step makes of a reply that no script of ours gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store.base import StepFailedError, StoreRefusedError, StoreUnavailableError
from nodeagent.store.calls import Calls
from nodeagent.store.client import RedisStore
from nodeagent.store.errors import explain
from nodeagent.store.scripts import Script, always
from nodeagent.store.wire import Reached, ReplyError


class Answering:
    """Links, and the one link of them, to what answers each script with ``reply``; WAIT finds ``replicas``."""

    address, run_id = "127.0.0.1:1", "run1"
    reached: Reached | None = None

    def __init__(self, reply: object, replicas: object = 1) -> None:
        self._reply, self._replicas = reply, replicas
        self.forgotten, self.evaluated = False, 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        yield self

    async def evaluate(self, _script: Script, *_arguments: str) -> Any:
        self.evaluated += 1
        if isinstance(self._reply, ReplyError) and self.evaluated == 1:
            raise self._reply
        return self._reply

    async def ask(self, *_command: str | int) -> Any:
        return self._replicas

    async def forget(self) -> None:
        self.forgotten = True

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(
    "reply",
    [
        None, 7, "OK", [], ["1", "x"], [2, "x"], [-1], [None], [[1]],
        [0], [0, "stale"], [0, "stale", "read it again", "x"], [0, 1, "x"], [0, "x", None],
    ],
)  # fmt: skip
async def test_a_reply_that_no_step_gives_is_a_store_that_cannot_be_used(reply: object) -> None:
    links = Answering(reply)
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1.*is no reply of a step") as caught:
        await Calls(links, links, "p:", 1.0).step("read", {"uid": "u"})
    assert repr(reply)[:20] in str(caught.value)
    assert links.forgotten


async def test_what_is_reported_of_a_reply_is_short() -> None:
    links = Answering("x" * 1_000_000)
    with pytest.raises(StoreUnavailableError) as caught:
        await Calls(links, links, "p:", 1.0).step("read", {"uid": "u"})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("replicas", [None, "many", []])
async def test_replicas_are_counted_in_numbers(replicas: object) -> None:
    links = Answering([1, "x"], replicas)
    with pytest.raises(StoreUnavailableError, match="no reply of a step"):
        await Calls(links, links, "p:", 1.0, replicas=1).step("read", {"uid": "u"}, always)


async def test_what_a_step_says() -> None:
    done, refused = Answering([1, "a", ["b"]]), Answering([0, "stale", "read it again"])
    assert await Calls(done, done, "p:", 1.0).step("read", {"uid": "u"}) == ["a", ["b"]]
    with pytest.raises(StoreRefusedError, match="read it again") as caught:
        await Calls(refused, refused, "p:", 1.0).step("read", {"uid": "u"})
    assert caught.value.code == "stale"


IN_SCRIPT = "script: 0a1b, on @user_script:12."
IN_6_2 = "ERR Error running script (call to f_0a1b): @user_script:12: @user_script: 12:"


@pytest.mark.parametrize(
    ("text", "of_the_step", "looks"),
    [
        (f"ERR user_script:12: attempt to index a nil value {IN_SCRIPT}", True, 1),
        (f"WRONGTYPE Operation against a key holding the wrong kind of value {IN_SCRIPT}", True, 1),
        (f"OOM command not allowed when used memory > 'maxmemory'. {IN_SCRIPT}", False, 0),
        (f"READONLY You can't write against a read only replica. {IN_SCRIPT}", False, 0),
        (f"ERR user_script:9: OOM command not allowed when used memory > 'maxmemory'. {IN_SCRIPT}", False, 0),
        (f"ERR user_script:9: MISCONF Errors writing to the AOF file: No space left on device {IN_SCRIPT}", False, 0),
        (f"ERR user_script:9: ERR Unknown Redis command called from script {IN_SCRIPT}", True, 1),
        ("LOADING Redis is loading the dataset in memory", False, 0),
        (f"{IN_6_2} WRONGTYPE Operation against a key holding the wrong kind of value", True, 1),
        (f"{IN_6_2} -OOM command not allowed when used memory > 'maxmemory'.", False, 0),
        (f"{IN_6_2} -READONLY You can't write against a read only replica.", False, 0),
        (f"ERR ACL failure in script: User ann has no permissions to run the 'xadd' command {IN_SCRIPT}", False, 0),
        (f"ERR The user executing the script can't run this command or subcommand {IN_SCRIPT}", False, 0),
        (f"{IN_6_2} The user executing the script can't run this command or subcommand", False, 0),
    ],
)
async def test_a_script_that_fails_is_no_store_that_cannot_serve(text: str, of_the_step: bool, looks: int) -> None:
    links = Answering(ReplyError(text))
    with pytest.raises(StoreUnavailableError, match=r"the store at 127\.0\.0\.1:1 ") as caught:
        await Calls(links, links, "p:", 1.0).step("read", {"uid": "u"})
    assert (isinstance(caught.value, StepFailedError), links.forgotten) == (of_the_step, not of_the_step)
    assert links.evaluated == 1 + looks, "what is damaged is looked for"


@pytest.mark.parametrize(
    "error",
    [
        f"OOM command not allowed when used memory > 'maxmemory'. {IN_SCRIPT}",
        f"{IN_6_2} -OOM command not allowed when used memory > 'maxmemory'.",
        "OOM command not allowed when used memory > 'maxmemory'.",
    ],
)
def test_what_to_do_about_a_server_that_is_full(error: str) -> None:
    text = explain("10.0.0.1:6379", 1.0, ReplyError(error))
    assert f"cannot serve now ({error}): its memory is full; set a larger maxmemory" in text


NETWORK = "check that Redis runs there and is not overloaded, "


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("unix:///run/redis.sock", "check that Redis runs there and is not overloaded"),
        ("redis://10.0.0.1:6379/0", f"{NETWORK}and the network between"),
        ("redis://[fd00::1]:6379/0", f"{NETWORK}and the network between"),
        ("redis+sentinel://10.0.0.1:26379,[fd00::1]:26379/gpus", f"{NETWORK}and the network between"),
        (
            "redis://redis.test:6379/0",
            f"{NETWORK}the network between, and that a name in redis.url is resolved at once",
        ),
        (
            "redis+sentinel://10.0.0.1:26379,redis.test:26379/gpus",
            f"{NETWORK}the network between, and that a name in redis.url is resolved at once",
        ),
    ],
)
def test_only_an_address_with_a_name_is_late_for_want_of_it(url: str, advice: str) -> None:
    address = str(RedisConfig(url=url).place)
    text = explain(address, 0.5, TimeoutError())
    assert text == f"the store at {address} did not answer within 0.5 s: {advice}"


class Past:
    """The record of a job of the history, which notes in how many threads such are looked at."""

    at_once, most = 0, 0

    def __getitem__(self, _part: int) -> str:
        Past.at_once += 1
        Past.most = max(Past.most, Past.at_once)
        time.sleep(0.005)
        Past.at_once -= 1
        raise ValueError("that is enough")


async def test_what_callers_read_is_decoded_in_one_thread_at_a_time() -> None:
    """The agent's loop has its turn among as many as run: of eight threads it had a ninth."""
    links = Answering([["1 u1", "u1", Past()], ["1 u2", "u2", Past()]])
    store = RedisStore(Calls(links, links, "p:", 5.0))
    pages = await asyncio.gather(*(store.history("", 100) for _ in range(6)))
    assert [(page.jobs, len(page.unread), page.place) for page in pages] == [((), 2, "1 u2")] * 6
    assert Past.most == 1
