"""An account on a node, without any rights: a second uid that does its worst over the agent's socket.

Each test gives the attacker a process of its own under another uid. Whatever it sends, an ordinary user's
requests go on, and each refusal is a sentence that names what refused it. (What a stranger may read and change at all
is in tests/integration/test_api_users.py.)
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nodeagent.api.auth import name_of
from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import NoAgentError
from nodeagent.osutil.linux import can_refuse_descriptors
from nodeagent.osutil.subuids import SUBORDINATES
from nodeagent.spec.sections import LimitsConfig, SubmitConfig
from nodeagent.store import client
from tests.unit.api.fakes import LiveAgent, asked, live_agent, spec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

ATTACKER, ACCOMPLICE, ORDINARY = (pwd.getpwnam(name).pw_uid for name in ("games", "news", "mail"))
"""Accounts that every Debian has, and nobody uses."""
NAME = name_of(ATTACKER)
UNNAMED = 100_001
"""As of a user namespace: `newuidmap` gives a user thousands of such."""
LIMITS = LimitsConfig(jobs=20, requests=400, concurrent=12, followers=4)
"""Small ones, so that the tests are quick; ``requests`` is lowered where it is what is tried."""
BOUND = 60
"""Seconds that an attack may take."""
PROGRAM = """
import encodings.idna, http.client, json, os, select, signal, socket, struct, sys
path, uid = sys.argv[1], int(sys.argv[2])
os.setgroups([]), os.setgid(uid), os.setuid(uid)
def opened(method, target, body=b""):
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = quiet()
    connection.request(method, target, body)
    return connection.getresponse()
def quiet():
    # A blocking call waits in the kernel's line where that is full; one with Python's timeout fails at once.
    connected = socket.socket(socket.AF_UNIX)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 30, 0))
    connected.connect(path)
    connected.settimeout(30)
    return connected
def refused(call):
    try:
        return call()
    except OSError as error:
        return type(error).__name__
print(json.dumps(ATTACK))
"""


@pytest.fixture
def agent() -> Iterator[LiveAgent]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with live_agent(Path(folder), obeys=False) as started:
            limited(started, LIMITS)
            yield started


def limited(agent: LiveAgent, limits: LimitsConfig) -> None:
    """As after a reload of the config."""
    agent.view.config = agent.view.config.model_copy(update={"limits": limits})


def attack(agent: LiveAgent, code: str, value: object = None, uid: int = ATTACKER) -> Any:
    """The value of an expression, worked out by a process of this user that has ``opened`` and ``value``."""
    program = f"import json, sys\nvalue = json.load(sys.stdin)\n{PROGRAM.replace('ATTACK', code)}"
    command = [sys.executable, "-c", program, agent.socket, str(uid)]
    done = subprocess.run(command, input=json.dumps(value), capture_output=True, text=True, timeout=BOUND, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ASK = "[(lambda answer: [answer.status, json.loads(answer.read())])(opened(*one)) for one in value]"
"""One after the other, each answer read."""


def ordinary_goes_on(agent: LiveAgent) -> None:
    """A user who asks for little gets it: the list of jobs, and one of his own."""
    name = f"mine-{len(agent.view.cluster().jobs)}"
    wanted = [("GET", "/v1/jobs", ""), submission(name, ORDINARY), ("GET", f"/v1/jobs/{name}", "")]
    assert [status for status, _ in attack(agent, ASK, wanted, ORDINARY)] == [200, 201, 200]


def submission(name: str, uid: int, **more: Any) -> tuple[str, str, str]:
    body = asked(spec(name, user=name_of(uid), **more)) | {"request_id": f"r-{name}"}
    return "POST", "/v1/jobs", json.dumps(body)


def refusals(answers: list[Any], status: int) -> set[str]:
    """What was said with this status; every refusal says what to do next."""
    errors = [answer["error"] for code, answer in answers if code == status]
    assert all(error["next"] for error in errors)
    return {error["message"] for error in errors}


def test_many_large_jobs(agent: LiveAgent) -> None:
    """308 jobs of 240 KB made pages of 62 MB that an agent which restarts could not read."""
    limited(agent, LimitsConfig(jobs=1000, job_bytes=2 * 1024**2, requests=1000))
    code = (
        "[(lambda answer: [answer.status, json.loads(answer.read())])(opened('POST', '/v1/jobs', "
        "value.replace('large-job', f'large-{n}'))) for n in range(48)]"
    )
    body = submission("large-job", ATTACKER, env={"TEXT": "x" * 240_000})[2]
    answers = attack(agent, code, body)
    assert [status for status, _ in answers] == [201] * 8 + [429] * 40
    begins = f"with this job, the stored jobs of {NAME} (ended ones too) would take "
    for refusal in refusals(answers, 429):
        assert refusal.startswith(begins)
        assert refusal.endswith("limits.job_bytes allows 2097152")
    ordinary_goes_on(agent)


def test_many_small_jobs(agent: LiveAgent) -> None:
    answers = attack(agent, ASK, [submission(f"job-{n}", ATTACKER) for n in range(25)])
    assert [status for status, _ in answers] == [201] * 20 + [429] * 5
    assert refusals(answers, 429) == {f"{NAME} has 20 live jobs, as many as limits.jobs allows"}
    ordinary_goes_on(agent)


def test_users_who_together_have_more_than_agents_read(agent: LiveAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within his limits: nothing was decided for anybody, until an operator had removed their jobs."""
    monkeypatch.setattr(client, "MOST_OF_JOBS", 4 << 20)
    limited(agent, LimitsConfig(requests=1000))
    for uid, accepted in ((ATTACKER, 6), (ACCOMPLICE, 2)):
        jobs = [submission(f"job-{uid}-{n}", uid, env={"TEXT": "x" * 240_000}) for n in range(6)]
        answers = attack(agent, ASK, jobs, uid)
        assert [status for status, _ in answers] == [201] * accepted + [429] * (6 - accepted)
    (refusal,) = refusals(answers, 429)
    assert "which is what users may fill of the 16384 jobs of 4194304 bytes that agents read" in refusal
    assert refusal.partition("Most have ")[2].startswith(f"{NAME} (6 jobs of ")
    ordinary_goes_on(agent)
    agent.do(agent.view.refresh)
    assert not agent.view.store._jobs.beyond
    (found,) = [item for item in doctor(agent) if "all users together" in item["what"]]
    assert f"Most have {NAME} (6 jobs of " in found["what"]


def test_a_uid_without_a_name(agent: LiveAgent) -> None:
    """Each had limits of its own, and there are thousands for one account."""
    answers = attack(agent, ASK, [submission("theirs", UNNAMED), ("GET", "/v1/jobs", "")], UNNAMED)
    assert [status for status, _ in answers] == [403, 200]
    (refusal,) = refusals(answers, 403)
    assert refusal.startswith(f"uid {UNNAMED} has no name in the user database of this node, so no node could run")
    assert agent.view.cluster().jobs == {}


def test_a_job_is_its_submitters_whatever_the_request_says(agent: LiveAgent) -> None:
    """So nobody spends another's quota."""
    method, path, body = submission("theirs", ATTACKER)
    lie = json.loads(body)
    lie["submitter"] |= {"user": name_of(ORDINARY), "uid": ORDINARY}
    more = lie | {"owner": ORDINARY, "uid": ORDINARY}
    assert [status for status, _ in attack(agent, ASK, [(method, path, json.dumps(one)) for one in (more, lie)])] == [
        400,
        201,
    ]
    assert agent.view.job("theirs").owner == ATTACKER


def test_a_flood_of_requests(agent: LiveAgent) -> None:
    limited(agent, LimitsConfig(requests=5))
    answers = attack(agent, ASK, [("GET", "/v1/jobs", "")] * 500)
    codes = [status for status, _ in answers]
    assert set(codes) == {200, 429}
    assert codes.count(429) > 100
    refusal = refusals(answers, 429)
    assert all("limits.requests" in text and "5 times a second" in text for text in refusal)
    ordinary_goes_on(agent)
    assert any(f["where"] == f"user/{NAME}" and "limits.requests" in f["what"] for f in doctor(agent))


def doctor(agent: LiveAgent) -> list[dict[str, Any]]:
    """Its findings, as root sees them."""
    found = CliRunner().invoke(cli, ["--agent", agent.socket, "doctor", "-o", "json"], prog_name="nodeagentctl")
    items: list[dict[str, Any]] = json.loads(found.stdout)["items"]
    return items


HOLD = (
    "(lambda answers: [[a.status, {} if a.status == 200 else json.loads(a.read())] for a in answers])"
    "([opened(*one) for one in value])"
)
"""All at once: none is hung up on before the last is answered."""


def test_many_followers(agent: LiveAgent) -> None:
    answers = attack(agent, HOLD, [("GET", "/v1/events?follow", "")] * 9)
    assert [status for status, _ in answers] == [200] * 4 + [429] * 5
    assert refusals(answers, 429) == {
        f"{NAME} follows 4 logs or streams of events at the agent of node n1 already (limits.followers in its "
        "config); nothing was changed"
    }
    ordinary_goes_on(agent)


def test_followers_of_the_own_logs_count_too(agent: LiveAgent) -> None:
    assert attack(agent, ASK, [submission("theirs", ATTACKER)])[0][0] == 201
    agent.do(agent.view.refresh)
    follow = [("GET", f"/v1/{what}?follow=1", "") for what in ("jobs/theirs/logs", "events")] * 3
    assert [status for status, _ in attack(agent, HOLD, follow)] == [200] * 4 + [429] * 2


def test_many_requests_under_way(agent: LiveAgent) -> None:
    limited(agent, LimitsConfig(concurrent=6, followers=100))
    answers = attack(agent, HOLD, [("GET", "/v1/events?follow", "")] * 9)
    assert [status for status, _ in answers] == [200] * 6 + [429] * 3
    assert all("limits.concurrent" in text for text in refusals(answers, 429))
    ordinary_goes_on(agent)


HOLD_SILENT = (
    "(lambda sockets: [(lambda left: (left.register(s, select.POLLIN), "
    "left.poll(50 if n < value[1] else 30_000) and s.recv(65536).decode() or '')[-1])(select.poll()) "
    "for n, s in [*enumerate(sockets)][::-1]][::-1])"
    "([quiet() for _ in range(value[0])])"
)
"""What is answered on each of so many connections on which nothing is asked; all stay open until the last is read.
Answers are waited for but on the first so many, which are looked at last."""


def test_connections_on_which_nothing_is_asked(agent: LiveAgent) -> None:
    """Each costs root's agent a descriptor: without any, it opens no file, reaches no store, starts no worker."""
    limited(agent, LimitsConfig(concurrent=6))
    answers = attack(agent, HOLD_SILENT, [40, 12])
    assert answers[:12] == [""] * 12, "twice limits.concurrent may wait for their requests"
    assert len(answers[12:]) == 28
    for text in answers[12:]:
        generation, _, body = text.partition("\r\n\r\n")
        assert generation.startswith("HTTP/1.1 429 ")
        error = json.loads(body)["error"]
        assert error["message"] == (
            f"uid {ATTACKER} has 12 connections to the agent of node n1, twice limits.concurrent in its config; "
            "nothing was changed"
        )
        assert error["next"]
    ordinary_goes_on(agent)


def test_what_is_no_http_is_not_in_the_agents_log(agent: LiveAgent, caplog: pytest.LogCaptureFixture) -> None:
    """A traceback for each: the journal takes so many lines in a time, and drops the others."""
    code = "[(lambda one: [one.sendall(text.encode()), one.recv(12).decode()])(quiet())[1] for text in value]"
    nonsense = ["GET /" + "x" * 9000 + "\r\n\r\n", "GET / HTTP/1.1\r\n" + "a: b\r\n" * 9000, "no HTTP\r\n\r\n"]
    assert {text[9:] for text in attack(agent, code, nonsense)} == {"400"}
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]
    ordinary_goes_on(agent)


def test_a_user_at_the_limit_of_connections_keeps_nobody_out(agent: LiveAgent) -> None:
    limited(agent, LimitsConfig(concurrent=6))
    code = f"import json, sys\nvalue = json.load(sys.stdin)\n{PROGRAM.replace('print(json.dumps(ATTACK))', HELD)}"
    command = [sys.executable, "-c", code, agent.socket, str(ATTACKER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write("40\n")
        holder.stdin.close()
        assert holder.stdout.readline() == "40\n"
        try:
            ordinary_goes_on(agent)
            assert CliRunner().invoke(cli, ["--agent", agent.socket, "get"], prog_name="nodeagentctl").exit_code == 0
        finally:
            holder.kill()
    ask = [("GET", "/v1/jobs", "")]
    agent.until(lambda: attack(agent, ASK, ask)[0][0] == 200)  # what is closed counts no more


FLOODS = (
    "print('floods', flush=True)\n"
    "while True:\n"
    "    one = socket.socket(socket.AF_UNIX)\n"
    "    one.setblocking(False)\n"
    "    one.connect_ex(path)\n"
    "    one.close()\n"
)


def test_connections_that_are_made_and_dropped_without_end(agent: LiveAgent) -> None:
    """The kernel's line of them was always full: others were not even taken, and the tool said that no agent listens
    there."""
    code = f"value = 0\n{PROGRAM.replace('print(json.dumps(ATTACK))', FLOODS)}"
    command = [sys.executable, "-c", code, agent.socket, str(ATTACKER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flooding:
        try:
            assert flooding.stdout is not None
            assert flooding.stdout.readline() == "floods\n"
            for _ in range(5):
                shown = CliRunner().invoke(cli, ["--agent", agent.socket, "get"], prog_name="nodeagentctl")
                assert shown.exit_code == 0, shown.stderr
        finally:
            flooding.kill()
    ordinary_goes_on(agent)


def test_the_uids_of_a_user_namespace_have_the_limits_of_one_user(
    agent: LiveAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account with a line in /etc/subuid was as many users as it wanted."""
    (tmp_path / "subuid").write_text(f"{NAME}:{UNNAMED - 1}:65536\n")
    monkeypatch.setattr(SUBORDINATES, "_file", tmp_path / "subuid")
    monkeypatch.setattr(SUBORDINATES, "_looked", float("-inf"))
    limited(agent, LimitsConfig(concurrent=6))
    code = f"import json, sys\nvalue = json.load(sys.stdin)\n{PROGRAM.replace('print(json.dumps(ATTACK))', HELD)}"
    command = [sys.executable, "-c", code, agent.socket, str(UNNAMED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write("12\n")
        holder.stdin.close()
        assert holder.stdout.readline() == "12\n"
        try:
            (answer,) = attack(agent, HOLD_SILENT, [1, 0], UNNAMED + 1)
            assert f"subordinate uids of {NAME}, as {UNNAMED + 1} is, have 12 connections to the agent" in answer
            ordinary_goes_on(agent)
        finally:
            holder.kill()


HELD = "held = [quiet() for _ in range(value)]; print(len(held), flush=True); signal.pause()"


def test_a_higher_priority(agent: LiveAgent) -> None:
    answers = attack(agent, ASK, [submission("first", ATTACKER, priority=1), submission("last", ATTACKER, priority=-1)])
    assert [status for status, _ in answers] == [403, 201]
    (refusal,) = refusals(answers, 403)
    assert "priority 1; priorities above 0 are for operators" in refusal
    assert [job.name for job in agent.view.cluster().jobs.values() if job.spec.priority > 0] == []


def test_more_nodes_than_the_site_allows_and_submitting_at_all(agent: LiveAgent) -> None:
    limited(agent, LimitsConfig(nodes_per_job=2, submit=SubmitConfig(users=(name_of(ORDINARY),))))
    answers = attack(agent, ASK, [submission("wide", ATTACKER, high=3), submission("small", ATTACKER, high=2)])
    assert [status for status, _ in answers] == [403, 403]
    assert any("limits.nodes_per_job" in text for text in refusals(answers, 403))
    assert any("limits.submit" in text for text in refusals(answers, 403))
    assert attack(agent, ASK, [submission("mine", ORDINARY, high=2)], ORDINARY)[0][0] == 201


def test_anothers_environment_and_logs(agent: LiveAgent) -> None:
    agent.submit(spec("secret", env={"TOKEN": "hf_s3cret"}), owner=ORDINARY)
    asked = [
        ("GET", f"/v1/{what}", "") for what in ("jobs/secret", "jobs", "jobs/secret/logs", "jobs/secret/logs?follow")
    ]
    answers = attack(agent, ASK, asked)
    assert [status for status, _ in answers] == [200, 200, 403, 403]
    assert "hf_s3cret" not in json.dumps(answers)
    own = attack(agent, ASK, asked[:1], ORDINARY)
    assert own[0][1]["spec"]["env"] == {"TOKEN": "hf_s3cret"}


@pytest.mark.parametrize("verb", ["stop", "delete"])
def test_stop_without_a_name(agent: LiveAgent, verb: str) -> None:
    """The only live job is somebody else's: not even who could stop it does so by leaving out a word."""
    agent.submit(spec("only"), owner=ORDINARY)
    refused = CliRunner().invoke(cli, ["--agent", agent.socket, verb], prog_name="nodeagentctl")
    assert refused.exit_code == 2
    assert f"{verb} needs the name of a job; nothing was changed" in refused.stderr
    assert agent.view.job("only").control.rev == 1
    method, path = {"stop": ("POST", "/v1/jobs/only/stop"), "delete": ("DELETE", "/v1/jobs/only")}[verb]
    answers = attack(agent, ASK, [(method, path, '{"request_id": "r"}')])
    assert f"job 'only' belongs to {name_of(ORDINARY)}; {NAME} may read it, not change it" in refusals(answers, 403)


@pytest.mark.skipif(not can_refuse_descriptors(), reason="a kernel older than Linux 6.16")
def test_a_descriptor_that_takes_long_to_close(agent: LiveAgent) -> None:
    """A TCP socket that lingers: root's agent, which took no descriptor, closed it in its loop. One message of an
    account ended what trained on a node."""
    code = "(lambda link: [refused(lambda: socket.send_fds(link, [b'GET'], [0])), link.send(b'GET')])(quiet())"
    assert attack(agent, code) == ["PermissionError", 3]
    ordinary_goes_on(agent)


LISTENS = """
import json, os, socket, sys, threading
path, uid, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
os.setgroups([]), os.setgid(uid), os.setuid(uid)
listens = socket.socket(socket.AF_UNIX)
listens.bind(path)
os.chmod(path, 0o777)
listens.listen(8)
print("listens", flush=True)
head = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
def serve(link):
    asked = link.recv(4096)
    print("asked" if asked else "left", flush=True)
    if asked:
        link.sendall(head + body)
while True:
    threading.Thread(target=serve, args=(listens.accept()[0],)).start()
"""


def test_a_socket_of_his_that_a_nodes_record_names_is_asked_nothing(agent: LiveAgent) -> None:
    """Who can write to Redis can name any path there. Root's agent asked whoever listened, and users were shown what he
    answered: as a node's output, and as its diagnosis."""
    folder = Path(agent.view.near["n2"]).parent
    folder.mkdir()
    os.chown(folder, ATTACKER, ATTACKER)
    forged = {"rank": 0, "stream": "stdout", "node": "n2", "generation": 1, "time": "", "text": "x", "partial": False}
    body = json.dumps(forged) + '\n{"end": true}\n'
    command = [sys.executable, "-c", LISTENS, agent.view.near["n2"], str(ATTACKER), body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stdout is not None
            assert listening.stdout.readline() == "listens\n"
            agent.submit(spec())
            agent.until(lambda: bool(agent.view.cluster().jobs))
            shown = CliRunner().invoke(cli, ["--agent", agent.socket, "logs", "digits"]).output
            assert f"user {ATTACKER} listens at {agent.view.near['n2']}, who is not the agent's" in " ".join(
                shown.split()
            )
            assert "stdout" not in shown
            answers = attack(agent, ASK, [("GET", "/v1/nodes/n2/diag", "")], ORDINARY)
            assert [status for status, _ in answers] == [503]
            assert "who is not the agent's" in answers[0][1]["error"]["message"]
            assert [listening.stdout.readline() for _ in range(2)] == ["left\n"] * 2
        finally:
            listening.kill()


def test_a_socket_of_his_that_a_nodes_record_names_is_sent_no_users_command(agent: LiveAgent) -> None:
    """The tool asks other agents of its machine where its own has ended. It sent a job and its environment to whoever
    listened where a record said."""
    theirs = agent.view.near["n2"]
    folder = Path(theirs).parent
    folder.mkdir()
    os.chown(folder, ATTACKER, ATTACKER)
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, theirs, str(ATTACKER), '{"jobs": []}'], stdout=subprocess.PIPE, text=True
    ) as listening:
        try:
            assert listening.stdout is not None
            assert listening.stdout.readline() == "listens\n"
            tool = Client([agent.socket])
            tool.endure(0.0)
            assert tool.sockets == [agent.socket, theirs]
            for asking in (tool, tool.twin()):
                asking.sockets = [theirs]  # its agent has ended
                with pytest.raises(NoAgentError, match=f"user {ATTACKER} listens there, who is neither root nor you"):
                    asking.change("POST", "/v1/jobs", jobs=[])
                assert listening.stdout.readline() == "left\n"
        finally:
            listening.kill()
