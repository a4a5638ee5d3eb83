"""The Ansible collection against bare nodes: from nothing to a training cluster with Sentinel, upgrades and rollbacks
under load, a node that cannot be reached, one more node, and the end of all of it."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from release import bundle, wheels
from tests.integration.redis_support import Authority
from tests.nodes.image import python_version
from tests.nodes.lab import Lab, lab
from tests.nodes.lab import why_not as no_lab
from tests.nodes.rollout import SECRETS, Rollout, why_not
from tests.nodes.times import record_time, since

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1200)]

NODES = ("n1", "n2", "n3", "n4")
STORES = NODES[:3]
MORE = "n5"
CTL = "/opt/nodeagent/bin/nodeagentctl"
LEFT = ("/opt/nodeagent", "/etc/nodeagent", "/var/lib/nodeagent", "/var/log/nodeagent", "/run/nodeagent",
        "/etc/systemd/system/nodeagent.service", "/var/cache/nodeagent", "/usr/local/bin/nodeagentctl")  # fmt: skip
COUNTING = "while :; do echo $NODEAGENT_GENERATION $$ >>/shared/steps-$RANK; sleep 0.1; done"


@pytest.fixture(scope="module")
def bare() -> Iterator[Lab]:
    """Five machines with systemd, sshd and Redis' packages, four of them up."""
    if problem := no_lab() or why_not():
        pytest.skip(problem)
    with lab() as one:
        for name in (*NODES, MORE):
            one.add(name, [])
        one.boot(*NODES)
        yield one


@pytest.fixture(scope="module")
def bundles(bare: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two releases."""
    out = tmp_path_factory.mktemp("release")
    wheel = wheels.build(out)
    bundle.lay_out(wheel, [python_version(bare.base)], "x86_64", out / "old")
    shutil.copytree(out / "old", out / "new")
    with zipfile.ZipFile(out / "new/wheels" / wheel.name, "a") as archive:
        archive.comment = b"another build"
    for name in ("old", "new"):
        bundle.pack(out / name, out / f"{name}.tar.gz")
    return out / "old.tar.gz", out / "new.tar.gz"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of Redis' certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


def issue(one: Lab, authority: Authority) -> tuple[Path, Path]:
    """A certificate for Redis, in the place of the one before, and its key."""
    addresses = ("127.0.0.1", *(one.nodes[name].address for name in STORES))
    return authority.issue("redis", ",".join(f"IP:{address}" for address in addresses))


@pytest.fixture(scope="module")
def rollout(
    bare: Lab, authority: Authority, bundles: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Rollout:
    """The operator's folder."""
    one = Rollout(bare, tmp_path_factory.mktemp("operator"), bundles[0])
    cert, key = issue(bare, authority)
    one.variables["redis_tls"] = {"cert": str(cert), "key": str(key), "ca": str(authority.ca)}
    one.variables["nodeagent_redis_ca_file"] = str(authority.ca)
    sentinels = ",".join(f"{bare.nodes[name].address}:26379" for name in STORES)
    one.variables["nodeagent_redis_url"] = f"rediss+sentinel://nodeagent@{sentinels}/nodeagent/0"
    one.inventory({"redis": STORES, "nodeagent": NODES})
    return one


def ask(one: Lab, *words: str, node: str = "n1") -> Any:
    return json.loads(one.nodes[node].run(CTL, *words, "-o", "json").stdout)


def until(true: Callable[[], bool], what: str, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, f"not within {limit:g} s: {what}"
        time.sleep(0.2)


def states(one: Lab) -> dict[str, str]:
    return {node["name"]: node["state"] for node in ask(one, "nodes")["items"]}


def versions(one: Lab) -> set[str]:
    return {one.nodes[name].run("readlink", "/opt/nodeagent/bin").stdout.strip() for name in NODES}


def running(one: Lab) -> set[str]:
    """As ``versions``, of the agents that run."""
    show = "tr '\\0' '\\n' </proc/$(systemctl show -P MainPID nodeagent)/cmdline"
    programs = {Path(one.nodes[name].run("sh", "-c", show).stdout.splitlines()[0]) for name in NODES}
    return {str(program.parent.relative_to("/opt/nodeagent")) for program in programs}


def workers(one: Lab) -> dict[int, int]:
    return {w["rank"]: w["pid"] for pod in ask(one, "get", "count")["pods"] for w in pod["workers"]}


def count(one: Lab) -> None:
    """A job on all nodes that there are, if it does not run yet."""
    if "job/count" not in one.nodes["n1"].run(CTL, "get", "-o", "name").stdout:
        command = (CTL, "run", "--detach", "--name", "count", "--nodes", "1:5", "--", "sh", "-c", COUNTING)
        one.nodes["n1"].run(*command, user="train")
    until(lambda: len(workers(one)) == len(NODES), "a worker runs on each")


def steps(one: Lab, rank: int) -> list[str]:
    return (one.shared / f"steps-{rank}").read_text().splitlines()


def redis(one: Lab, node: str, *words: str, tls: bool = True, user: str = "default", password: str = "") -> str:
    """What a store's server answers, asked from n4, which has none."""
    address = one.nodes[node].address
    options = ["--tls", "--cacert", "/etc/nodeagent/redis-ca.pem"] if tls else []
    login = [f"REDISCLI_AUTH={password}", "redis-cli", "--user", user] if password else ["redis-cli"]
    done = one.nodes["n4"].run("env", *login, *options, "--no-auth-warning", "-h", address, *words, check=False)
    return done.stdout + done.stderr


def roles(one: Lab) -> dict[str, str]:
    """Store to what it is, in its server's words."""
    admin = SECRETS["redis_admin_password"]
    return {name: redis(one, name, "ROLE", password=admin).partition("\n")[0] for name in STORES}


def test_a_dry_run_changes_nothing(bare: Lab, rollout: Rollout) -> None:
    play = rollout.play("site", "--check")
    assert play.code == 0, play.text
    for name in NODES:
        bare.nodes[name].run("sh", "-c", "! ls -d " + " ".join(LEFT[:3]))


def test_from_nothing_and_again(bare: Lab, rollout: Rollout) -> None:
    started = time.monotonic()
    play = rollout.play("site")
    took = since(started)
    assert play.code == 0, play.text
    assert states(bare) == dict.fromkeys(NODES, "ready")
    found = json.loads(bare.nodes["n1"].run(CTL, "doctor", "-o", "json", check=False).stdout)
    assert [item for item in found["items"] if item["severity"] == "error"] == []
    started = time.monotonic()
    again = rollout.play("site")
    took_again = since(started)
    assert (again.code, again.changed) == (0, 0), again.text
    assert "agents-secret" not in play.text + again.text
    record_time("Ansible, four nodes and Redis with Sentinel on three, from nothing", "", took)
    record_time("the same once more: `changed=0`", "", took_again)


def test_redis_takes_only_tls_and_only_what_its_users_may(bare: Lab) -> None:
    assert sorted(roles(bare).values()) == ["master", "slave", "slave"]
    for name in STORES:
        assert "PONG" in redis(bare, name, "PING", password=SECRETS["redis_admin_password"])
        assert "PONG" not in redis(bare, name, "PING", tls=False, password=SECRETS["redis_admin_password"])
        assert "NOAUTH" in redis(bare, name, "PING")
        for words in (("CONFIG", "SET", "appendonly", "no"), ("GET", "other"), ("FLUSHALL",)):
            answer = redis(bare, name, *words, user="nodeagent", password=SECRETS["redis_password"])
            assert "NOPERM" in answer, answer


def test_a_later_run_leaves_the_primary_where_sentinel_has_put_it(bare: Lab, rollout: Rollout) -> None:
    (before,) = (name for name, role in roles(bare).items() if role == "master")

    def sentinel(word: str, user: str = "default", password: str = "") -> str:
        words = ("-p", "26379", "SENTINEL", word, "nodeagent")
        return redis(bare, before, *words, user=user, password=password).strip()

    admin = SECRETS["redis_admin_password"]
    quorum = sentinel("CKQUORUM", password=admin)
    assert quorum.startswith("OK 3 usable Sentinels"), quorum
    assert "NOAUTH" in sentinel("FAILOVER")
    assert "NOPERM" in sentinel("FAILOVER", user="nodeagent", password=SECRETS["redis_password"])
    assert sentinel("FAILOVER", password=admin) == "OK"
    until(lambda: roles(bare)[before] == "slave" and "master" in roles(bare).values(), "another store is the primary")
    after = roles(bare)
    rollout.inventory({"redis": STORES})
    again = rollout.play("site")
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    assert (again.code, again.changed) == (0, 0), again.text
    assert roles(bare) == after
    until(lambda: states(bare) == dict.fromkeys(NODES, "ready"), "the agents have followed")


def test_a_renewed_certificate_is_what_servers_and_sentinels_show(
    bare: Lab, rollout: Rollout, authority: Authority
) -> None:
    """Sentinels went on with the one that they had loaded, until it lapsed."""
    cert, _ = issue(bare, authority)
    rollout.inventory({"redis": STORES})
    play = rollout.play("site")
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    assert play.code == 0, play.text
    for name in STORES:
        for port in (6379, 26379):
            peer = f"{bare.nodes[name].address}:{port}"
            shown = bare.nodes["n4"].run("openssl", "s_client", "-connect", peer, check=False).stdout
            assert cert.read_text() in shown, (peer, shown)
    until(lambda: sorted(roles(bare).values()) == ["master", "slave", "slave"], "one store is the primary")
    until(lambda: states(bare) == dict.fromkeys(NODES, "ready"), "the agents are back")


def test_redis_keeps_the_tls_that_its_sentinels_have(bare: Lab, rollout: Rollout) -> None:
    """The servers went over to the other, and all sentinels and agents lost them."""
    before, tls = roles(bare), rollout.variables.pop("redis_tls")
    rollout.inventory({"redis": STORES})
    try:
        play = rollout.play("site")
    finally:
        rollout.variables["redis_tls"] = tls
        rollout.inventory({"redis": STORES, "nodeagent": NODES})
    assert play.code != 0
    assert play.changed == 0, play.text
    assert "put redis_tls back as it was" in " ".join(play.text.split()), play.text
    assert roles(bare) == before


def test_upgrade_and_rollback_under_load(bare: Lab, rollout: Rollout, bundles: tuple[Path, Path]) -> None:
    count(bare)
    before, old = workers(bare), versions(bare)
    rollout.variables["nodeagent_bundle"] = str(bundles[1])
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    started = time.monotonic()
    play = rollout.play("agents")
    took = since(started)
    assert play.code == 0, play.text
    new = versions(bare)
    assert len(new) == 1
    assert new != old
    assert workers(bare) == before
    back = rollout.play("rollback")
    assert back.code == 0, back.text
    assert versions(bare) == old
    assert workers(bare) == before
    job = ask(bare, "get", "count")
    assert (job["generation"], job["phase"]) == (1, "running")
    assert {line.split()[0] for line in steps(bare, 0)} == {"1"}
    record_time("Ansible, upgrade of four nodes, one after the other", "same processes before and after", took)


def test_an_upgrade_that_stopped_halfway_is_completed_and_undone(
    bare: Lab, rollout: Rollout, bundles: tuple[Path, Path]
) -> None:
    """Agents whose neighbour had failed kept the old version, and no later run restarted them. A rollback took those
    forward that were back already."""
    count(bare)
    before, old = workers(bare), versions(bare)
    rollout.variables["nodeagent_bundle"] = str(bundles[1])
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    password = "/etc/nodeagent/redis.password"
    bare.nodes["n4"].run("sh", "-c", f"mv {password} {password}.away && mkdir {password}")  # it cannot be written
    stopped = rollout.play("agents", nodeagent_serial="100%")
    bare.nodes["n4"].run("sh", "-c", f"rmdir {password} && mv {password}.away {password}")
    assert stopped.code != 0, stopped.text
    assert versions(bare) != old, "switched to"
    assert running(bare) == old, "and started nowhere"
    play = rollout.play("agents")
    assert play.code == 0, play.text
    new = versions(bare)
    assert running(bare) == new != old, play.text
    for limit in ("n1", "n1,n2,n3,n4"):
        back = rollout.play("rollback", "--limit", limit)
        assert back.code == 0, back.text
    assert versions(bare) == running(bare) == old, back.text
    again = rollout.play("rollback")
    assert (again.code, again.changed) == (0, 0), again.text
    assert workers(bare) == before


@pytest.mark.parametrize("stopped_before", [False, True])
def test_a_version_that_does_not_start_is_left_again(
    bare: Lab, rollout: Rollout, bundles: tuple[Path, Path], tmp_path: Path, stopped_before: bool
) -> None:
    """The first node of a roll-out stayed without an agent; so it did in a run that completed one which had stopped
    between installing and restarting."""
    count(bare)
    before, old = workers(bare), versions(bare)
    folder = shutil.copytree(bundles[0].with_name("old"), tmp_path / "broken")
    with zipfile.ZipFile(next(folder.glob("wheels/nodeagent-*.whl")), "a") as archive:
        archive.writestr("broken.pth", "import os, sys; 'run' in sys.orig_argv and os._exit(1)\n")
    bundle.pack(folder, tmp_path / "broken.tar.gz")
    if stopped_before:
        shutil.copytree(folder, bare.shared / "broken")
        bare.nodes["n1"].run("sh", "/shared/broken/setup.sh", "install", "--no-restart", limit=180)
    rollout.variables["nodeagent_bundle"] = str(tmp_path / "broken.tar.gz")
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    try:
        play = rollout.play("agents")
    finally:
        rollout.variables["nodeagent_bundle"] = str(bundles[0])
        rollout.inventory({"redis": STORES, "nodeagent": NODES})
    assert play.code != 0, play.text
    assert f"back to {Path(*old).parent.name}" in " ".join(play.text.split()), play.text
    assert versions(bare) == old
    active = ("systemctl", "is-active", "nodeagent")
    until(lambda: all(bare.nodes[n].run(*active, check=False).stdout == "active\n" for n in NODES), "every agent runs")
    assert running(bare) == old
    assert workers(bare) == before


def test_one_node_cannot_be_reached(bare: Lab, rollout: Rollout) -> None:
    """The others get the new config; the job's worker there is nobody's affair."""
    rollout.variables["nodeagent_labels"] = {"rack": "r1"}
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    bare.nodes["n3"].run("sh", "-c", "systemctl stop ssh; pkill sshd || true")  # connections that are kept, too
    play = rollout.play("agents")
    assert play.code != 0
    assert "n3 could not be reached, and is as it was" in play.text
    assert all(play.hosts[name]["failed"] == 0 for name in NODES if name != "n3"), play.text
    for name in NODES:
        text = bare.nodes[name].run("cat", "/etc/nodeagent/nodeagent.yaml").stdout
        assert ("rack: r1" in text) == (name != "n3")
    bare.nodes["n3"].run("systemctl", "start", "ssh")
    assert rollout.play("agents", "--limit", "n3").code == 0


def test_another_password_of_redis_disturbs_no_training(bare: Lab, rollout: Rollout) -> None:
    """Agents come one after the other: until all have the new one the former is good too, at the sentinels as well."""
    former, new = SECRETS["redis_password"], "agents-other-secret"
    count(bare)
    before, job = workers(bare), ask(bare, "get", "count")
    rollout.variables["redis_password"] = new
    rollout.inventory({"redis": STORES})
    alone = rollout.play("site")
    assert alone.code == 0, alone.text
    for password in (former, new):
        for words in (("PING",), ("-p", "26379", "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "nodeagent")):
            answers = [redis(bare, name, *words, user="nodeagent", password=password) for name in STORES]
            assert all("PONG" in answer or "6379" in answer for answer in answers), answers
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    play = rollout.play("site")
    assert play.code == 0, play.text
    assert new not in play.text
    for port in ("6379", "26379"):
        ping = ("-p", port, "PING")
        answers = [redis(bare, name, *ping, user="nodeagent", password=former) for name in STORES]
        assert all("WRONGPASS" in answer for answer in answers), answers
    assert "PONG" in redis(bare, "n1", "PING", user="nodeagent", password=new)
    assert states(bare) == dict.fromkeys(NODES, "ready")
    after = ask(bare, "get", "count")
    assert [after[key] for key in ("generation", "restarts", "phase")] == [
        job[key] for key in ("generation", "restarts", "phase")
    ]
    assert workers(bare) == before
    again = rollout.play("site")
    assert (again.code, again.changed) == (0, 0), again.text


def test_a_wrong_password_of_redis_stops_the_play_and_nothing_else(bare: Lab, rollout: Rollout) -> None:
    """Found by strangers: the agent was restarted with it, and the play hung without a word."""
    count(bare)
    before, job = workers(bare), ask(bare, "get", "count")
    agents = [bare.nodes[name].run("systemctl", "show", "-P", "MainPID", "nodeagent").stdout for name in NODES]
    right = rollout.variables["redis_password"]
    rollout.variables["nodeagent_redis_password"] = "a-guess"
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    try:
        play = rollout.play("agents")
    finally:
        rollout.variables["nodeagent_redis_password"] = "{{ redis_password }}"
        rollout.inventory({"redis": STORES, "nodeagent": NODES})
    assert play.code != 0
    output = " ".join(play.text.split())
    assert "n1 cannot use the store with this inventory: " in output and "Nothing of what runs was changed" in output, (
        output
    )
    assert "password" in output and "a-guess" not in output
    assert sum(play.hosts[name]["failed"] for name in NODES if name in play.hosts) == 1, "the play stopped at the first"
    assert agents == [bare.nodes[name].run("systemctl", "show", "-P", "MainPID", "nodeagent").stdout for name in NODES]
    assert bare.nodes["n1"].run("cat", "/etc/nodeagent/redis.password").stdout == right
    bare.nodes["n1"].run("test", "!", "-e", "/etc/nodeagent/.drafts")
    assert states(bare) == dict.fromkeys(NODES, "ready")
    assert (workers(bare), ask(bare, "get", "count")["generation"]) == (before, job["generation"])
    again = rollout.play("agents")
    assert (again.code, again.changed) == (0, 0), again.text


def test_the_clusters_ca_signs_each_nodes_certificate(bare: Lab, rollout: Rollout) -> None:
    count(bare)
    before = workers(bare)
    (folder := rollout.folder / "agents-ca").mkdir()
    authority = Authority(folder)
    rollout.variables["nodeagent_api_ca_file"] = str(authority.ca)
    rollout.variables["nodeagent_api_ca_key_file"] = str(folder / "ca.key")
    rollout.inventory({"redis": STORES, "nodeagent": NODES})
    play = rollout.play("agents")
    assert play.code == 0, play.text
    assert "PRIVATE KEY" not in play.text
    for name in NODES:
        address = bare.nodes[name].address
        words = ("-connect", f"{address}:9470", "-CAfile", "/etc/nodeagent/api-ca.pem", "-verify_return_error")
        done = bare.nodes["n1"].run("openssl", "s_client", *words, "-verify_ip", address, check=False)
        assert "Verify return code: 0 (ok)" in done.stdout, done.stdout + done.stderr
        assert bare.nodes[name].run("stat", "-c", "%a %U", "/etc/nodeagent/api-key.pem").stdout == "600 root\n"
    assert workers(bare) == before
    again = rollout.play("agents")
    assert (again.code, again.changed) == (0, 0), again.text
    bare.nodes["n2"].run("cp", "/etc/nodeagent/redis-ca.pem", "/etc/nodeagent/api-ca.pem")  # as if it were another CA
    repaired = rollout.play("agents", "--limit", "n2")
    assert repaired.code == 0, repaired.text


def test_one_more_node_joins_the_running_job(bare: Lab, rollout: Rollout) -> None:
    count(bare)
    bare.boot(MORE)
    rollout.inventory({"redis": STORES, "nodeagent": (*NODES, MORE)})
    started = time.monotonic()
    play = rollout.play("agents")
    assert play.code == 0, play.text
    until(lambda: len(workers(bare)) == len(NODES) + 1, "the job has grown to the new node", 90)
    record_time("Ansible, a fifth node beside four, until it trains", "grown", since(started))


def test_removal_drains_and_a_purge_leaves_nothing(bare: Lab, rollout: Rollout) -> None:
    refused = bare.nodes[MORE].run("/opt/nodeagent/setup", "remove", check=False)
    assert refused.returncode == 6, refused.stderr
    rollout.inventory({"nodeagent": (*NODES, MORE)})
    play = rollout.play("remove", "--limit", MORE, nodeagent_purge="true")
    assert play.code == 0, play.text
    bare.nodes[MORE].run("sh", "-c", "! ls -d " + " ".join(LEFT))
    assert sorted(states(bare)) == sorted(NODES), "nor is it listed"
    until(
        lambda: ask(bare, "get", "count")["phase"] == "running" and len(workers(bare)) == len(NODES), "the job goes on"
    )
    again = rollout.play("remove", "--limit", MORE, nodeagent_purge="true")
    assert (again.code, again.changed) == (0, 0), again.text


def test_a_node_that_was_removed_comes_back_and_takes_work(bare: Lab, rollout: Rollout) -> None:
    """Whether the cluster forgot it, or nobody was there to say so."""
    rollout.inventory({"redis": STORES, "nodeagent": (*NODES, MORE)})
    for forgotten in (True, False):
        play = rollout.play("agents", "--limit", MORE)
        assert play.code == 0, play.text
        until(lambda: states(bare)[MORE] == "ready", "it takes work")
        until(lambda: len(workers(bare)) == len(NODES) + 1, "the job has grown to it again", 90)
        if forgotten:
            rollout.inventory({"nodeagent": [MORE]})
            alone = rollout.play("remove")
            assert alone.code == 0, alone.text
            assert f"nodeagentctl forget {MORE}" in alone.text
            assert states(bare)[MORE] == "left"
            rollout.inventory({"redis": STORES, "nodeagent": (*NODES, MORE)})


def test_lint(rollout: Rollout) -> None:
    """By the profile for what is shipped."""
    assert (done := rollout.lint()).returncode == 0, done.stdout + done.stderr
