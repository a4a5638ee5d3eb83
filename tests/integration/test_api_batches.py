"""Jobs that are submitted together, over the agent's socket: all or none, by name, as an array, and ended as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nodeagent.ctl import submit as tool
from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from nodeagent.model.job import Outcome, Phase
from tests.unit.api.fakes import LiveAgent, live_agent, spec

PREPARE = "name: prepare\ncommand: [python, p.py]\nnodes: 1\n"
TRAIN = "name: train\ncommand: [python, t.py]\nnodes: 1\nafter: prepare\n"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, obeys=False, allow_root=True) as started:
        yield started


def ctl(agent: LiveAgent, *words: str, given: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words], input=given)


def end(agent: LiveAgent, name: str, phase: Phase) -> None:
    async def work() -> None:
        await agent.view.end(agent.view.job(name), phase, "by hand", outcome=Outcome(code=0, text="by hand"))
        await agent.view.refresh()

    agent.do(work)


def test_all_jobs_of_a_file_and_who_comes_after_whom(agent: LiveAgent) -> None:
    result = ctl(agent, "submit", "-", given=f"{TRAIN}---\n{PREPARE}")
    assert (result.exit_code, result.stderr) == (0, "")
    train, prepare = agent.view.job("train"), agent.view.job("prepare")
    assert result.stdout == f"job/train submitted (uid {train.uid})\njob/prepare submitted (uid {prepare.uid})\n"
    (after,) = train.spec.after
    assert (after.uid, after.name, after.need, after.array) == (prepare.uid, "prepare", "ok", 0)
    assert agent.view.seal.admits(train) and agent.view.seal.controls(train)
    assert train.spec.submitter.user == prepare.spec.submitter.user


def test_it_says_once_of_all_members_that_no_known_nodes_will_do(agent: LiveAgent) -> None:
    text = f"{PREPARE}---\n{TRAIN}array: 0-2\nplacement: {{require: {{gpu: h100}}}}\n"
    why = "until nodes come that will do: needs 1 node with gpu=h100: none of the 3 known nodes is such\n"
    for dry, who in ((["--dry-run"], "job/train waits"), ([], "job/train-0 and 2 more wait")):
        done = ctl(agent, "submit", "-", *dry, given=text)
        assert done.exit_code == 0, done.stderr
        assert f"{who} {why}" in done.stderr
        assert done.stderr.count("until nodes come") == 1


def test_the_same_request_again_is_the_same_jobs(agent: LiveAgent) -> None:
    words, text = ("submit", "-", "--request-id", "r1"), f"{TRAIN}array: 0-2\n---\n{PREPARE}"
    first = ctl(agent, *words, given=text)
    end(agent, "prepare", "stopped")
    assert ctl(agent, *words, given=text).stdout == first.stdout, "although it would be refused by now"
    assert len(agent.view.cluster().jobs) == 4
    assert len(first.stdout.splitlines()) == 4


def test_a_request_id_of_another_change_is_refused(agent: LiveAgent) -> None:
    agent.submit(spec("digits"))  # its request is r-digits
    assert ctl(agent, "scale", "3", "--job", "digits", "--request-id", "r1", "--no-wait").exit_code == 0
    for request in ("r1", "r-digits"):
        refused = ctl(agent, "submit", "-", "--request-id", request, given=f"{TRAIN}---\n{PREPARE}")
        assert refused.exit_code == 6
        assert f"the request id '{request}' was used for another change before" in refused.stderr
    assert len(agent.view.cluster().jobs) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TRAIN, "no job 'prepare'"),
        (f"{PREPARE}---\nname: taken\ncommand: [a]\nnodes: 1\n", "a job named taken is live"),
        (f"{PREPARE}array: 0-3\n---\nname: taken\ncommand: [a]\nnodes: 1\narray: 0-3\n", "a job named taken is live"),
        (f"name: x\ncommand: [a]\nnodes: 1\n---\n{TRAIN}", "no job 'prepare'"),
    ],
)
def test_one_that_is_refused_keeps_all_out(agent: LiveAgent, text: str, words: str) -> None:
    agent.submit(spec("taken"))
    result = ctl(agent, "submit", "-", given=text)
    assert result.exit_code != 0
    assert words in result.stderr
    assert [job.name for job in agent.view.cluster().jobs.values()] == ["taken"]


def test_after_a_job_that_has_ended(agent: LiveAgent) -> None:
    agent.submit(spec("prepare"))
    end(agent, "prepare", "stopped")
    refused = ctl(agent, "submit", "-", given=TRAIN)
    assert refused.exit_code == 6
    assert "job 'train' could never run: it comes after prepare, which has stopped" in refused.stderr
    assert "after:" not in refused.stdout
    result = ctl(agent, "submit", "-", "--after", "prepare:any", given=TRAIN.replace("after: prepare\n", ""))
    assert result.exit_code == 0, result.stderr
    train = agent.view.job("train")
    assert train.control.met == (train.spec.after[0].uid,)
    assert agent.view.seal.controls(train)


def test_a_name_is_not_the_beginning_of_a_uid(agent: LiveAgent) -> None:
    agent.submit(spec("xy"))  # its uid is uid-xy
    refused = ctl(agent, "submit", "-", given=TRAIN.replace("prepare", "uid-x"))
    assert "no job 'uid-x'" in refused.stderr
    assert ctl(agent, "submit", "-", given=TRAIN.replace("prepare", "uid-xy")).exit_code == 0


def test_a_name_is_free_when_the_end_of_its_last_job_is_noted(
    agent: LiveAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "STOPPING_WAIT", 0.0)
    ctl(agent, "submit", "-", given=f"{PREPARE}---\n{TRAIN}")
    end(agent, "prepare", "stopped")
    refused = ctl(agent, "submit", "-", given=PREPARE)
    assert "another job waits for the job named prepare" in refused.stderr
    refused = ctl(agent, "submit", "-", given=f"{PREPARE}---\nname: more\ncommand: [a]\nnodes: 1\n")
    assert "another job waits for the job named prepare" in refused.stderr
    end(agent, "train", "failed")
    assert ctl(agent, "submit", "-", given=PREPARE).exit_code == 0


def test_an_array(agent: LiveAgent) -> None:
    text = f"{PREPARE}---\nname: sweep\ncommand: [a]\nnodes: 1\nafter: prepare\narray: 1-5:2%2\n"
    text += "---\nname: collect\ncommand: [a]\nnodes: 1\nafter: {sweep: any}\n"
    result = ctl(agent, "submit", "-", given=text)
    assert result.exit_code == 0, result.stderr
    members = [agent.view.job(f"sweep-{i}") for i in (1, 3, 5)]
    arrays = [job.spec.array for job in members if job.spec.array is not None]
    assert [(a.index, a.count, a.first, a.last, a.at_once) for a in arrays] == [(i, 3, 1, 5, 2) for i in (1, 3, 5)]
    assert len({job.uid for job in members}) == 3
    assert len({a.id for a in arrays}) == 1
    (after,) = agent.view.job("collect").spec.after
    assert (after.uid, after.need, after.array) == (arrays[0].id, "any", 3)
    alone = ctl(agent, "submit", "-", given="name: sweep\ncommand: [a]\nnodes: 1\n")
    assert "an array named 'sweep' has live jobs" in alone.stderr
    again = ctl(agent, "submit", "-", "--array", "0-1", given="name: sweep\ncommand: [a]\nnodes: 1\n")
    assert again.exit_code == 6
    assert "an array named 'sweep' has live jobs" in again.stderr
    both = ctl(agent, "submit", "-", given="name: both\ncommand: [a]\nnodes: 1\nafter: {sweep: ok, sweep-1: any}\n")
    assert both.exit_code == 0, both.stderr
    assert len({one.uid for one in agent.view.job("both").spec.after}) == 2, "the array is not its first job"
    later = ctl(agent, "submit", "-", "--after", "sweep", given="name: later\ncommand: [a]\nnodes: 1\n")
    assert later.exit_code == 0, later.stderr
    assert agent.view.job("later").spec.after[0].uid == arrays[0].id


def test_after_an_array_of_which_some_jobs_are_not_listed_any_more(agent: LiveAgent) -> None:
    ctl(agent, "submit", "-", "--array", "0-1", given=PREPARE)
    for i in range(2):
        end(agent, f"prepare-{i}", "stopped")
    assert ctl(agent, "delete", "prepare-0", "--no-wait").exit_code == 0
    agent.do(lambda: agent.view.store.remove(agent.view.job("prepare-0").uid))
    agent.do(agent.view.refresh)
    refused = ctl(agent, "submit", "-", given=TRAIN)
    assert refused.exit_code == 6
    assert "of array prepare 1 of 2 jobs are listed" in refused.stderr
    assert ctl(agent, "submit", "-", given=TRAIN.replace("prepare", "{prepare: any}")).exit_code == 0


def test_an_array_is_one_line_and_its_jobs_are_seen_by_its_name(agent: LiveAgent) -> None:
    ctl(agent, "submit", "-", "--array", "0-2", given=PREPARE)
    assert ctl(agent, "get").stdout.splitlines()[1].split()[:3] == ["prepare[0-2]", "3", "QUEUED"]
    for words in (["get", "-o", "name"], ["get", "prepare", "-o", "name"]):
        assert ctl(agent, *words).stdout.split() == ["job/prepare-0", "job/prepare-1", "job/prepare-2"]
    assert len(ctl(agent, "get", "-o", "wide").stdout.splitlines()) == 4
    for name in ("prepare", "job/prepare"):
        described = ctl(agent, "describe", name)
        assert described.exit_code == 3
        assert "'prepare' is an array of 3 jobs" in described.stderr


def test_an_array_is_stopped_and_deleted_as_one(tmp_path: Path) -> None:
    with live_agent(tmp_path, allow_root=True) as agent:
        ctl(agent, "submit", "-", "--array", "0-1", given=PREPARE)
        shown = Client([agent.socket]).get("/v1/arrays/prepare")
        assert (shown["count"], shown["first"], shown["last"], sum(shown["phases"].values())) == (2, 0, 1, 2)
        stopped = ctl(agent, "stop", "prepare")
        assert (stopped.exit_code, stopped.stdout) == (0, "array/prepare stopped: 2 jobs\n"), stopped.stderr
        assert {job.phase for job in agent.view.cluster().jobs.values()} == {"stopped"}
        deleted = ctl(agent, "delete", "prepare")
        assert (deleted.exit_code, deleted.stdout) == (0, "array/prepare deleted: 2 jobs\n"), deleted.stderr
        assert not agent.view.cluster().jobs
        assert ctl(agent, "stop", "prepare").exit_code == 3


def test_a_dry_run_says_whose_name_is_taken(agent: LiveAgent) -> None:
    """Of several jobs, and of an array's, only the submit itself did."""
    agent.submit(spec("taken-3"))
    for text in (f"{PREPARE}---\nname: taken-3\ncommand: [a]\nnodes: 1\n", PREPARE.replace("prepare", "taken")):
        array = () if "---" in text else ("--array", "0-3")
        refused = ctl(agent, "submit", "-", "--dry-run", *array, given=text)
        assert refused.exit_code == 6
        assert "a job named taken-3 is live (uid uid-taken-3, queued)" in refused.stderr
    assert [job.name for job in agent.view.cluster().jobs.values()] == ["taken-3"]


def test_a_dry_run_changes_nothing(agent: LiveAgent) -> None:
    result = ctl(agent, "submit", "-", "--dry-run", "--array", "0-9", given=PREPARE)
    assert result.exit_code == 0
    assert "job/prepare would be submitted, 10 times (dry run)" in result.stderr
    assert not agent.view.cluster().jobs


def test_validate_tells_all(tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(cli, ["validate", "-"], input=f"{TRAIN}---\n{PREPARE}")
    assert (good.exit_code, good.stdout) == (0, "-: job/train\n-: job/prepare\n-: 2 valid jobs\n")
    bad = runner.invoke(cli, ["validate", "-"], input=f"{TRAIN}nod: 1\n---\n{PREPARE}grace: x\n")
    assert bad.exit_code == 2
    assert "<stdin>:5:1: unknown key 'nod'" in bad.stderr
    assert "<stdin>:10:8: grace: 'x' is not a duration" in bad.stderr
