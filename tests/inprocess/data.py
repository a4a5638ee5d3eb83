"""The values of a server, and the commands on them that our scripts and client use.

Each command is a method of its name; it takes texts and numbers and returns what Redis would: text, int, a list, None
for nil, ``Status`` for a status. Must never look at a clock of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

Word = str | int | float
Hash = dict[str, str]


class Status(str):
    """A reply like ``+OK``."""

    __slots__ = ()


class CommandError(Exception):
    """The server's answer is an error; ``str()`` is what it says."""


WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class SortedSet:
    """Members in the order of their scores; equal scores by name."""

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.order: list[tuple[float, str]] = []

    def add(self, member: str, score: float) -> bool:
        """Whether it is new."""
        old = self.scores.get(member)
        if old == score:
            return False
        if old is not None:
            del self.order[bisect_left(self.order, (old, member))]
        self.scores[member] = score
        insort(self.order, (score, member))
        return old is None

    def remove(self, member: str) -> bool:
        score = self.scores.pop(member, None)
        if score is None:
            return False
        del self.order[bisect_left(self.order, (score, member))]
        return True

    def between(self, low: Word, high: Word) -> list[tuple[float, str]]:
        """Bounds as Redis takes them: ``-inf``, ``(5`` (without it), ``5``."""
        first = self._place(low, before=True)
        return self.order[first : self._place(high, before=False)]

    def _place(self, bound: Word, *, before: bool) -> int:
        text = text_of(bound)
        exclusive = text.startswith("(")
        score = float(text[1:] if exclusive else text)
        at_start = before != exclusive
        return bisect_left(self.order, (score, "")) if at_start else bisect_right(self.order, (score, "\U0010ffff"))


MOST = 2**64 - 1
"""The largest half of an entry's id."""


class Stream:
    """Entries, oldest first."""

    def __init__(self) -> None:
        self.last = (0, 0)
        self.until: int | None = None
        """When it goes (the server's clock, ms); None: it stays."""
        self.entries: list[tuple[str, list[str]]] = []
        self.ids: list[tuple[int, int]] = []

    def add(self, at: int | tuple[int, int], fields: list[str], most: int) -> str:
        """``at``: the clock in ms, or the id that it is to have. Raises CommandError for one that is not the newest."""
        if self.last == (MOST, MOST):
            raise CommandError("ERR The stream has exhausted the last possible ID, unable to add more items")
        if isinstance(at, int):
            at = (at, 0) if at > self.last[0] else (self.last[0], self.last[1] + 1)
        if at <= self.last:
            raise CommandError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        self.last = at
        entry = f"{self.last[0]}-{self.last[1]}"
        self.ids.append(self.last)
        self.entries.append((entry, fields))
        if len(self.ids) > most:
            del self.ids[: len(self.ids) - most], self.entries[: len(self.entries) - most]
        return entry

    def drop(self, entry: str) -> bool:
        """Whether it was there."""
        first, last = self._place(entry, before=True), self._place(entry, before=False)
        del self.ids[first:last], self.entries[first:last]
        return last > first

    def between(self, low: str, high: str) -> list[tuple[str, list[str]]]:
        first = 0 if low == "-" else self._place(low, before=True)
        last = len(self.ids) if high == "+" else self._place(high, before=False)
        return self.entries[first:last]

    def _place(self, bound: str, *, before: bool) -> int:
        exclusive = bound.startswith("(")
        ms, _, seq = bound.lstrip("(").partition("-")
        entry = (int(ms), int(seq or 0))
        return bisect_left(self.ids, entry) if before != exclusive else bisect_right(self.ids, entry)


class Expiring:
    """A text that goes at a time of the server's clock (ms)."""

    __slots__ = ("text", "until")

    def __init__(self, text: str, until: int | None) -> None:
        self.text, self.until = text, until


Value = Hash | SortedSet | Stream | Expiring
TYPES: dict[type, str] = {dict: "hash", SortedSet: "zset", Stream: "stream", Expiring: "string"}


def text_of(word: Word) -> str:
    """A number as Redis writes the ones that it gets from Lua."""
    if isinstance(word, str):
        return word
    return str(int(word)) if word == int(word) and abs(word) < 1e17 else f"{word:.17g}"


def _number(score: float) -> str:
    return text_of(score)


class Data:
    """All keys of one server. ``now``: its clock, in ms."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.keys: dict[str, Value] = {}
        self.names = 0
        """Goes up whenever a key comes or goes."""
        self.now = now
        self.calls = 0
        """Commands so far."""
        self.wrote: Callable[[], None] = lambda: None
        """Called when an entry was added to a stream."""
        self._commands: dict[str, Callable[..., Any]] = {}
        """By the names that they were called by so far."""

    def call(self, name: str, *words: Word) -> Any:
        """Any command. Raises CommandError."""
        command = self._commands.get(name) or self._command(name)
        self.calls += 1
        return command(*words)

    def watch(self, name: str, command: Callable[..., Any]) -> None:
        """From now on this is done for the command of that name."""
        self._commands[name] = command

    def _command(self, name: str) -> Callable[..., Any]:
        command: Callable[..., Any] | None = getattr(self, "del_" if name == "DEL" else name.lower(), None)
        if command is None:
            raise CommandError(f"ERR unknown command '{name}'")
        self._commands[name] = command
        return command

    # --- keys

    def _get(self, key: Word, kind: type) -> Any:
        value = self.keys.get(key)  # type: ignore[arg-type]
        if value is not None and type(value) is not kind:
            raise CommandError(WRONG_TYPE)
        return value

    def _made(self, key: Word, kind: Callable[[], Any]) -> Any:
        value = self._get(key, kind)  # type: ignore[arg-type]
        if value is None:
            value = self.keys[str(key)] = kind()
            self.names += 1
        return value

    def _alive(self, key: Word) -> bool:
        value = self.keys.get(str(key))
        if isinstance(value, (Expiring, Stream)) and value.until is not None and value.until <= self.now():
            del self.keys[str(key)]
            self.names += 1
            return False
        return value is not None

    def _empty(self, key: Word, value: Hash | SortedSet) -> None:
        if not (value if isinstance(value, dict) else value.scores):
            del self.keys[str(key)]
            self.names += 1

    def del_(self, *keys: Word) -> int:
        gone = sum(self.keys.pop(str(key), None) is not None for key in keys)
        self.names += gone
        return gone

    def exists(self, key: Word) -> int:
        return int(self._alive(key))

    def type(self, key: Word) -> Status:
        return Status(TYPES[type(self.keys[str(key)])] if self._alive(key) else "none")

    def get(self, key: Word) -> str | None:
        found = self._get(key, Expiring) if self._alive(key) else None
        return found.text if found is not None else None

    def mget(self, *keys: Word) -> list[str | None]:
        return [self.get(key) for key in keys]

    def set(self, key: Word, text: Word, *more: Word) -> Status:
        until = self.now() + int(more[1]) if more else None
        self.names += key not in self.keys
        self.keys[str(key)] = Expiring(text_of(text), until)
        return Status("OK")

    def pttl(self, key: Word) -> int:
        if not self._alive(key):
            return -2
        value = self.keys[str(key)]
        until = value.until if isinstance(value, (Expiring, Stream)) else None
        return -1 if until is None else until - self.now()

    def pexpire(self, key: Word, ms: Word) -> int:
        """Of streams only: the scripts give no other key a time to live after it was written."""
        found = self._get(key, Stream) if self._alive(key) else None
        if found is not None:
            found.until = self.now() + int(ms)
        return int(found is not None)

    # --- hashes

    def hget(self, key: Word, field: Word) -> str | None:
        found = self._get(key, dict)
        return None if found is None else found.get(field)

    def hmget(self, key: Word, *fields: Word) -> list[str | None]:
        found = self._get(key, dict) or {}
        return [*map(found.get, fields)]

    def hgetall(self, key: Word) -> list[str]:
        found = self._get(key, dict) or {}
        return [*chain.from_iterable(found.items())]

    def hkeys(self, key: Word) -> list[str]:
        return list(self._get(key, dict) or {})

    def hvals(self, key: Word) -> list[str]:
        return list((self._get(key, dict) or {}).values())

    def hstrlen(self, key: Word, field: Word) -> int:
        return len((self.hget(key, field) or "").encode())

    def hlen(self, key: Word) -> int:
        return len(self._get(key, dict) or {})

    def hset(self, key: Word, *words: Word) -> int:
        found, new = self._made(key, dict), 0
        for field, text in zip(words[::2], words[1::2], strict=True):
            name = text_of(field)
            new += name not in found
            found[name] = text_of(text)
        return new

    def hdel(self, key: Word, *fields: Word) -> int:
        found = self._get(key, dict)
        if found is None:
            return 0
        gone = sum(found.pop(text_of(field), None) is not None for field in fields)
        self._empty(key, found)
        return gone

    def hincrby(self, key: Word, field: Word, by: Word) -> int:
        found = self._made(key, dict)
        try:
            value = int(found.get(str(field), "0")) + int(by)
        except ValueError:
            raise CommandError("ERR hash value is not an integer") from None
        found[str(field)] = str(value)
        return value

    # --- sorted sets

    def zadd(self, key: Word, *words: Word) -> int:
        """With ``NX``: only members that are new."""
        found: SortedSet = self._made(key, SortedSet)
        only_new = words[0] == "NX"
        words, new = words[only_new:], 0
        for score, member in zip(words[::2], words[1::2], strict=True):
            if not only_new or text_of(member) not in found.scores:
                new += found.add(text_of(member), float(score))
        return new

    def zrem(self, key: Word, *members: Word) -> int:
        found = self._get(key, SortedSet)
        if found is None:
            return 0
        gone = [found.remove(text_of(member)) for member in members].count(True)
        self._empty(key, found)
        return gone

    def zscore(self, key: Word, member: Word) -> str | None:
        found = self._get(key, SortedSet)
        score = None if found is None else found.scores.get(text_of(member))
        return None if score is None else _number(score)

    def zcard(self, key: Word) -> int:
        found = self._get(key, SortedSet)
        return 0 if found is None else len(found.order)

    def zcount(self, key: Word, low: Word, high: Word) -> int:
        found = self._get(key, SortedSet)
        return 0 if found is None else len(found.between(low, high))

    def zrange(self, key: Word, first: Word, last: Word, *how: Word) -> list[str]:
        found = self._get(key, SortedSet)
        order = [] if found is None else found.order
        begin, end = int(first), int(last)
        begin = max(0, begin + len(order)) if begin < 0 else begin
        end = end + len(order) if end < 0 else end
        return _flat(order[begin : end + 1], "WITHSCORES" in how)

    def zrangebyscore(self, key: Word, low: Word, high: Word, *how: Word) -> list[str]:
        found = self._get(key, SortedSet)
        return _limited([] if found is None else found.between(low, high), how)

    def zrevrangebyscore(self, key: Word, high: Word, low: Word, *how: Word) -> list[str]:
        found = self._get(key, SortedSet)
        return _limited([] if found is None else found.between(low, high)[::-1], how)

    def zrangebylex(self, key: Word, low: Word, high: Word, *how: Word) -> list[str]:
        """Of members with one score: bounds ``[text`` and ``(text`` (without it)."""
        return _limited(self._by_name(key, low, high), how)

    def zrevrangebylex(self, key: Word, high: Word, low: Word, *how: Word) -> list[str]:
        return _limited(self._by_name(key, low, high)[::-1], how)

    def _by_name(self, key: Word, low: Word, high: Word) -> list[tuple[float, str]]:
        found = self._get(key, SortedSet)
        order: list[tuple[float, str]] = [] if found is None else found.order
        names = [member for _, member in order]
        low, high = text_of(low), text_of(high)
        first = (bisect_right if low[0] == "(" else bisect_left)(names, low[1:])
        return order[first : (bisect_left if high[0] == "(" else bisect_right)(names, high[1:])]

    def zunionstore(self, into: Word, _count: Word, *keys: Word) -> int:
        union = SortedSet()
        for key in keys:
            for member, score in (self._get(key, SortedSet) or SortedSet()).scores.items():
                union.add(member, score + union.scores.get(member, 0.0))
        self.del_(into)
        if union.order:
            self.keys[str(into)] = union
            self.names += 1
        return len(union.order)

    # --- streams

    def xadd(self, key: Word, *words: Word) -> str:
        """``XADD key MAXLEN [~] n ID field text ...``; exact, so that it is bounded."""
        self._alive(key)
        most, at, *fields = words[2:] if words[1] == "~" else words[1:]
        ms, _, seq = str(at).partition("-")
        when = self.now() if at == "*" else (int(ms), int(seq))
        entry: str = self._made(key, Stream).add(when, [text_of(word) for word in fields], int(most))
        self.wrote()
        return entry

    def xlen(self, key: Word) -> int:
        found = self._get(key, Stream) if self._alive(key) else None
        return 0 if found is None else len(found.ids)

    def xdel(self, key: Word, *entries: Word) -> int:
        found = self._get(key, Stream) if self._alive(key) else None
        return 0 if found is None else sum(found.drop(str(entry)) for entry in entries)

    def xrange(self, key: Word, low: Word, high: Word, *how: Word) -> list[Any]:
        found = self._get(key, Stream) if self._alive(key) else None
        entries = [] if found is None else found.between(str(low), str(high))
        return [[entry, fields] for entry, fields in entries[: int(how[1]) if how else None]]

    def xrevrange(self, key: Word, high: Word, low: Word, *how: Word) -> list[Any]:
        found = self._get(key, Stream)
        entries = [] if found is None else found.between(str(low), str(high))[::-1]
        return [[entry, fields] for entry, fields in entries[: int(how[1]) if how else None]]

    # --- the server

    def time(self) -> list[str]:
        now = self.now()
        return [str(now // 1000), str(now % 1000 * 1000)]


def _flat(entries: Iterable[tuple[float, str]], scores: bool) -> list[str]:
    return [word for score, member in entries for word in ((member, _number(score)) if scores else (member,))]


def _limited(entries: list[tuple[float, str]], how: tuple[Word, ...]) -> list[str]:
    if "LIMIT" in how:
        at = how.index("LIMIT")
        offset, count = int(how[at + 1]), int(how[at + 2])
        entries = entries[offset : offset + count]
    return _flat(entries, "WITHSCORES" in how)
