"""The destination of workers' output, by torchrun's options: the console or not, and which file.

Owns the values of ``--redirects`` and ``--tee`` and the folders below ``--log-dir``. The command that follows the job
writes the files, so they are on the machine where the command was given.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from nodeagent.ctl.client import Client, job_path
from nodeagent.ctl.terminal import CtlError, echo

Json = dict[str, Any]

BITS = {"stdout": 1, "stderr": 2}
"""Each stream's part of the values of ``--redirects`` and ``--tee``."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Some streams of some workers."""

    bits: int = 0
    """For each local rank."""
    by_rank: Mapping[int, int] | None = None
    """For these local ranks only; the other ranks have none."""

    @classmethod
    def read(cls, text: str) -> Streams:
        """``0`` none, ``1`` stdout, ``2`` stderr, ``3`` both; ``0:1,1:2`` by local rank. Raises ValueError."""
        if re.fullmatch(r"[0-3]", text):
            return cls(int(text))
        if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            raise ValueError(f"{text!r} is neither 0, 1, 2 or 3 nor local ranks with these, such as 0:1,1:2")
        pairs = (pair.split(":") for pair in text.split(","))
        return cls(by_rank={int(rank): int(bits) for rank, bits in pairs})

    @property
    def any(self) -> bool:
        """Returns whether it names any stream at all."""
        return bool(self.bits or any((self.by_rank or {}).values()))

    def has(self, local: int, stream: str) -> bool:
        """Returns whether this stream of this local rank is one of them."""
        bits = self.bits if self.by_rank is None else self.by_rank.get(local, 0)
        return bool(bits & BITS[stream])


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the command line."""

    redirects: Streams = Streams()
    """Streams that go to files only."""
    tee: Streams = Streams()
    """Streams that go to files and to the console."""
    local_ranks: frozenset[int] | None = None
    """Local ranks that the console shows; None: all."""
    duplicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stream to words: a teed line with one of these words also goes to another file."""

    @property
    def any(self) -> bool:
        """Returns whether anything differs from a console that shows everything."""
        return self.files or self.local_ranks is not None

    @property
    def files(self) -> bool:
        """Returns whether files are written."""
        return self.redirects.any or self.tee.any

    def shows(self, local: int, stream: str) -> bool:
        """Returns whether the console shows this stream. A stream that is both redirected and teed is shown."""
        if self.local_ranks is not None and local not in self.local_ranks:
            return False
        return self.tee.has(local, stream) or not self.redirects.has(local, stream)

    def keeps(self, local: int, stream: str) -> bool:
        """Returns whether a file has this stream."""
        return self.redirects.has(local, stream) or self.tee.has(local, stream)


def words_of(text: str) -> tuple[str, ...]:
    """Words between commas; a comma inside a word is written twice."""
    return tuple(word.replace("\0", ",") for word in text.replace(",,", "\0").split(",") if word)


def local_ranks(text: str) -> frozenset[int]:
    """``0,2``: local ranks. Raises ValueError."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise ValueError(f"{text!r} is not a list of local ranks, such as 0,2")
    return frozenset(map(int, text.split(",")))


class LogFiles:
    """The files of one job: ``JOB_NODE_*/attempt_N/LOCAL_RANK/stdout.log``, with N one less than the generation."""

    def __init__(self, base: Path, job: str) -> None:
        self._base, self._job = base, job
        self._stack = ExitStack()
        self._folders: dict[str, Path] = {}
        self._open: dict[Path, TextIO] = {}

    def __enter__(self) -> LogFiles:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def attempt(self, node: str, generation: int) -> Path:
        """The folder of one generation on one node; created if it is missing. Raises OSError."""
        if node not in self._folders:
            self._base.mkdir(parents=True, exist_ok=True)
            self._folders[node] = Path(tempfile.mkdtemp(prefix=f"{self._job}_{node}_", dir=self._base))
        return self._folders[node] / f"attempt_{generation - 1}"

    def write(self, path: Path, text: str) -> None:
        """Append the text, so that readers see it at once. Raises OSError."""
        file = self._open.get(path)
        if file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open[path] = self._stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
        file.write(text)
        file.flush()


@dataclass(frozen=True, slots=True)
class Regular:
    """Local ranks in a job with the same number of workers on each node."""

    each: int

    def local(self, line: Json) -> int:
        """The local rank of a line's worker."""
        rank: int = line["rank"]
        return rank % self.each


class Places:
    """Local ranks in a job with as many workers as a node has GPUs; reads them from the agent for each new
    generation."""

    def __init__(self, client: Client, uid: str) -> None:
        self._client, self._uid = client, uid
        self._first: dict[tuple[str, int], int] = {}

    def local(self, line: Json) -> int:
        """The local rank of a line's worker; until the agent answers, counted from the least rank seen there."""
        key, rank = (line["node"], line["generation"]), line["rank"]
        if key not in self._first:
            with suppress(CtlError):
                for pod in self._client.get(job_path(self._uid))["pods"]:
                    if pod["workers"]:
                        first = min(worker["rank"] for worker in pod["workers"])
                        self._first[pod["node"], pod["generation"]] = first
        self._first[key] = min(rank, self._first.get(key, rank))
        local: int = rank - self._first[key]
        return local


class Outputs:
    """Sends each line to the destination that the rules give."""

    def __init__(self, rules: Rules, local_of: Callable[[Json], int], files: LogFiles | None = None) -> None:
        self.rules = rules
        self.local_of = local_of
        """Maps a line to its worker's local rank."""
        self._files = files

    def take(self, line: Json, local: int, header: str) -> tuple[bool, bool]:
        """Write a line to its files; (whether the console shows it, whether it is teed). ``header`` begins a line of a
        duplicate. A failing disk is reported once; after that the output is only in the job's logs."""
        stream = line["stream"]
        shown, teed = self.rules.shows(local, stream), self.rules.tee.has(local, stream)
        if self._files is not None and self.rules.keeps(local, stream):
            try:
                self._write(self._files, line, local, header if shown and teed else None)
            except OSError as error:
                self._files = None
                echo(f"nodeagentctl: the log files are not written any more: {error}", err=True)
        return shown, teed

    def _write(self, files: LogFiles, line: Json, local: int, header: str | None) -> None:
        folder, text, stream = files.attempt(line["node"], line["generation"]), ended(line), line["stream"]
        files.write(folder / str(local) / f"{stream}.log", text)
        if header is not None and any(word in text for word in self.rules.duplicates.get(stream, ())):
            files.write(folder / f"filtered_{stream}.log", header + text)


def ended(line: Json) -> str:
    """A line's text, with its line end if there was one."""
    text: str = line["text"]
    return text if line["partial"] else text + "\n"


def log_base(log_dir: str | None) -> Path | None:
    """The folder for ``--log-dir``: a new one without the option, None for /dev/null. Raises NotADirectoryError."""
    if log_dir == os.devnull:
        return None
    if not log_dir:
        return Path(tempfile.mkdtemp(prefix="nodeagent_"))
    base = Path(log_dir)
    if base.exists() and not base.is_dir():
        raise NotADirectoryError(f"--log-dir {log_dir} is not a folder")
    return base
