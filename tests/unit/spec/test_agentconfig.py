"""The agent's config: defaults, overrides, mistakes, and the files around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.model.timing import Timing
from nodeagent.spec import configfile
from nodeagent.spec.agentconfig import AgentConfig, default_dirs, ephemeral_clash, name_of_host
from nodeagent.spec.configfile import default_config_path, load_config, parse_config
from nodeagent.spec.errors import CheckError
from nodeagent.spec.healthconfig import CheckConfig, PreflightConfig
from nodeagent.spec.sections import SubmitConfig
from nodeagent.spec.storeconfig import RedisConfig
from tests.unit.spec.helpers import check_marked, problems

SAMPLE = Path(__file__).parents[3] / "config" / "nodeagent.yaml"


def in_use(sample: str) -> str:
    """The sample with the '#' of every setting taken away."""
    return "\n".join(line.removeprefix("#") for line in sample.splitlines() if not line.startswith("##"))


def parse(text: str, **environ: str) -> AgentConfig:
    return parse_config(text, "agent.yaml", environ, uid=0, ephemeral=(32768, 60999))


def test_an_empty_file_gives_the_defaults() -> None:
    config = parse("")
    assert config == parse("# nothing\n") == parse("{}")
    assert config.cluster == "default"
    assert config.redis.url == "redis://127.0.0.1:6379/0"
    assert config.ports.rendezvous == (29400, 29899)
    assert config.timing == Timing()
    assert type(config.timing) is Timing
    assert config.jobs.logs.max_bytes == 64 * 1024**2
    assert config.dirs.run == Path("/run/nodeagent")
    assert not config.jobs.allow_root


def test_everything_given() -> None:
    config = parse("""
cluster: lab-1
cluster_key: /x/key
node: {id: n7, address: 10.0.0.7, data_interface: ib0, labels: {rack: r1}, cpu_slots: 0, gpus: [GPU-1, GPU-2]}
redis:
  url: "rediss+sentinel://user:secret@s1:26380,s2/gpus/2"
  replicas: 2
  tls: {ca_file: /ca.pem, cert_file: /node.pem, key_file: /node.key, check_hostname: false}
  sentinel: {user: watch, password_file: /sentinel.pw}
ports: {api: 0, rendezvous: 20000-20063}
dirs: {run: /x/run, logs: /x/logs}
timing: {heartbeat: 250ms, lease: 5, cooldown: 1m}
jobs: {allow_root: true, operators: ml, logs: {max_bytes: 1MiB, keep: 2}, standbys: 0}
log: {level: debug, format: json}
""")
    assert config.node.gpus == ("GPU-1", "GPU-2")
    assert config.timing == Timing(heartbeat=0.25, lease=5.0, cooldown=60.0)
    assert config.jobs.logs.max_bytes == 1024**2
    assert config.dirs.state == Path("/var/lib/nodeagent")
    assert config.ports.rendezvous == (20000, 20063)
    assert config.cluster_key == Path("/x/key")
    assert "secret" not in repr(config)
    again = parse(config.model_dump_json())
    assert again == config


@pytest.mark.parametrize("text", ["without_agent: 1m", "saving: {regroup: 30s}"])
def test_an_agent_may_be_away_less_long_than_a_store_waits_for_it(text: str) -> None:
    (found,) = problems(lambda: parse(text))
    assert "is not below saving.regroup" in str(found)
    assert "lower without_agent or raise saving.regroup" in str(found)


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("cluster: >>Lab 1", "use 1 to 40 of a-z"),
        ("cluster: >>42", "42 is not a cluster name"),
        (">>clustr: x", "did you mean 'cluster'?"),
        ("cluster_key: >>key", "cluster_key: 'key' is not an absolute path, write it from / on"),
        (">>node:", "'node' has no value, write one, or remove the key"),
        ("node: {id: >>N7}", "is not a node id"),
        ("node: {>>adress: x}", "unknown key 'adress' in node, did you mean 'address'?"),
        ("node: {address: >>10.0.0.7 x}", "node.address: '10.0.0.7 x' is neither an address nor a host name, write"),
        ('node: {address: >>""}', "is neither an address nor a host name"),
        ('redis: {url: >>"redis://r 1:6379/0"}', "'r 1' is neither an address nor a host name"),
        ("topology: >>rack", "'rack' is not a list of labels, write for instance [zone, rack, switch]"),
        ("topology: >>[rack, rack]", "a label is named twice, or too many are, name each once, 8 at most"),
        ("topology: >>[node]", "is not a list of labels"),
        ("node: {labels: >>{node: a}}", "'node' is the node's own name in a job's placement, choose another label"),
        ("node: {labels: {rack: >>12}}", 'node.labels.rack: 12 is a number, not text, write "12" in quotes'),
        ("node: {cpu_slots: >>010}", "write 10"),
        ("node: {cpu_slots: >>-1}", "at least 0"),
        ("node: {gpus: >>yes}", "write auto, none, or a list of GPU UUIDs"),
        ("node: {gpus: >>[0, 1]}", "list of GPU UUIDs"),
        ("redis: {url: >>http://a}", "does not start with redis://, rediss://, unix://, redis+sentinel://"),
        ("redis: {url: >>localhost}", "does not start with"),
        ("redis: {url: >>'redis://'}", "names no host"),
        ("redis: {url: >>redis://h:port/0}", "a port that is not a number"),
        ("redis: {url: >>redis://h:0}", "port 0"),
        ("redis: {url: >>redis://h/name}", "a database number"),
        ("redis: {url: >>'unix://'}", "no path"),
        ("redis: {url: >>'redis://h/0?socket_timeout=5'}", "the option 'socket_timeout'"),
        ("redis: {url: >>5}", "5 is not a Redis URL"),
        ("redis: {url: >>'redis://a,b/0'}", "list several only with redis+sentinel://"),
        ("redis: {url: >>'redis+sentinel://a,b'}", "names no service, end it with /mymaster/0"),
        ("redis: {url: >>'redis+sentinel://a,b:26379,a:26379/m'}", "names a host twice"),
        ("redis: {url: >>'redis+sentinel://a,/m'}", "names no host"),
        ("redis: {url: >>'redis+sentinel://a/m/one'}", "a database number"),
        ("redis: {url: 'redis://:s@h', password_file: >>/p}", "the password is in the url too, keep one"),
        ("redis: {password_file: >>p}", "'p' is not an absolute path"),
        ("redis: {password_file: >>5}", "5 is not a file"),
        ("redis: {tls: >>{ca_file: /ca}}", "redis.tls: the url does not ask for TLS, begin it with rediss://"),
        ("redis: {url: 'rediss://h', tls: {key_file: >>/k}}", "a key without a certificate"),
        ("redis: {url: 'rediss://h', tls: {check_hostname: >>no}}", "write false"),
        ("redis: {sentinel: >>{user: u, password_file: /p}}", "the url names no sentinels"),
        ("redis: {url: 'redis+sentinel://h/m', sentinel: {user: >>u}}", "a user without a password"),
        ("redis: {replicas: >>-1}", "at least 0"),
        ("ports: {api: >>70000}", "at most 65535"),
        ("ports: {rendezvous: >>29400}", "write for instance 29400-29899"),
        ("ports: {rendezvous: >>29400-29420}", "has only 21 ports"),
        ("ports: {rendezvous: >>9400-9500}", "9400-9500 includes the api port 9470"),
        ("ports: >>{api: 29500, >>x: 1}", "29400-29899 includes the api port 29500"),
        ("ports: {rendezvous: >>40000-40499}", "ephemeral ports 32768-60999"),
        ("dirs: {run: >>run}", "is not an absolute path, write it from / on"),
        (f"dirs: {{run: >>/{'x' * 90}}}", "too long to hold sockets"),
        ("dirs: >>[a]", "dirs: a list is not a mapping"),
        ("timing: {heartbeat: >>1 sec}", "write 1s"),
        ("timing: {>>heartbeats: 1s}", "did you mean 'heartbeat'?"),
        ("timing: >>{lease: 2s}", "is longer than lease = 2.0 s"),
        ("timing: >>fast", "timing: 'fast' is not a mapping"),
        ("jobs: {allow_root: >>yes}", "write true"),
        ("jobs: {operators: >>''}", "an empty text"),
        ("jobs: {logs: {max_bytes: >>64MB}}", "write 64MiB"),
        ("jobs: {logs: {max_bytes: >>1}}", "at least 4096"),
        ("jobs: {logs: {keep: >>0}}", "at least 1"),
        ("limits: {jobs: >>0}", "at least 1"),
        ("limits: {job_bytes: >>1KiB}", "at least 262144"),
        ("limits: {submit: {users: >>alice}}", "write for instance [alice, bob]"),
        ("log: {level: >>warn}", "did you mean warning?"),
        ("log: {format: >>xml}", "write 'json', 'console' or 'auto'"),
        (">>- a", "does not hold 'key: value' lines"),
        ("log: {level: >>loud}\njobs: {standbys: >>many}\n>>jbs: 1", "unknown key 'jbs'"),
    ],
)
def test_mistakes(marked: str, words: str) -> None:
    check_marked(marked, parse, words)


def test_every_broken_inequality_is_reported() -> None:
    found = problems(lambda: parse("timing: {heartbeat: 5s, lease: 1s}"))
    assert len(found) == 4
    assert all((p.line, p.col) == (1, 9) for p in found)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:secret@h:x/0", "http://u:secret@h", "redis+sentinel://u:secret@h", "redis://u:secret@h/x",
        "redis://u:a?secret@h", "redis://u:a?x=secret@h", "redis://u:a/secret@h", "unix://:secret@",
        "redis+sentinel://u:secret@h:x,h/m", "redis://u:secret@h,i",
    ],
)  # fmt: skip
def test_no_message_repeats_a_password(url: str) -> None:
    assert "secret" not in str(problems(lambda: parse(f"redis: {{url: '{url}'}}")))
    with pytest.raises(ValueError, match="url") as caught:
        RedisConfig(url=url)
    assert "secret" not in str(caught.value)


def test_the_default_ports_are_checked_against_the_kernels() -> None:
    (found,) = problems(lambda: parse_config("", "agent.yaml", {}, uid=0, ephemeral=(15000, 60999)))
    assert "29400-29899 overlaps the kernel's ephemeral ports 15000-60999" in str(found)
    assert "14500-14999" in found.right


def test_ephemeral_clash() -> None:
    assert ephemeral_clash((29400, 29899), (32768, 60999)) is None
    assert ephemeral_clash((61000, 61100), (32768, 60999)) is None
    assert ephemeral_clash((60999, 61100), (32768, 60999))
    assert ephemeral_clash((32000, 32768), (32768, 60999))
    assert "ip_local_port_range" in str(ephemeral_clash((2000, 2100), (1024, 65535)))


def test_environment_overrides_the_file() -> None:
    config = parse(
        "redis: {url: redis://a}\nnode: {labels: {a: b}}",
        NODEAGENT__REDIS__URL="unix:///run/redis.sock?db=3",
        NODEAGENT__NODE__CPU_SLOTS="8",
        NODEAGENT__NODE__ID="7",
        NODEAGENT__NODE__LABELS__RACK="12",
        NODEAGENT__NODE__GPUS="[GPU-1, GPU-2]",
        NODEAGENT__PORTS__RENDEZVOUS="20000-20100",
        NODEAGENT__JOBS__ALLOW_ROOT="true",
        NODEAGENT__TIMING__COOLDOWN="5s",
        NODEAGENT__LOG="{level: debug}",
        NODEAGENT__LOG__FORMAT="json",
        NODEAGENT_JOB="not ours",
    )
    assert config.redis.url == "unix:///run/redis.sock?db=3"
    assert config.node.cpu_slots == 8
    assert config.node.id == "7"
    assert config.node.labels == {"a": "b", "rack": "12"}
    assert config.node.gpus == ("GPU-1", "GPU-2")
    assert config.ports.rendezvous == (20000, 20100)
    assert config.jobs.allow_root
    assert config.timing.cooldown == 5
    assert (config.log.level, config.log.format) == ("debug", "json")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NODEAGENT__REDIS__URI", "x", "unknown key 'uri' in redis, did you mean 'url'?"),
        ("NODEAGENT__REDS__URL", "x", "unknown key 'reds', did you mean 'redis'?"),
        ("NODEAGENT__NODE__CPU_SLOTS", "1e3", "write 1000"),
        ("NODEAGENT__JOBS__ALLOW_ROOT", "yes", "write true"),
        ("NODEAGENT__NODE", "x", "node: 'x' is not a mapping"),
        ("NODEAGENT__NODE__GPUS", "[a", "not closed here"),
        ("NODEAGENT__LOG", "{level: info, level: debug}", "given twice"),
        ("NODEAGENT__", "x", "a section or key without a name"),
        ("NODEAGENT__REDIS__", "x", "a section or key without a name"),
        ("NODEAGENT__CLUSTER__X", "x", "is not a cluster name"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, words: str) -> None:
    found = problems(lambda: parse("log: {level: info}", **{name: value}))
    assert len(found) == 1
    assert str(found[0]).startswith(name + ":")
    assert words in str(found[0])


def test_mistakes_of_file_and_environment_together() -> None:
    found = problems(lambda: parse("redis: 5\nlog: {level: x}", NODEAGENT__REDIS__URL="redis://a", NODEAGENT__X="1"))
    assert [p.file for p in found] == ["NODEAGENT__X", "agent.yaml", "agent.yaml"]


def test_pod_ip() -> None:
    assert parse("", POD_IP="10.1.2.3").node.address == "10.1.2.3"
    assert parse("node: {address: a}", POD_IP="10.1.2.3").node.address == "a"
    assert parse("", POD_IP="").node.address is None


def test_default_dirs() -> None:
    assert default_dirs(0, {"XDG_RUNTIME_DIR": "/r"})["run"] == "/run/nodeagent"
    assert default_dirs(5, {"XDG_RUNTIME_DIR": "/r", "XDG_STATE_HOME": "/s", "HOME": "/h"}) == {
        "run": "/r/nodeagent",
        "state": "/s/nodeagent",
        "logs": "/s/nodeagent/logs",
    }
    assert default_dirs(5, {"HOME": "/h", "XDG_STATE_HOME": "relative"})["state"] == "/h/.local/state/nodeagent"
    assert default_dirs(5, {}) == {
        "run": "/tmp/nodeagent-5",
        "state": "/tmp/nodeagent-5/state",
        "logs": "/tmp/nodeagent-5/state/logs",
    }


def test_the_name_of_a_host() -> None:
    assert name_of_host("GPU-07.example.org") == "gpu-07"
    for hostname in ("localhost", "", "a_b"):
        with pytest.raises(CheckError, match=r"set node\.id"):
            name_of_host(hostname)


def test_default_config_path() -> None:
    assert default_config_path(0, {}) == Path("/etc/nodeagent/nodeagent.yaml")
    assert default_config_path(5, {"HOME": "/h"}) == Path("/h/.config/nodeagent/nodeagent.yaml")
    assert default_config_path(5, {"HOME": "/h", "XDG_CONFIG_HOME": "/c"}) == Path("/c/nodeagent/nodeagent.yaml")
    assert default_config_path(5, {}) is None


def test_the_key_lies_beside_the_config_unless_it_says_otherwise() -> None:
    assert parse("").cluster_key == Path("/etc/nodeagent/cluster.key")
    assert parse_config("", "f", {"HOME": "/h"}, uid=5).cluster_key == Path("/h/.config/nodeagent/cluster.key")
    assert parse_config("", "f", {}, uid=5).cluster_key == Path("/tmp/nodeagent-5/state/cluster.key")
    assert parse("", NODEAGENT__CLUSTER_KEY="/k").cluster_key == Path("/k")


def test_load_config_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("cluster: lab\nports: {api: 0}\n")
    assert load_config(path, {}).cluster == "lab"


def test_load_config_without_a_file() -> None:
    assert load_config(None, {"HOME": "/nonexistent"}).redis.url == "redis://127.0.0.1:6379/0"


def test_unreadable_files(tmp_path: Path) -> None:
    (found,) = problems(lambda: load_config(tmp_path / "none.yaml", {}))
    assert str(found) == f"{tmp_path}/none.yaml: cannot be read: No such file or directory, check the path"
    path = tmp_path / "latin1.yaml"
    path.write_bytes(b"cluster: a\n# caf\xe9\n")
    (found,) = problems(lambda: load_config(path, {}))
    assert str(found) == f"{path}:2:6: not UTF-8 text, save the file as UTF-8"


def test_the_kernels_range_is_read() -> None:
    got = configfile.ephemeral_ports()
    assert got is None or 1 <= got[0] <= got[1] <= 65535


def test_the_sample_is_the_defaults_and_valid_with_every_line_in_use() -> None:
    text = SAMPLE.read_text()
    assert parse(text) == parse("")
    used = in_use(text)
    config = parse(used)
    assert config.node.id == "n7"
    assert config.topology == ("zone", "rack")
    assert config.redis.place.service == "mymaster"
    plain: dict[str, object] = {
        "node": parse("").node,
        "topology": (),
        "redis": parse("").redis,
        "api": parse("").api,
        "jobs": config.jobs.model_copy(update={"operators": None}),
        "limits": config.limits.model_copy(
            update={"nodes_per_job": None, "restarts_per_job": None, "submit": SubmitConfig()}
        ),
        "health": parse("").health,
    }
    assert config.health is not None
    assert set(config.health.repair.commands()) == {"reset_gpu", "reboot", "service"}
    assert config.health.preflight == PreflightConfig()
    repair = config.health.repair.model_copy(update={"gpu_reset": None, "reboot": None, "service": None})
    diag = config.health.diag.model_copy(update={"python": None})
    assert config.health.checks["lustre"] == CheckConfig(command=config.health.checks["lustre"].command)
    unset: dict[str, object] = {"repair": repair, "diag": diag, "preflight": None, "checks": {}}
    plain["health"] = config.health.model_copy(update=unset)
    assert config.model_copy(update=plain) == parse("")
