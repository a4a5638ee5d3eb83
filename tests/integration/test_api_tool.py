"""The tool against a live API: what it prints, what it waits for, and what it exits with."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from nodeagent.model.job import BudgetEntry, Outcome
from tests.unit.api.fakes import LiveAgent, live_agent, spec

ME = pwd.getpwuid(os.geteuid()).pw_name
JOB_FILE = """\
name: mine
command: [python, train.py]
nodes: {min: 1, max: 3, target: 2}
workers_per_node: 2
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, allow_root=True) as started:
        yield started


@pytest.fixture
def still(tmp_path: Path) -> Iterator[LiveAgent]:
    """An agent that does nothing of what is asked."""
    with live_agent(tmp_path, obeys=False, allow_root=True) as started:
        yield started


def ctl(agent: LiveAgent, *words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words], input=text, prog_name="nodeagentctl")


def started(agent: LiveAgent, name: str = "digits") -> None:
    agent.submit(spec(name))
    agent.until(lambda: any(j.name == name and j.phase == "running" for j in agent.view.cluster().jobs.values()))
    agent.do(agent.view.refresh)


def test_get_formats(agent: LiveAgent) -> None:
    nothing = ctl(agent, "get")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "no jobs" in nothing.stderr
    started(agent)
    plain = ctl(agent, "get").stdout.splitlines()
    assert plain[0].split() == ["NAME", "STATUS", "AGE", "DURATION", "CHIEF", "GPUS", "NODE"]
    assert plain[1].split()[:2] == ["digits", "RUNNING"]
    assert plain[1].split()[-3:] == ["n1", "0", "n1,n2"]
    wide = ctl(agent, "get", "-o", "wide").stdout.splitlines()
    assert wide[0].startswith(plain[0].split()[0])
    assert "2/2 (1:3)" in wide[1]
    assert "uid-digits" in wide[1]
    assert ctl(agent, "get", "-o", "name").stdout == "job/digits\n"
    assert json.loads(ctl(agent, "get", "-o", "json").stdout)["items"][0]["name"] == "digits"
    assert yaml.safe_load(ctl(agent, "get", "digits", "-o", "yaml").stdout)["uid"] == "uid-digits"
    assert ctl(agent, "nodes", "-o", "name").stdout == "node/n1\nnode/n2\nnode/n3\n"
    assert ctl(agent, "nodes").stdout.splitlines()[0].split()[:3] == ["NAME", "STATE", "ADDRESS"]


def test_submit_validate_and_dry_run(agent: LiveAgent, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    assert ctl(agent, "validate", str(file)).stdout == f"{file}: job/mine is a valid job file\n"
    dry = ctl(agent, "submit", str(file), "--dry-run")
    assert (dry.exit_code, yaml.safe_load(dry.stdout)["name"]) == (0, "mine")
    assert agent.view.cluster().jobs == {}
    done = ctl(agent, "submit", "-", text=JOB_FILE)
    assert done.exit_code == 0
    assert done.stdout.startswith("job/mine submitted (uid ")
    assert agent.view.job("mine").spec.user == ME
    taken = ctl(agent, "submit", str(file))
    assert taken.exit_code == 6
    assert "next: " in taken.stderr


def test_who_submits_learns_at_once_that_no_known_nodes_will_do(still: LiveAgent) -> None:
    text = JOB_FILE + "placement: {require: {gpu: h100}}\n"
    for dry in (["--dry-run"], []):
        done = ctl(still, "submit", "-", *dry, text=text)
        assert done.exit_code == 0
        why = "needs 1 node with gpu=h100: none of the 3 known nodes is such"
        assert f"job/mine waits until nodes come that will do: {why}\n" in done.stderr
    still.until(lambda: any("n1 has no label gpu" in why for why in still.view.explain(still.view.job("mine").uid)))


def test_a_file_with_mistakes_tells_them_all(agent: LiveAgent, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: Mine!\ncommand: []\nnodes: many\nworkers_per_nod: 2\npriority: high\n")
    for verb in ("validate", "submit"):
        result = ctl(agent, verb, str(file))
        assert result.exit_code == 2
        output = [line for line in result.stderr.splitlines() if line.startswith(f"  {file}:")]
        assert len(output) == 5
    assert agent.view.cluster().jobs == {}
    assert ctl(agent, "submit", str(tmp_path / "none.yaml")).exit_code == 2


def test_the_only_live_job_is_meant(agent: LiveAgent) -> None:
    none = ctl(agent, "pause")
    assert (none.exit_code, "there is no job" in none.stderr) == (3, True)
    started(agent)
    assert ctl(agent, "pause").stdout == "job/digits paused\n"
    assert ctl(agent, "resume").stdout == "job/digits resumed\n"
    started(agent, "other")
    two = ctl(agent, "pause")
    assert two.exit_code == 2
    assert "digits, other" in two.stderr
    assert ctl(agent, "pause", "--job", "other").stdout == "job/other paused\n"
    assert ctl(agent, "pause", "digits", "--job", "other").exit_code == 2


def test_changes_wait_until_it_is_so(agent: LiveAgent) -> None:
    started(agent)
    scaled = ctl(agent, "scale", "3")
    assert (scaled.exit_code, scaled.stdout) == (0, "job/digits scaled: trains on 3 nodes\n")
    assert len(agent.view.job("digits").generation.members) == 3  # type: ignore[union-attr]
    assert ctl(agent, "scale", "digits", "1").exit_code == 0
    before = agent.view.job("digits").generation
    assert ctl(agent, "restart", "digits").stdout == "job/digits restarted\n"
    assert agent.view.job("digits").generation.number == before.number + 1  # type: ignore[union-attr]
    assert ctl(agent, "stop", "digits").stdout == "job/digits stopped\n"
    assert ctl(agent, "stop", "digits").exit_code == 6
    assert ctl(agent, "delete", "digits").stdout == "job/digits deleted\n"
    assert ctl(agent, "delete", "digits").exit_code == 3


def test_no_wait(still: LiveAgent) -> None:
    still.submit(spec())
    assert ctl(still, "pause", "digits", "--no-wait").stdout == "job/digits pause asked for\n"
    assert ctl(still, "pause", "digits", "--no-wait").stdout == "job/digits pause was asked for already\n"
    assert "target 2 -> 3" in ctl(still, "scale", "digits", "3", "--no-wait").stdout
    assert ctl(still, "delete", "digits", "--no-wait").exit_code == 0


def test_a_repeated_request_does_nothing_new(agent: LiveAgent) -> None:
    started(agent)
    assert ctl(agent, "scale", "digits", "3", "--request-id", "r1").exit_code == 0
    assert ctl(agent, "scale", "digits", "1", "--request-id", "r2").exit_code == 0
    again = ctl(agent, "scale", "digits", "3", "--request-id", "r1", "--no-wait")
    assert again.exit_code == 0
    assert agent.view.job("digits").control.target == 1


@pytest.mark.parametrize("words", [("scale", "digits", "5"), ("scaleout", "--count", "3"), ("scale", "5")])
def test_scale_out_that_is_not_met_is_rolled_back(agent: LiveAgent, words: tuple[str, ...]) -> None:
    agent.submit(spec(high=6))
    agent.until(lambda: agent.view.job("digits").phase == "running")
    before = agent.view.job("digits").generation
    result = ctl(agent, *words, "--timeout", "300ms")
    assert result.exit_code == 4
    assert "scale to 5 timed out after 0.3s" in result.stderr
    assert "went back to 2" in result.stderr
    assert "its target is 2 again" in result.stderr
    assert "still" not in result.stderr
    job = agent.view.job("digits")
    assert (job.control.target, job.generation) == (2, before), "training goes on undisturbed"
    output = ctl(agent, "describe", "digits").stdout
    assert "Scale:       to 5: scale to 5 timed out after 0.3s" in output
    again = ctl(agent, *words, "--timeout", "300ms", "--no-wait")
    assert (again.exit_code, again.stdout) == (0, "job/digits target 2 -> 5\n"), "a new request is a new change"


def test_a_scale_out_shows_what_it_waits_for(still: LiveAgent) -> None:
    """Its first look may come late, so the agents do nothing before the line stands there."""
    job = still.submit(spec())
    still.do(lambda: still.view.form(job, 2))
    still.do(still.view.refresh)
    still.view.reasons = ("runs on 2 of 3 nodes: n3 is getting ready",)
    words = [sys.executable, "-m", "nodeagent.ctl", "--agent", still.socket, "scale", "digits", "3"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stderr is not None
        assert tool.stderr.readline() == "digits: running: runs on 2 of 3 nodes: n3 is getting ready\n"
        still.obeys = True
        output, more = tool.communicate(timeout=60)
    assert (tool.returncode, output, more) == (0, "job/digits scaled: trains on 3 nodes\n", "")


def test_scale_out_and_in(agent: LiveAgent) -> None:
    started(agent)
    out = ctl(agent, "scaleout", "digits", "--count", "1")
    assert (out.exit_code, out.stdout) == (0, "job/digits scaled: trains on 3 nodes\n")
    by_name = ctl(agent, "scalein", "--job", "digits", "--node", "node/n2", "--timeout", "5s")
    assert (by_name.exit_code, by_name.stdout) == (0, "job/digits scaled: trains on 2 nodes\n")
    job = agent.view.job("digits")
    assert job.generation is not None
    assert job.control.scale is not None
    assert sorted(job.generation.members) == ["n1", "n3"]
    assert job.control.scale.grace == 5.0
    assert agent.view.cluster().nodes["n2"].cordon is None
    assert "n2 left, and is used again last" in ctl(agent, "describe", "digits").stdout
    fewer = ctl(agent, "scalein", "--count", "1")
    assert (fewer.exit_code, fewer.stdout) == (0, "job/digits scaled: trains on 1 node\n")


def test_a_repeated_count_counts_once(agent: LiveAgent) -> None:
    started(agent)
    once = ("scaleout", "digits", "--count", "1", "--request-id", "r1")
    for _ in range(2):
        assert ctl(agent, *once).stdout == "job/digits scaled: trains on 3 nodes\n"
    assert agent.view.job("digits").control.target == 3
    output = ctl(agent, *once, "--no-wait")
    assert output.stdout == (
        "job/digits target 2 -> 3 was asked for with this request id before: nothing new was done\n"
    )
    other = ctl(agent, "scaleout", "digits", "--count", "2", "--request-id", "r1")
    assert (other.exit_code, "was used for another change" in other.stderr) == (6, True)
    assert ctl(agent, "scale", "digits", "1").exit_code == 0
    since = ctl(agent, *once)
    assert (since.exit_code, "since then its target became 1" in since.stderr) == (1, True)
    assert agent.view.job("digits").control.target == 1


def test_a_repeated_request_tells_of_a_rollback_again(agent: LiveAgent) -> None:
    agent.submit(spec(high=6))
    words = ("scaleout", "digits", "--count", "3", "--timeout", "300ms", "--request-id", "r1")
    first, second = ctl(agent, *words), ctl(agent, *words)
    assert (first.exit_code, second.exit_code) == (4, 4)
    assert "went back to 2" in second.stderr


def test_what_is_so_already_is_remembered_too(agent: LiveAgent) -> None:
    started(agent)
    assert ctl(agent, "scale", "digits", "2", "--request-id", "r1").exit_code == 0
    assert ctl(agent, "scale", "digits", "3").exit_code == 0
    late = ctl(agent, "scale", "digits", "2", "--request-id", "r1", "--no-wait")
    assert late.exit_code == 0
    assert agent.view.job("digits").control.target == 3


def test_a_paused_job_is_scaled_without_a_deadline(agent: LiveAgent) -> None:
    started(agent)
    assert ctl(agent, "pause", "digits").exit_code == 0
    output = ctl(agent, "scaleout", "digits", "--count", "1", "--timeout", "1ms").stdout
    assert output == "job/digits target 2 -> 3 (paused: it counts when it runs again)\n"
    assert ctl(agent, "resume", "digits").exit_code == 0
    agent.until(lambda: len(agent.view.job("digits").generation.members) == 3)  # type: ignore[union-attr]


def test_while_it_is_scaled_out_it_is_not_scaled_in(still: LiveAgent) -> None:
    still.submit(spec())
    assert ctl(still, "scaleout", "digits", "--count", "1", "--no-wait").exit_code == 0
    refused = ctl(still, "scalein", "digits", "--count", "1")
    assert refused.exit_code == 6
    assert "is being scaled out to 3 nodes" in refused.stderr
    assert "nodeagentctl scale digits 2" in refused.stderr
    assert ctl(still, "scale", "digits", "2", "--no-wait").stdout == "job/digits target 3 -> 2\n"


def test_pause_that_takes_too_long_goes_on(still: LiveAgent) -> None:
    still.submit(spec())
    result = ctl(still, "pause", "--timeout", "300ms")
    assert result.exit_code == 4
    assert "nothing was taken back" in result.stderr
    still.do(still.view.refresh)
    assert still.view.job("digits").control.desired == "pause"


def test_drain_waits_until_the_node_is_empty(agent: LiveAgent) -> None:
    started(agent)
    done = ctl(agent, "drain", "n2", "--reason", "new disk")
    assert (done.exit_code, done.stdout) == (0, "node/n2 drained\n")
    assert "n2" not in agent.view.job("digits").generation.members  # type: ignore[union-attr]
    assert ctl(agent, "uncordon", "n2").stdout == "node/n2 uncordoned\n"
    assert ctl(agent, "drain", "n2").exit_code == 2


@pytest.mark.parametrize("verb", [("uncordon", "n2"), ("cordon", "n2", "--reason", "only that")])
def test_a_drain_that_is_taken_back_says_so(still: LiveAgent, verb: tuple[str, ...]) -> None:
    job = still.submit(spec())
    still.do(lambda: still.view.form(job, 2))
    still.do(still.view.refresh)
    assert ctl(still, "drain", "n2", "--reason", "disk", "--no-wait", "--request-id", "r1").exit_code == 0
    assert ctl(still, *verb).exit_code == 0
    result = ctl(still, "drain", "n2", "--reason", "disk", "--timeout", "5s", "--request-id", "r1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the drain of node n2 was taken back before it was drained: it is " in result.stderr
    cordon = still.view.cluster().nodes["n2"].cordon
    assert (cordon is None or cordon.reason) == (verb[0] == "uncordon" or "only that"), "it is left as it is"


def test_a_drain_that_takes_too_long_keeps_only_the_cordon(still: LiveAgent) -> None:
    job = still.submit(spec())
    still.do(lambda: still.view.form(job, 2))
    still.do(still.view.refresh)
    result = ctl(still, "drain", "n2", "--reason", "new disk", "--timeout", "300ms")
    assert result.exit_code == 4
    assert "stays cordoned" in result.stderr
    still.do(still.view.refresh)
    cordon = still.view.cluster().nodes["n2"].cordon
    assert cordon is not None
    assert (cordon.drain, cordon.reason) == (False, "new disk")


REFUSALS = [
    (("scale", "digits", "9"), 6, "allows 1 to 3"),
    (("scale", "nope", "2"), 3, "no job 'nope'"),
    (("scale", "digits", "x"), 2, "whole number"),
    (("scaleout", "digits"), 2, "--count"),
    (("scaleout", "digits", "--count", "0"), 2, "--count"),
    (("scaleout", "digits", "--count", "2"), 6, "allows 1 to 3"),
    (("scaleout", "nope", "--count", "1"), 3, "no job 'nope'"),
    (("scalein", "digits"), 2, "--count N"),
    (("scalein", "digits", "--count", "1", "--node", "n1"), 2, "--node NODE"),
    (("scalein", "digits", "--count", "2"), 6, "allows 1 to 3"),
    (("scalein", "digits", "--node", "n9"), 6, "does not run on n9"),
    (("scalein", "digits", "--node", "n1", "--node", "n2"), 6, "cannot have 0 nodes"),
    (("stop", "digitz"), 3, "did you mean 'digits'"),
    (("cordon", "n9", "--reason", "x"), 3, "there are: n1, n2, n3"),
    (("describe", "nothing"), 3, "no job and no node 'nothing'"),
    (("get", "nope"), 3, "no job 'nope'"),
    (("logs", "nope"), 3, "no job 'nope'"),
    (("logs", "digits", "--previous"), 3, "no generation before"),
    (("logs", "digits", "--previous", "--generation", "1"), 2, "exclude"),
    (("frobnicate",), 2, "No such command"),
    (("desrcibe",), 2, "describe"),
    (("get", "-o", "xml"), 2, "xml"),
    (("pause", "--timeout", "soon"), 2, "not a duration"),
    (("run", "--nodes", "two", "--", "true"), 122, "--nodes"),
    (("run",), 122, "CMD"),
    (("run", "--local", "2", "--detach", "--", "true"), 122, "local up --nodes 2"),
    (("run", "--local", "2", "--nodes", "3", "--", "true"), 122, "bring up more (--local 3), or ask for fewer"),
    (("run", "--local", "4000", "--", "true"), 122, "choose fewer nodes"),
    (("run", "--", "python train.py"), 122, "leave out the quotes: -- python train.py"),
]


@pytest.mark.parametrize(("words", "code", "says"), REFUSALS)
def test_refusals(agent: LiveAgent, words: tuple[str, ...], code: int, says: str) -> None:
    started(agent)
    rev = agent.view.job("digits").control.rev
    result = ctl(agent, *words)
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr
    assert agent.view.job("digits").control.rev == rev


def test_without_an_agent(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["--agent", str(tmp_path / "none.sock"), "get"])
    assert result.exit_code == 5
    assert "local up" in result.stderr
    assert "systemctl start nodeagent" in result.stderr
    by_env = CliRunner().invoke(cli, ["get"], env={"NODEAGENTCTL_AGENT": str(tmp_path / "none.sock")})
    assert by_env.exit_code == 5
    run = CliRunner().invoke(cli, ["run", "--agent", str(tmp_path / "none.sock"), "--", "true"])
    assert run.exit_code == 125


def test_store_away_is_5(agent: LiveAgent) -> None:
    started(agent)
    agent.view.away_since = time.time() - 7
    agent.view.store.away = True
    result = ctl(agent, "stop", "digits")
    assert result.exit_code == 5
    assert "the store has not answered node n1 since" in result.stderr


def test_describe_of_a_failure_says_who_and_why(still: LiveAgent) -> None:
    job = still.submit(spec())
    still.do(lambda: still.view.form(job, 2))
    still.do(still.view.refresh)
    spend = BudgetEntry(
        at=1, wall=time.time(), kind="worker_failed", counts=True, node="n2", rank=3, exit=137,
        text="rank 3 on n2 failed first: SIGKILL (9)", error="Traceback:\n  boom",
    )  # fmt: skip
    outcome = Outcome(code=137, text="restart budget spent", error="Traceback:\n  boom")
    running = still.view.job("digits")
    still.do(lambda: still.view.end(running, "failed", "restart budget spent", spend=spend, outcome=outcome))
    still.do(still.view.refresh)
    text = ctl(still, "describe", "digits").stdout
    assert "Why:         restart budget spent" in text
    assert "Blamed for the end of generation 1 (the job was not started again):\n  rank 3 on n2 failed first" in text
    assert "      boom" in text
    assert "nodeagentctl logs digits --generation 1 --rank 3" in text
    assert "Budget:      1 of 10 restarts spent within 1h; 9 left" in text
    assert ctl(still, "describe", "job/digits", "-o", "json").exit_code == 0
    node = ctl(still, "describe", "n3").stdout
    assert node.startswith("Node:        n3\nState:       ready")


def test_a_rank_that_does_not_exist_is_named(agent: LiveAgent) -> None:
    started(agent)
    result = ctl(agent, "logs", "digits", "--rank", "9")
    assert result.exit_code == 3
    assert "generation 1 of job 'digits' has no rank 9: it has ranks 0 to 3" in result.stderr
    silent = ctl(agent, "logs", "digits", "--rank", "3")
    assert (silent.exit_code, silent.stdout) == (0, "")
    assert "nothing is kept of what rank 3 wrote" in silent.stderr


def test_a_generation_that_does_not_exist_is_named(agent: LiveAgent) -> None:
    started(agent)
    result = ctl(agent, "logs", "digits", "--generation", "9")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "job 'digits' has no generation 9: it has had generation 1 only" in result.stderr
    assert ctl(agent, "logs", "digits", "--generation", "1").exit_code == 0


def test_a_job_that_runs_is_not_resumed(agent: LiveAgent) -> None:
    started(agent)
    result = ctl(agent, "resume", "digits")
    assert (result.exit_code, result.stdout) == (0, "job/digits runs already: there was nothing to resume\n")


def test_events_in_lines_and_json(agent: LiveAgent) -> None:
    started(agent)
    lines = ctl(agent, "events").stdout.splitlines()
    assert lines[0].split() == ["TIME", "KIND", "ABOUT", "AND", "WHY"]
    assert any("JobSubmitted" in line and "job/digits" in line for line in lines)
    items = json.loads(ctl(agent, "events", "-o", "json", "--job", "digits").stdout)["items"]
    assert {e["job"] for e in items} == {"digits"}


def test_what_is_asked_for_and_what_is_done_are_two_kinds_of_events(agent: LiveAgent) -> None:
    started(agent)
    for verb in ("pause", "stop", "delete"):
        assert ctl(agent, verb, "digits").exit_code == 0
    items = json.loads(ctl(agent, "events", "-o", "json").stdout)["items"]
    kinds = [e["kind"] for e in items if e["kind"].startswith(("JobPaus", "JobStop", "JobDelet"))]
    once = ["JobStopRequested", "JobStopped", "JobDeleteRequested", "JobDeleted"]
    assert (kinds[0], kinds.count("JobPaused"), kinds[-4:]) == ("JobPauseRequested", 1, once)
    requested, deleted = items[-2:]
    assert requested["by"] == deleted["by"] != "", "who asked for it"


def test_run_detached(agent: LiveAgent) -> None:
    result = ctl(agent, "run", "--name", "bg", "--detach", "--", "true")
    assert (result.exit_code, result.stdout) == (0, "job/bg\n")
    assert agent.view.job("bg").spec.role.command == ("true",)


def test_the_tool_as_a_process(agent: LiveAgent) -> None:
    started(agent)
    command = [sys.executable, "-c", "from nodeagent.ctl.main import main; main()"]
    env = os.environ | {"NODEAGENTCTL_AGENT": agent.socket}
    got = subprocess.run([*command, "get"], env=env, capture_output=True, text=True, timeout=30)
    assert (got.returncode, got.stdout.split()[7]) == (0, "digits")
    head = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c 'from nodeagent.ctl.main import main; main()' events | head -n 1"],
        env=env, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (head.returncode, head.stderr) == (0, "")


def test_an_agent_that_has_not_joined_does_not_say_that_there_is_nothing(still: LiveAgent) -> None:
    """It has only just started: no job is unknown because of that, and nobody has to start an agent."""
    still.submit(spec())
    known, still.view.me = still.view.me, lambda: None  # type: ignore[method-assign]
    result = ctl(still, "get", "digits")
    assert result.exit_code == 5
    text, step = result.stderr.splitlines()
    assert "node n1 has not joined its cluster: it has only just started" in text
    assert step == "  next: ask again in a moment, or see its log"
    client = Client([still.socket], patience=5.0)
    back = threading.Timer(0.5, lambda: setattr(still.view, "me", known))
    back.start()
    assert client.get("/v1/jobs/digits")["name"] == "digits"
    back.join()


@pytest.mark.parametrize("verb", ["stop", "delete"])
def test_what_cannot_be_taken_back_needs_a_name(agent: LiveAgent, verb: str) -> None:
    """Others act on the only live job: it may be somebody else's, or not the one that was meant."""
    started(agent)
    refused = ctl(agent, verb)
    assert refused.exit_code == 2
    assert f"{verb} needs the name of a job; nothing was changed" in refused.stderr
    assert "live jobs: digits" in refused.stderr
    assert [j.control.rev for j in agent.view.cluster().jobs.values()] == [1]
    assert ctl(agent, verb, "--job", "digits").exit_code == 0
