"""What ``release/setup.sh`` does with the agent's unit: it starts none that an operator stopped for good, and leaves no
node without an agent. And whose shims it counts."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "release" / "setup.sh"
STUBS = """
systemctl() {
    case "$1" in
        is-active) [ "$active" = yes ] ;;
        is-enabled) [ "$enabled" = yes ] ;;
        show)
            if [ "$3" = ActiveState ]; then [ "$slow" = yes ] && echo deactivating || echo failed
            elif [ "$(current)" = "$loops" ]; then echo >>"$etc/pids"; wc -l <"$etc/pids"; else echo 7; fi ;;
        restart)
            echo "systemctl $*, $(current)"
            [ "$slow" = no ] || [ "$(wc -l <"$etc/ending")" -ge 2 ] || { echo >>"$etc/ending"; return 124; }
            case " $broken " in *" $(current) "*) return 1 ;; esac ;;
        *) echo "systemctl $*" ;;
    esac
}
timeout() { shift; "$@"; }
sleep() { :; }
sysusers() { :; }
booted() { :; }
say() { echo "say $*"; }
name_version() { version=$newest; }
find_python() { echo python3; }
"""
ACTIVE, ENABLED, FIRST, KEY = "active", "enabled", "first", "key"
OLDEST, OLD, NEW = "0.1-aaa", "0.1-bbb", "0.2-ccc"


@dataclass(frozen=True)
class Played:
    """What came of some lines of the script."""

    code: int
    asked: list[str]
    """Of systemd, and at a restart the version that is in use then."""
    reported: str
    complained: str


def play(folder: Path, lines: str, *has: str, **values: str) -> Played:
    """``lines`` after the script's own functions, where ``folder`` is config, program and /proc. OLD is in use."""
    for version in (OLDEST, OLD, NEW):
        (folder / "versions" / version / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "versions" / version / ".complete").touch()
    (folder / "setup").touch()
    (folder / "ending").touch()
    if FIRST not in has and not (folder / "bin").is_symlink():
        (folder / "bin").symlink_to(f"versions/{OLD}/bin")
    if KEY in has:
        (folder / "cluster.key").touch()
    functions = SETUP.read_text().partition("[ $# -ge 1 ] || usage")[0]
    functions = functions.replace("systemd-sysusers", "sysusers").replace("/proc/", f"{folder}/proc/")
    settings = {
        "etc": str(folder), "prefix": str(folder), "restart": "yes", "newest": NEW, "broken": "", "loops": "",
        "slow": "no", "active": "yes" if ACTIVE in has else "no", "enabled": "yes" if ENABLED in has else "no",
    }  # fmt: skip
    assigned = "".join(f"{name}='{value}'\n" for name, value in (settings | values).items())
    done = subprocess.run(["sh", "-c", functions + STUBS + assigned + lines], capture_output=True, text=True)
    out = done.stdout.splitlines()
    asked = [line.removeprefix("systemctl ") for line in out if line.startswith("systemctl ")]
    return Played(done.returncode, asked, "\n".join(line for line in out if line.startswith("say ")), done.stderr)


def upgrade(folder: Path, *has: str, **values: str) -> Played:
    """To NEW; ``asked`` is what follows the ``daemon-reload``."""
    played = play(folder, f"switch_to {NEW}\nrestart\n", *has, **values)
    assert played.asked.pop(0) == "daemon-reload", played
    return played


def in_use(folder: Path) -> tuple[str, str]:
    """The version in use, and that to roll back to."""
    previous = folder / "previous"
    return (folder / "bin").readlink().parent.name, previous.readlink().name if previous.is_symlink() else ""


ENABLE, START, RESTART = "enable --quiet nodeagent", f"restart --no-block nodeagent, {NEW}", f"restart nodeagent, {NEW}"


@pytest.mark.parametrize(
    ("has", "asked"),
    [
        ((FIRST, KEY), [ENABLE, START]),
        ((FIRST,), [ENABLE]),
        ((ENABLED, KEY), [START]),
        ((ENABLED,), []),
        ((KEY,), []),
        ((ACTIVE, ENABLED, KEY), [RESTART]),
        ((ACTIVE, KEY), [RESTART]),
    ],
)
def test_an_install_starts_what_is_new_or_enabled(tmp_path: Path, has: tuple[str, ...], asked: list[str]) -> None:
    """One that an operator had disabled was enabled and started by the next upgrade."""
    played = upgrade(tmp_path, *has)
    assert (played.code, played.asked) == (0, asked), played


def test_an_agent_that_ends_slowly_says_nothing_of_the_next_one(tmp_path: Path) -> None:
    played = upgrade(tmp_path, ACTIVE, ENABLED, KEY, slow="yes")
    assert (played.code, played.asked, in_use(tmp_path)) == (0, [RESTART] * 3, (NEW, OLD)), played


@pytest.mark.parametrize("has", [(FIRST, KEY), (ENABLED, KEY), (KEY,), (ACTIVE, ENABLED, KEY)])
def test_without_a_restart_nothing_is_started(tmp_path: Path, has: tuple[str, ...]) -> None:
    """A first roll-out started the agent with the stock config, before the store had been asked."""
    assert upgrade(tmp_path, *has, restart="no").asked == []


def test_what_is_left_as_it_is_is_reported(tmp_path: Path) -> None:
    assert "systemctl enable --now nodeagent" in upgrade(tmp_path / "a", KEY).reported
    assert "systemctl restart nodeagent" in upgrade(tmp_path / "b", ACTIVE, ENABLED, KEY, restart="no").reported
    assert "systemctl enable --now nodeagent" in upgrade(tmp_path / "c", FIRST, KEY, restart="no").reported


@pytest.mark.parametrize("fault", ["broken", "loops"])
@pytest.mark.parametrize("before", ["", OLDEST])
def test_a_version_that_does_not_start_is_left_again(tmp_path: Path, fault: str, before: str) -> None:
    """It stayed in use, and the node had no agent. One that ends soon after each start counts as such."""
    if before:
        (tmp_path / "previous").symlink_to(f"versions/{before}")
    played = upgrade(tmp_path, ACTIVE, ENABLED, KEY, **{fault: NEW})
    assert (played.code, played.asked) == (1, [RESTART, f"restart nodeagent, {OLD}"]), played
    assert in_use(tmp_path) == (OLD, before)
    assert f"the agent of {NEW} does not start" in played.complained
    assert "journalctl -u nodeagent --since" in played.complained
    assert f"The agent of {OLD} runs again" in played.complained
    assert "restarted" not in played.reported


def test_a_node_where_neither_version_starts_is_reported_so(tmp_path: Path) -> None:
    played = upgrade(tmp_path, ACTIVE, ENABLED, KEY, broken=f"{OLD} {NEW}")
    assert played.code == 1
    assert in_use(tmp_path) == (OLD, "")
    assert "this node has no agent" in played.complained
    assert "then: systemctl restart nodeagent" in played.complained


def test_a_rollback_to_what_does_not_start_is_undone(tmp_path: Path) -> None:
    (tmp_path / "previous").symlink_to(f"versions/{OLDEST}")
    played = play(tmp_path, "do_rollback\n", ACTIVE, ENABLED, KEY, broken=OLDEST)
    assert played.code == 1, played
    assert in_use(tmp_path) == (OLD, OLDEST)


@pytest.mark.parametrize(
    ("has", "asked", "reported"),
    [
        ((ENABLED, KEY), [f"restart --no-block nodeagent, {OLD}"], "the agent did not run, and starts"),
        ((KEY,), [], "the agent is disabled, and stays so"),
        ((ACTIVE, ENABLED, KEY), [], "installed already"),
    ],
)
def test_what_is_installed_already_is_started_if_it_should_run(
    tmp_path: Path, has: tuple[str, ...], asked: list[str], reported: str
) -> None:
    """An agent that had failed stayed so: the install said that it was done."""
    played = play(tmp_path, "do_install\n", *has, newest=OLD)
    assert (played.code, played.asked) == (0, asked), played
    assert reported in played.reported


def test_only_shims_of_the_nodes_own_agent_count(tmp_path: Path) -> None:
    """People's own local clusters kept the program from being removed."""
    python = f"{tmp_path}/versions/{OLD}/bin/python -sP -m nodeagent.shim"
    own, unit, local, roots, elsewhere = "11", "12", "13", "14", "15"
    processes = {
        own: (f"{python} /run/nodeagent/pods/0123456789 5", "0::/"),
        unit: (f"{python} /data/run/pods/0123456789", "0::/nodeagent.slice/nodeagent-pod-0123456789-ab.service"),
        local: (f"{python} /run/user/1000/nodeagent/local/it/n1/pods/0123456789 5", "0::/user.slice/session.scope"),
        roots: (f"{python} /run/nodeagent/local/it/n1/pods/0123456789 5", "0::/user.slice/session.scope"),
        elsewhere: ("/usr/bin/python3 -m nodeagent.shim /run/nodeagent/pods/0123456789", "0::/"),
        "16": (f"{tmp_path}/versions/{OLD}/bin/nodeagent run", "0::/system.slice/nodeagent.service"),
    }
    for pid, (command, group) in processes.items():
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (tmp_path / "proc" / pid / "cgroup").write_text(group + "\n")
    played = play(tmp_path, 'say own $(shims), all $(every_shim | cut -d" " -f1)\n')
    assert played.reported == f"say own {own} {unit}, all {own} {unit} {local} {roots}", played
