"""What a stranger can reach, as functions of bytes: each takes anything and raises only what its callers expect.

Owns the list, with an example of each input as it should be: the mutations begin there. A new door gets a line here.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nodeagent.api.errors import ApiError
from nodeagent.api.serializers import job_json, shown_to
from nodeagent.api.submit import laid_out, read, read_spec
from nodeagent.ctl.output import Column, table_lines
from nodeagent.ctl.terminal import one_line, printable, worker_text
from nodeagent.hardware.accelerator import AbsentError, ProblemError
from nodeagent.hardware.judging.judge import JudgeMemory, judge
from nodeagent.hardware.monitor import _gpu
from nodeagent.hardware.probes import kernellog, nvml
from nodeagent.hardware.readings import Readings
from nodeagent.lease.peers import DatagramSeal, parse
from nodeagent.model.jobspec import JobSpec, Submitter
from nodeagent.model.pod import PodState
from nodeagent.model.queue import Queues, QueuesRecord
from nodeagent.model.usage import UsageDay, UsageRow
from nodeagent.model.world import WorkerExit
from nodeagent.osutil.untrusted import UntrustedError, UntrustedFolder
from nodeagent.plan.cluster import Cluster
from nodeagent.pods.bounds import ShimReport
from nodeagent.pods.folder import promised_number
from nodeagent.pods.logs import read_logs
from nodeagent.shim.link import WorkerLink
from nodeagent.shim.loop import Loop
from nodeagent.shim.peers import Peer
from nodeagent.shim.record import Farewell, exit_record
from nodeagent.spec.configfile import parse_config
from nodeagent.spec.errors import CheckError, SpecError
from nodeagent.spec.jobcheck import check_spec
from nodeagent.spec.jobfile import parse_jobs
from nodeagent.spec.queuefile import parse_queues, tree_mistakes
from nodeagent.spec.sections import parse_tokens
from nodeagent.spec.storeconfig import parse as parse_url
from nodeagent.store import codec
from nodeagent.store.codec import decode_job, encode_job
from tests.fuzz.api import Api, check
from tests.fuzz.driver import Driver
from tests.unit.ctl import samples
from tests.unit.hardware.judging.test_arbitrary import FORMS, worst

WHO = Submitter(user="alice", uid=1000, gid=1000, cwd="/home/alice", host="n1")
NOW = 1_700_000_000.0
WIDTH = 60
MOST = 64 * 1024
"""Bytes that are sent at once."""


@dataclass(frozen=True, slots=True)
class Target:
    """One door."""

    name: str
    take: Callable[[bytes], None]
    """Raises only for a defect."""
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    """Pieces that mean something there."""


def text(data: bytes) -> str:
    """Any text: what JSON and Python may hold, halves of characters included."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


# --- files of people -----------------------------------------------------------------------------


def job_file(data: bytes) -> None:
    try:
        jobs = parse_jobs(text(data), "job.yaml", WHO)
    except SpecError as wrong:
        assert all(p.line >= 1 and p.what for p in wrong.problems)
        str(wrong).encode()
        return
    for spec in (job.spec for job in jobs):
        assert JobSpec.from_json(spec.to_json()) == spec, "what is accepted can be stored and read again"
        assert check_spec(spec) == [], "the agent takes what the file's reader takes"


def queue_file(data: bytes) -> None:
    try:
        queues = parse_queues(text(data), "queues.yaml")
    except SpecError as wrong:
        assert all(p.line >= 1 and p.what for p in wrong.problems)
        str(wrong).encode()
        return
    tree = Queues(rev=1, queues=queues)
    assert Queues.from_json(tree.to_json()) == tree, "what is accepted can be stored and read again"
    assert tree_mistakes(tree) == [], "the agent takes what the file's reader takes"


def agent_config(data: bytes) -> None:
    try:
        parse_config(text(data), "nodeagent.yaml", {}, uid=0, ephemeral=(32768, 60999))
    except SpecError as wrong:
        str(wrong).encode()


def tokens_file(data: bytes) -> None:
    try:
        parse_tokens(text(data), "tokens.yaml")
    except SpecError as wrong:
        str(wrong).encode()


def store_url(data: bytes) -> None:
    try:
        parse_url(text(data))
    except CheckError as wrong:
        str(wrong)


# --- requests ----------------------------------------------------------------------------------------


SUBMITTER = samples.job().spec.submitter.model_dump(mode="json")


def request_spec(data: bytes) -> None:
    """A spec that somebody sends without the tool."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return  # refused by api/requests.py
    if not isinstance(value, dict):
        return  # so too by ``read``
    try:
        spec = read_spec(value, SUBMITTER)
    except ApiError as wrong:
        json.dumps(wrong.body()).encode()
        return
    for problem in check_spec(spec):
        problem.encode()


def request_jobs(data: bytes) -> None:
    """Jobs that somebody sends without the tool."""
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return
    try:
        laid_out(read(value if isinstance(value, dict) else {"jobs": value}), "base")
    except ApiError as wrong:
        json.dumps(wrong.body()).encode()


API = Api()
"""Whoever uses the targets closes it."""


def http_request(data: bytes) -> None:
    """Line, path, query, headers and body, as they come."""
    check(API.ask(data))


def datagram(data: bytes) -> None:
    """Signed ones, too: of another version of ours."""

    seal = DatagramSeal(b"secret")
    for packet in (data, seal._mac(data) + data):
        body = seal.opened(packet)
        if body is not None:
            with suppress(ValueError):
                parse(body)


# --- the store ----------------------------------------------------------------------------------------


def _flat(data: bytes) -> list[str]:
    cells = [part.decode("utf-8", "replace") for part in data.split(b"\0")]
    return cells if len(cells) % 2 == 0 else cells[:-1]


def stored_job(data: bytes) -> None:
    try:
        job = decode_job(_flat(data))
    except ValueError:
        return
    json.dumps(shown_to(job_json(job, Cluster(served=0), {}, NOW), seen=False)).encode()


def stored_otherwise(data: bytes) -> None:
    """Bytes in the place of each other record and value that agents read."""
    flat, words = _flat(data), data.decode("utf-8", "replace")
    day, rest = (flat[0], flat[2:]) if flat else ("", [])
    for reads in (
        lambda: codec.decode_node(flat, ""),
        lambda: codec.decode_node(flat, words),
        lambda: codec.decode_queues(flat),
        lambda: codec.decode_windows(flat),
        lambda: codec.decode_usage(day, rest),
        lambda: codec.decode_event(("1-1", flat)),
        lambda: codec.decode_saved(words),
        lambda: PodState.from_json(data),
    ):
        try:
            found = reads()
        except ValueError:
            continue
        found.to_json().encode()


# --- what workers and shims write --------------------------------------------------------------------------


def error_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "error.json")
        file.write_bytes(data)
        line = json.dumps(exit_record(0, 0, 1, 1 << 8, False, 0, file, "the last words", Farewell()))
        WorkerExit.from_json(line)  # as the agent reads it
        line.encode()
        assert len(line) < 64 * 1024


def shim_message(data: bytes) -> None:
    """What anybody who may connect says to a shim."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = WorkerLink(lambda: None)
        peer = Peer(Loop(), ours, link.receive, lambda _peer: None)
        theirs.setblocking(False)
        theirs.send(data[:MOST] + b"\n")
        peer._readable()
        with suppress(BlockingIOError):
            for line in theirs.recv(1 << 20).splitlines():
                json.loads(line)
        peer.close()


def log_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        generation = Path(folder, "g1")
        generation.mkdir()
        (generation / "rank0.log").write_bytes(data)
        for tail in (None, 0, 1, 5):
            for line in read_logs(Path(folder), 1, tail=tail):
                json.dumps(line.text).encode()


def users_file(data: bytes) -> None:
    """What lies where root's agent looks, in a folder of the job's user."""
    with tempfile.TemporaryDirectory() as place:
        own = Path(place, "pods", "u")
        own.mkdir(parents=True)
        (own / "highest.json").write_bytes(data)
        assert promised_number(Path(place), "u") >= 0
        with UntrustedFolder(own) as folder, suppress(UntrustedError):
            json.dumps(folder.read_object("highest.json"), ensure_ascii=False).encode()


def shim_status(data: bytes) -> None:
    """A line from a shim to root's agent, as pods/pod.py reads it."""
    try:
        received = ShimReport.read(data)
    except ValueError as wrong:
        assert len(str(wrong)) < 2000
        return
    received.model_dump_json().encode()


# --- the machine ----------------------------------------------------------------------------------------


def kernel_record(data: bytes) -> None:
    found = kernellog.record(data, NOW)
    if found is not None:
        kernellog.parse(*found)
    folder = kernellog.KernelLines()
    folder.read([data])
    if b"NVRM: " not in data and b"nvidia-nvswitch" not in data:
        assert "fatal" not in worst(folder.take()), "no program's name makes a line fatal"
    kernellog.parse(text(data), NOW)


def driver_answers(data: bytes) -> None:
    """The GPUs' driver, three times in a row: what is read, sent, and judged of it."""
    real, nvml.pynvml = nvml.pynvml, Driver(data)  # type: ignore[attr-defined]
    memory, past, lines = JudgeMemory(), None, []
    try:
        vendor = nvml.Nvidia()
        vendor.open()
        for _ in range(3):
            with suppress(ProblemError):
                lines.append(json.dumps({"devices": vendor.devices(), "gpus": vendor.look()}))
    except (AbsentError, ProblemError):
        pass
    finally:
        nvml.pynvml = real  # type: ignore[attr-defined]
    for n, line in enumerate(lines):
        gpus = tuple(_gpu(fields) for fields in json.loads(line)["gpus"])
        now = Readings(boot="b", gpus=gpus, expected=("GPU-a",))
        memory = judge(memory, now, past, 1_000.0 + n, 1.0)
        for verdict in memory.verdicts:
            verdict.to_json().encode()
        past = now


# --- to a terminal -----------------------------------------------------------------------------------------


def terminal(data: bytes) -> None:
    value = text(data)
    for shown in (printable(value), one_line(value), worker_text(value).replace("\r", "")):
        shown.encode()
        assert not set(shown) & {"\x07", "\x08", "\r", "\x9b", "\u202e"}
    # The first column is a name, which is short and never folded.
    columns = [Column("NAME", lambda row: row["name"]), Column("TEXT", lambda row: row["text"], text=True)]
    for line in table_lines(columns, [{"name": value[:5], "text": value}], WIDTH):
        assert len(line) <= WIDTH


JOB = b"""name: resnet50
command: [python, train.py, --lr, "0.1"]
nodes: {min: 2, max: 8, target: 4}
workers_per_node: 2
env: {OMP_NUM_THREADS: "4", A: &a x, B: *a}
working_dir: /shared/resnet
limits: {memlock: infinity, nofile: 1048576}
grace: 1h30m
hang: {progress: 10m}
restarts: {max: 10, window: 1h, backoff: 0s..30s}
policies:
  - {on: WorkerFailed, exit_code: 3, do: FailJob}
hooks: {pre_start: [sh, -c, "true"]}
"""
QUEUES = b"""queues:
  research: {weight: 2, guarantee: {gpus: 8}, capability: {gpus: 16, nodes: 2}, groups: [phd]}
  vision: {parent: research, state: closed, users: ann, user_quota: {jobs: 3}}
  rest: {users: bob, default: true}
"""
CONFIG = b"""cluster: prod
node: {id: n1, address: 10.0.0.1, cpu_slots: 4, gpus: none, labels: {rack: r1}}
redis: {url: "redis://:secret@redis1:6379/0"}
ports: {api: 9470, rendezvous: 29400-29899}
timing: {heartbeat: 500ms, lease: 3s}
jobs: {operators: wheel, allow_root: false, logs: {max_bytes: 64MiB, keep: 4}}
"""
_SPEC = samples.job().spec.model_dump(mode="json", exclude={"submitter"})
JOBS = json.dumps(
    {
        "submitter": SUBMITTER,
        "jobs": [{"spec": _SPEC, "array": "0-3%2"}, {"spec": _SPEC | {"name": "b"}, "after": {"digits": "any"}}],
    }
).encode()
TOKENS = b"""tokens:
  ci: {sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef, user: alice}
  grafana: {sha256: fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210, may: read}
"""
ERROR = b'{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1"}}}'
LOG = b"2026-01-01T00:00:00.000000Z stdout F step 1\n2026-01-01T00:00:01.000000Z stderr P half"
KERNEL = b"4,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n SUBSYSTEM=pci\n"
SPOKEN = tuple(
    b"3,1,1000000,-;" + form.format(name="python", pid=7, file="/usr/bin/x").encode() + b"\n" for form in FORMS
)
"""Lines into which programs put their names."""
STATUS = b'{"v": 1, "status": {"uid": "u", "phase": "running", "reason": "\\ud83d\\ude00 \\ud800"}}'
YAML = (b": ", b"- ", b"&a ", b"*a", b"!!int ", b"<<", b'"\\ud800"', b"{", b"[", b"]", b"}", b"'", b"|\n", b"1e309",
        b"9" * 400, b"\xed\xa0\x80", b"\0", b".inf", b"~", b"? ")  # fmt: skip
JSON = (b"[" * 2000, b'{"a":', b"1e999", b"-0", b'"\\ud800"', b"null", b"true", b"9" * 5000, b"NaN", b"\xff", b"[]")


def _stored(flat: dict[str, str]) -> bytes:
    return "\0".join(part for pair in flat.items() for part in pair).encode()


_DAY = UsageDay(day=20_000, rows={"1000 default": UsageRow(jobs=1)}, rev=9)
STORED = (
    _stored(codec.encode_node(samples.node("n1"))),
    _stored(codec.encode_queues(QueuesRecord(tree=Queues(rev=3, queues=parse_queues(QUEUES.decode(), "q")), rev=3))),
    _stored(codec.encode_usage(_DAY)),
    b"7 run@1/2",
)
NAMELESS = bytes(6) + b"\xb3" + bytes(11) + b"&" + bytes(10) + b"\xff7"
"""A GPU that says its UUID once, and when it is asked again that it has none."""
CHUNKED = b'20\r\n{"request_id":"r2","reason":"x"}\r\n0\r\n\r\n'
REQUESTS = tuple(
    f"{line} HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n{more}\r\n".encode() + body
    for line, more, body in (
        ("GET /v1/jobs?local_only=1", "", b""),
        ("GET /v1/jobs/digits", "Accept: application/json\r\n", b""),
        ("GET /v1/jobs/digits/logs?tail=5&rank=0&generation=1&previous=1&first=1&last=2&follow=0", "", b""),
        ("GET /v1/events?limit=10&after=1-1&job=digits", "", b""),
        ("GET /v1/nodes?after=n0&limit=5", "", b""),
        ("GET /v1/usage?by=user&since=2026-01-01&until=2026-01-02", "", b""),
        ("GET /v1/history?limit=3", "Authorization: Bearer abc\r\n", b""),
        ("GET /v1/doctor?peers=0", "", b""),
        ("GET /metrics", "Accept: text/plain;version=0.0.4\r\n", b""),
        ("GET /v1/status", "Cookie: a=b\r\nIf-None-Match: x\r\n", b""),
        ("POST /v1/jobs/digits/scale", "Content-Length: 36\r\n", b'{"request_id": "r1", "target": 2   }'),
        ("POST /v1/nodes/n2/cordon", "Transfer-Encoding: chunked\r\n", CHUNKED),
    )
)
HTTP = (
    b"%2e%2e%2f", b"%00", b"%ff", b"%", b"?", b"&", b"=", b"/", b"\r\n", b": ", b"\0", b"\xff", b"-1", b"9" * 40,
    b"nan", b"1e999", b"Range: bytes=0-\r\n", b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\n", b"HTTP/9.9",
    b"OPTIONS ", b"Content-Length: -1\r\n", b"A: " + b"b" * 9000 + b"\r\n", b"CONNECT ", b"[", b"\xed\xa0\x80",
)  # fmt: skip


TARGETS = (
    Target("job file", job_file, (JOB,), YAML),
    Target("queue file", queue_file, (QUEUES,), YAML),
    Target("agent config", agent_config, (CONFIG,), YAML),
    Target("tokens file", tokens_file, (TOKENS,), YAML),
    Target("store url", store_url, (b"rediss+sentinel://u:p@[::1]:26379,s2:1/gpus/0", b"unix:///run/redis.sock")),
    Target("request's spec", request_spec, (json.dumps(_SPEC).encode(),), JSON),
    Target("request's jobs", request_jobs, (JOBS,), (*JSON, b"0-999%8", b"1,3,5-7:2", b'{"a": "any"}', b'["a", "b"]')),
    Target("datagram", datagram, (b'{"nonce": "n", "ask": {"job": "u", "number": 1}}',), JSON),
    Target("stored job", stored_job, (_stored(encode_job(samples.job())), _stored(encode_job(samples.HOLDING))), JSON),
    Target("stored otherwise", stored_otherwise, STORED, (*JSON, b"\0", b"rev", b"\0row:1000 default\0")),
    Target("http request", http_request, REQUESTS, HTTP),
    Target("driver's answers", driver_answers, (bytes(200), bytes(range(256)), bytes([0, 1, 2, 3] * 80), NAMELESS)),
    Target("error file", error_file, (ERROR, b"plain words"), JSON),
    Target("shim message", shim_message, (b'{"v": 1, "op": "worker.progress", "id": 1, "fds": 2}',), JSON),
    Target("log file", log_file, (LOG,), (b" F ", b" P ", b"stdout", b"\n", b"\xff")),
    Target("user's file", users_file, (b'{"uid": "u", "mark": "m", "job": "j", "number": 3}',), JSON),
    Target("shim's status", shim_status, (STATUS, b'{"v": 1, "echo": 7}', b'{"v": 1, "error": "no"}'), JSON),
    Target(
        "kernel record", kernel_record, (KERNEL, *SPOKEN), (b"NVRM: Xid", b"(PCI:", b";", b"79", b"segfault", b"\\x1b")
    ),
    Target(
        "terminal", terminal, (b"fine\x1b[31mred\x1b[0m",), (b"\x1b[", b"\x1b]0;", b"\r", b"\xc2\x9b", b"\xe2\x80\xae")
    ),
)
