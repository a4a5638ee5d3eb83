"""``logs``: the output of a job's workers, from any node, as it comes. Survives the loss of the agent that is asked."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from string import Template
from typing import Any, TextIO

import click

from nodeagent.api.logcursor import LogCursor, Source, source_of
from nodeagent.ctl.arrays import members
from nodeagent.ctl.client import Client, job_path
from nodeagent.ctl.options import agent_option, connect, job_argument, which_job
from nodeagent.ctl.outputs import Outputs, ended
from nodeagent.ctl.terminal import BrokeOffError, CtlError, Exit, echo, worker_text, write
from nodeagent.ctl.waiting import AGENT_AWAY_LIMIT, POLL

Json = dict[str, Any]

PREFIX = "[${role_name}${rank}]:"
"""torchrun's prefix, but with the rank in place of the local rank, since one console shows all nodes."""
TERMINAL = "terminal"
LONG = 4000
"""Characters from which a piece without a line end was cut because of its length: its rest follows at once, so long
pieces are joined. A shorter piece is shown early because its line end did not come."""
MOST_HELD = 1 << 20
"""Characters of a line that are joined: of a longer one each piece is written as it comes."""


class Printer:
    """Writes lines in the contract's form (``[3]<stdout>: text``), and remembers how far it came."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, outputs: Outputs | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._outputs = outputs
        """None: everything goes to the console."""
        self.marks = LogCursor()
        self.lines = 0
        """The number of lines so far."""
        self._shown: set[str] = set()
        self._held: dict[Source, str] = {}
        self._places: dict[tuple[int, int], str] = {}
        """(generation, rank) to the name of the place, in a job of several roles."""
        self._within: dict[str, tuple[TextIO, Source | None]] = {}
        """The worker whose line is unfinished, for the terminal, or for a stream that is not a terminal."""
        self._turn = threading.RLock()
        """Held while something is written: the state of a job is announced from another thread."""

    def put(self, line: Json) -> None:
        """One worker's line to the stream it was written on, or one notice (each once) to stderr."""
        with self._turn:
            self._put(line)

    def announce(self, text: str) -> None:
        """Write a line of the tool's own to stderr, and end a worker's unfinished one before."""
        with self._turn:
            self._end_line()
            echo(f"nodeagentctl: {text}", file=self._err)

    def _end_line(self) -> None:
        if self._within.pop(TERMINAL if self._err.isatty() else "stderr", None) is not None:
            write("\n", self._err)

    def _put(self, line: Json) -> None:
        if line["stream"] == "notice":
            if line["text"] not in self._shown:
                self._shown.add(line["text"])
                self.announce(line["text"])
            return
        self.lines += 1
        self.marks.seen(line)
        if place := line.get("place"):
            self._places[line["generation"], line["rank"]] = place
        if self._outputs is None:
            self._show(line, "")
            return
        local = self._outputs.local_of(line)
        header = self._header(line, local)
        shown, teed = self._outputs.take(line, local, header)
        if shown:
            self._show(line, header if teed else "")

    def close(self) -> None:
        """Write the beginnings of long lines whose end never came, and end unfinished lines."""
        with self._turn:
            while self._held:
                source, text = self._held.popitem()
                self._write(source, text, ended=True)
            for to, _ in self._within.values():
                write("\n", to)
            self._within.clear()

    def _header(self, line: Json, _local: int) -> str:
        """The beginning of a teed line."""
        return self._prefix(source_of(line))

    def _show(self, line: Json, _header: str) -> None:
        source = source_of(line)
        whole = self._held.pop(source, "") + line["text"]
        if line["partial"] and len(line["text"]) >= LONG and len(whole) < MOST_HELD:
            self._held[source] = whole
        else:
            self._write(source, whole, ended=not line["partial"])

    def _write(self, source: Source, text: str, *, ended: bool) -> None:
        """A line that continues stays open until its next piece, or until another worker's line comes."""
        to, begin = self._to(source[3]), self._prefix(source)
        console = TERMINAL if to.isatty() else source[3]
        before = self._within.pop(console, (to, None))[1]
        head = "" if before == source else begin if before is None else f"\n{begin}"
        text = worker_text(text, begin) if console == TERMINAL else text
        end = "\n" if ended else ""
        write(f"{head}{text}{end}", to)
        if not ended:
            self._within[console] = to, source

    def _to(self, stream: str) -> TextIO:
        return self._err if stream == "stderr" else self._out

    def _prefix(self, source: Source) -> str:
        _, generation, rank, stream = source
        return f"[{self._places.get((generation, rank), rank)}]<{stream}>: "


class PlainPrinter(Printer):
    """Writes in torchrun's form: workers' output unchanged; teed lines begin with ``[role0]:``, or with the value of
    TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""

    def __init__(
        self,
        role: str,
        template: str | None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        super().__init__(out, err, outputs)
        self._role, self._template = role, Template(template or PREFIX)
        self._unended: set[Source] = set()
        """Workers whose line is unfinished."""

    def _end_line(self) -> None:
        if there := {source for source in self._unended if self._to(source[3]) is self._err}:
            self._unended -= there
            write("\n", self._err)

    def _header(self, line: Json, local: int) -> str:
        return self._template.safe_substitute(role_name=self._role, rank=line["rank"], local_rank=local)

    def _show(self, line: Json, header: str) -> None:
        source, to, text = source_of(line), self._to(line["stream"]), ended(line)
        if source not in self._unended:
            text = header + text
        self._unended.discard(source)
        if line["partial"]:
            self._unended.add(source)
        write(worker_text(text) if to.isatty() else text, to)


def print_logs(
    client: Client,
    job: str,
    printer: Printer,
    *,
    follow: bool,
    enough: Callable[[], bool] = lambda: False,
    **query: object,
) -> None:
    """Print until the job has ended and everything is printed (``follow``), or all stored output, or until ``enough``.

    Raises ``NoAgentError`` if no agent answers for ``client.patience`` seconds.
    """
    tail = query.get("tail") is not None
    with closing(printer):
        while True:
            skipper, before = printer.marks.again(tail), printer.lines
            try:
                with closing(client.stream(job_path(job) + "/logs", follow=follow, **query)) as lines:
                    for line in lines:
                        if enough():
                            return
                        if line["stream"] == "notice" or not skipper.skip(line):
                            printer.put(line)
                return
            except BrokeOffError:
                if not follow or (client.patience <= 0 and printer.lines == before):
                    raise
                time.sleep(POLL)
            if printer.marks.any:  # continue from there, not from the last lines, or the generation, of a later moment
                query["tail"] = None
                if "generation" not in query:
                    query["first"] = printer.marks.oldest


def _of_array(client: Client, ref: str, follow: bool, query: dict[str, Any]) -> bool:
    """The output of an array's jobs, one after the other; false if there is no array of this name. Raises
    ``CtlError``."""
    jobs = members(client, client.get("/v1/jobs")["items"], ref)
    if jobs and follow:
        raise CtlError(f"{ref} is an array of {len(jobs)} jobs", Exit.USAGE, f"follow one: logs -f {jobs[0]['name']}")
    for job in jobs:
        echo(f"==> {job['name']} <==", err=True)
        try:
            print_logs(client, job["uid"], Printer(), follow=False, **query)
        except CtlError as error:  # this job has no such generation or rank; others may
            if error.code != Exit.NOT_FOUND:
                raise
            echo(f"nodeagentctl: {error.message}", err=True)
    return bool(jobs)


@click.command(short_help="Print what a job's workers wrote.")
@job_argument
@click.option(
    "-f", "--follow", is_flag=True, help="Continue until the job has ended, with newer generations and all nodes."
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines (with -f: of each node).")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.")
@click.option(
    "--generation", type=click.IntRange(min=1), metavar="G", help="Only this generation [default: the newest that ran]."
)
@click.option("--previous", is_flag=True, help="Only the generation before the newest.")
@agent_option
@click.pass_context
def logs(
    ctx: click.Context,
    job: str | None,
    job_named: str | None,
    follow: bool,
    tail: int | None,
    rank: int | None,
    generation: int | None,
    previous: bool,
) -> None:
    """Print the output of the workers of JOB, as `[rank]<stdout>: text`; their stderr goes to stderr.

    In a job of several roles: `[trainer.0]<stdout>: text`. For an array: one job after the other.

    Nodes that cannot be asked are named on stderr; the output of the other nodes continues.
    """
    if previous and generation is not None:
        raise click.UsageError("--previous and --generation exclude each other")
    client = connect(ctx)
    ref = which_job(client, job, job_named)
    query: dict[str, Any] = {"tail": tail, "rank": rank}
    if generation is not None:
        query["generation"] = generation
    elif previous:
        query["previous"] = True
    printer = Printer()
    try:
        if follow:  # where the connection breaks off, the name may be that of another job by the time it is back
            ref = client.get(job_path(ref))["uid"]
            client.endure(AGENT_AWAY_LIMIT)
        print_logs(client, ref, printer, follow=follow, **query)
    except CtlError as error:
        if error.code != Exit.NOT_FOUND or not _of_array(client, ref, follow, query):
            raise
        return
    if rank is not None and not printer.lines:
        echo(f"nodeagentctl: nothing is kept of what rank {rank} wrote there, or it wrote nothing", err=True)
