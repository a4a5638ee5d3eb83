"""What ``release/setup.sh`` does with the agent's unit: it starts none that an operator stopped for good, leaves no
node without an agent, and has each agent run by its own version's unit. And under whom it removes nothing."""

from __future__ import annotations

import fcntl
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "release" / "setup.sh"
FUNCTIONS, ARGUMENTS, COMMAND = SETUP.read_text().partition("[ $# -ge 1 ] || usage")
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
booted() { [ "$boots" = yes ]; }
say() { echo "say $*"; }
name_version() { version=$newest; }
find_python() { echo python3; }
"""
ACTIVE, ENABLED, FIRST, KEY, PACKAGE = "active", "enabled", "first", "key", "package"
PLACES = ("programs", "units", "packaged_units", "sysusers", "tmpfiles", "needrestart", "man")
"""The script's variables for the folders outside of the prefix."""
OLDEST, OLD, NEW = "0.1-aaa", "0.1-bbb", "0.2-ccc"
MAIN = 7
"""The agent's process, as the stub of systemctl says."""


@dataclass(frozen=True)
class Played:
    """What came of some lines of the script."""

    code: int
    asked: list[str]
    """Of systemd, and at a restart the version that is in use then."""
    reported: str
    complained: str


def lay_out(files: Path, version: str) -> None:
    """What a bundle has beside its wheels; the unit's text is ``version``."""
    files.mkdir(exist_ok=True)
    for name in ("service", "slice", "sysusers.conf", "tmpfiles.conf", "needrestart.conf", "yaml"):
        (files / f"nodeagent.{name}").write_text(version)
    for name in ("man/nodeagent.1", "completion/bash", "completion/zsh"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).touch()


def outside(folder: Path) -> Path:
    """Where ``PLACES`` are."""
    return folder.with_name(f"{folder.name}-outside")


def unit(folder: Path) -> str:
    """The version whose unit systemd reads."""
    found = [outside(folder) / place / "nodeagent.service" for place in ("units", "packaged_units")]
    return "".join(file.read_text() for file in found if file.exists())


def run(folder: Path, pid: int, command: str, group: str = "0::/") -> None:
    """A process, in what ``play`` takes for /proc."""
    place = folder / "proc" / str(pid)
    place.mkdir(parents=True)
    (place / "cmdline").write_text(command.replace(" ", "\0") + "\0")
    (place / "cgroup").write_text(group + "\n")


def agent_runs(folder: Path, version: str) -> None:
    """The unit's agent is of ``version``."""
    run(folder, MAIN, f"{folder}/versions/{version}/bin/python {folder}/bin/nodeagent run")


def play(folder: Path, lines: str, *has: str, **values: str) -> Played:
    """``lines`` after the script's own functions, where ``folder`` is config, program and /proc. OLD is in use."""
    for version in (OLDEST, OLD, NEW):
        (folder / "versions" / version / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "versions" / version / ".complete").touch()
        lay_out(folder / "versions" / version / "files", version)
    newest = values.get("newest", NEW)
    lay_out(folder / "bundle", newest)
    (folder / "bundle/setup.sh").touch()
    for place in PLACES:
        (outside(folder) / place).mkdir(parents=True, exist_ok=True)
    link = outside(folder) / "programs/nodeagent"
    if PACKAGE not in has and not link.is_symlink():
        link.symlink_to(folder / "bin/nodeagent")
    (folder / "setup").touch()
    (folder / "ending").touch()
    if FIRST not in has and not (folder / "bin").is_symlink():
        (folder / "bin").symlink_to(f"versions/{OLD}/bin")
    if KEY in has:
        (folder / "cluster.key").touch()
    functions = FUNCTIONS.replace("systemd-sysusers", "sysusers").replace("/proc/", f"{folder}/proc/")
    settings = {
        "etc": str(folder), "prefix": str(folder), "here": f"{folder}/bundle", "verb": "install", "drain": "no",
        "restart": "yes", "files": "no" if PACKAGE in has else "yes", "newest": newest, "broken": "", "loops": "",
        "boots": "yes", "slow": "no", "active": "yes" if ACTIVE in has else "no",
        "enabled": "yes" if ENABLED in has else "no", **{place: str(outside(folder) / place) for place in PLACES},
        "bash_completion": f"{outside(folder)}/bash", "zsh_completion": f"{outside(folder)}/zsh",
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
    assert (played.code, played.asked) == (1, [RESTART, "daemon-reload", f"restart nodeagent, {OLD}"]), played
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
        ((ACTIVE, ENABLED, KEY), [], "the agent runs it already"),
    ],
)
def test_what_is_installed_already_is_started_if_it_should_run(
    tmp_path: Path, has: tuple[str, ...], asked: list[str], reported: str
) -> None:
    """An agent that had failed stayed so: the install said that it was done."""
    played = play(tmp_path, "do_install\n", *has, newest=OLD)
    assert (played.code, played.asked) == (0, ["daemon-reload", *asked]), played
    assert reported in played.reported


def test_an_install_that_ended_before_its_restart_is_completed(tmp_path: Path) -> None:
    """The older agent ran on, and the install said that it was done."""
    agent_runs(tmp_path, OLDEST)
    (tmp_path / "previous").symlink_to(f"versions/{OLDEST}")
    played = play(tmp_path, "do_install\n", ACTIVE, ENABLED, KEY, newest=OLD)
    assert (played.code, played.asked) == (0, ["daemon-reload", f"restart nodeagent, {OLD}"]), played
    assert in_use(tmp_path) == (OLD, OLDEST)


def test_what_it_completes_goes_back_to_what_ran(tmp_path: Path) -> None:
    agent_runs(tmp_path, OLDEST)
    (tmp_path / "previous").symlink_to(f"versions/{OLDEST}")
    played = play(tmp_path, "do_install\n", ACTIVE, ENABLED, KEY, newest=OLD, broken=OLD)
    back = ["daemon-reload", f"restart nodeagent, {OLDEST}"]
    assert (played.code, played.asked) == (1, ["daemon-reload", f"restart nodeagent, {OLD}", *back]), played
    assert (in_use(tmp_path), unit(tmp_path)) == ((OLDEST, ""), OLDEST)
    assert f"The agent of {OLDEST} runs again" in played.complained


def test_an_upgrade_over_one_that_was_never_started_goes_back_to_what_ran(tmp_path: Path) -> None:
    agent_runs(tmp_path, OLDEST)
    (tmp_path / "previous").symlink_to(f"versions/{OLDEST}")
    played = upgrade(tmp_path, ACTIVE, ENABLED, KEY, broken=NEW)
    assert (played.code, in_use(tmp_path), unit(tmp_path)) == (1, (OLDEST, ""), OLDEST), played


def test_an_older_agent_that_is_not_to_be_restarted_is_reported(tmp_path: Path) -> None:
    agent_runs(tmp_path, OLDEST)
    for lines in ("do_install\n", "do_status\n"):
        played = play(tmp_path, lines, ACTIVE, ENABLED, KEY, newest=OLD, restart="no")
        assert [line for line in played.asked if line != "daemon-reload"] == []
        assert f"the agent still runs {OLDEST}: systemctl restart nodeagent" in played.reported


@pytest.mark.parametrize("how", [(), (PACKAGE,)])
def test_the_unit_is_that_of_the_version_in_use(tmp_path: Path, how: tuple[str, ...]) -> None:
    """An upgrade that failed left the newer unit, and a rollback did."""
    has = (ACTIVE, ENABLED, KEY, *how)
    upgrade(tmp_path, *has)
    assert (in_use(tmp_path), unit(tmp_path)) == ((NEW, OLD), NEW)
    played = play(tmp_path, "do_rollback\n", *has)
    assert (played.code, in_use(tmp_path), unit(tmp_path)) == (0, (OLD, NEW), OLD), played
    upgrade(tmp_path, *has, broken=NEW)
    assert (in_use(tmp_path)[0], unit(tmp_path)) == (OLD, OLD)
    assert (outside(tmp_path) / "packaged_units/nodeagent.service").exists() == (PACKAGE in how)
    for place in ("sysusers", "tmpfiles", "needrestart"):
        assert any((outside(tmp_path) / place).iterdir()) == (PACKAGE not in how), "dpkg's own stay"


def test_a_package_that_is_refused_leaves_the_unit_of_what_runs(tmp_path: Path) -> None:
    """dpkg has unpacked the next one's by then."""
    play(tmp_path, f"switch_to {OLD}\n", PACKAGE)
    (outside(tmp_path) / "packaged_units/nodeagent.service").write_text(NEW)
    (tmp_path / "nodeagent.yaml").touch()
    program = tmp_path / "versions" / NEW / "bin/nodeagent"
    program.write_text("#!/bin/sh\nexit 78\n")
    program.chmod(0o755)
    played = play(tmp_path, "do_install\n", ACTIVE, ENABLED, KEY, PACKAGE)
    assert (played.code, played.asked, in_use(tmp_path)[0], unit(tmp_path)) == (1, [], OLD, OLD), played
    assert played.complained.strip().endswith("then: dpkg --configure nodeagent")


def test_a_failed_upgrade_names_the_command_that_repeats_it(tmp_path: Path) -> None:
    bundle = upgrade(tmp_path, ACTIVE, ENABLED, KEY, broken=NEW)
    assert bundle.complained.strip().endswith(f"then: sh {tmp_path}/bundle/sh install")
    package = upgrade(tmp_path / "package", ACTIVE, ENABLED, KEY, PACKAGE, broken=NEW)
    assert f"then: dpkg --configure nodeagent. Or keep {OLD}: dpkg -i its .deb." in package.complained


def test_only_the_shims_of_peoples_own_clusters_do_not_count(tmp_path: Path) -> None:
    """Theirs kept the program from being removed; and where systemd does not run, those of an agent with another
    ``dirs.run`` lost their files."""
    python = f"{tmp_path}/versions/{OLD}/bin/python -sP -m nodeagent.shim"
    cluster = tmp_path / "local/it"
    cluster.mkdir(parents=True)
    (cluster / "cluster.json").touch()
    run(tmp_path, 11, f"{python} /run/nodeagent/pods/0123456789 5")
    slice_of_all = "0::/nodeagent.slice/nodeagent-pod-0123456789-ab.service"
    run(tmp_path, 12, f"{python} {cluster}/n1/pods/0123456789", slice_of_all)
    run(tmp_path, 13, f"{python} /data/run/pods/0123456789")
    run(tmp_path, 14, f"{python} {cluster}/n1/pods/0123456789 5", "0::/user.slice/session.scope")
    run(tmp_path, 15, "/usr/bin/python3 -m nodeagent.shim /run/nodeagent/pods/0123456789")
    run(tmp_path, 16, f"{tmp_path}/versions/{OLD}/bin/nodeagent run", "0::/system.slice/nodeagent.service")
    played = play(tmp_path, 'say own $(shims), all $(every_shim | cut -d" " -f1)\n')
    assert played.reported == "say own 11 12 13, all 11 12 13 14", played


@pytest.mark.parametrize("boots", ["yes", "no"])
def test_nothing_is_removed_under_an_agent_that_systemd_does_not_stop(tmp_path: Path, boots: str) -> None:
    """Where systemd does not run, its files were taken from the agent, and ``--drain`` waited for nobody."""
    agent_runs(tmp_path, OLD)
    python = f"{tmp_path}/versions/{OLD}/bin/python"
    run(tmp_path, 21, f"{python} -m nodeagent.agent.main run --config /run/nodeagent/local/it/n1.yaml")
    if boots == "yes":
        run(tmp_path, 22, f"{python} /usr/local/bin/nodeagent run --config /data/nodeagent.yaml")
    played = play(tmp_path, "do_remove\n", boots=boots, drain="yes")
    assert (played.code, played.asked, in_use(tmp_path)[0]) == (6, [], OLD), played
    assert f"kill -INT {22 if boots == 'yes' else MAIN})" in played.complained


def test_the_units_agent_is_stopped_and_all_of_it_removed(tmp_path: Path) -> None:
    agent_runs(tmp_path, OLD)
    play(tmp_path, f"switch_to {OLD}\n")
    assert unit(tmp_path) == OLD
    played = play(tmp_path, "do_remove\n", ACTIVE)
    assert (played.code, played.asked) == (0, ["disable --quiet nodeagent", "stop nodeagent", "daemon-reload"]), played
    assert [file for file in outside(tmp_path).rglob("*") if not file.is_dir()] == []
    assert not tmp_path.exists()


@pytest.mark.parametrize("verb", ["install", "rollback", "remove", "purge"])
def test_only_one_is_at_work_on_a_node(tmp_path: Path, verb: str) -> None:
    """A second install removed the folder that the first one filled."""
    lock = tmp_path.with_name(f"{tmp_path.name}.lock")
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        played = play(tmp_path, f"set -- {verb}\n{ARGUMENTS}{COMMAND}", ACTIVE, KEY, lock=str(lock), turn="0")
        assert (played.code, played.asked, in_use(tmp_path)[0]) == (6, [], OLD), played
        assert "another setup has been at work" in played.complained
        status = play(tmp_path, f"set -- status\n{ARGUMENTS}{COMMAND}", ACTIVE, lock=str(lock), newest=OLD)
        assert status.code == 0, status
    played = play(tmp_path, f"set -- install\n{ARGUMENTS}{COMMAND}", ACTIVE, KEY, lock=str(lock), turn="0")
    assert (played.code, in_use(tmp_path)[0]) == (0, NEW), played


def test_nobody_else_can_hold_the_lock(tmp_path: Path) -> None:
    lock = tmp_path.with_name(f"{tmp_path.name}.lock")
    played = play(tmp_path, "alone\nmkdir $etc/installed\n", lock=str(lock))
    assert (played.code, lock.stat().st_mode & 0o777) == (0, 0o600), played
    assert (tmp_path / "installed").stat().st_mode & 0o777 == 0o755


VENV = """
find_python() { echo python; }
python() { mkdir -p "$4/bin"; ln -s /bin/true "$4/bin/python"; ln -s /bin/true "$4/bin/nodeagent"; }
"""
FRESH = "0.3-ddd"


def test_what_counts_as_complete_is_on_the_disk(tmp_path: Path) -> None:
    """After a power cut soon after an install its files were empty, and no install repeated it."""
    disk = 'sync() { [ "$1" != -f ] || say "on the disk: $(ls -A "$2" | tr "\\n" " ")"; }\n'
    played = play(tmp_path, f"{VENV}{disk}do_install\n", ENABLED, newest=FRESH)
    assert (played.code, in_use(tmp_path)) == (0, (FRESH, OLD)), played
    assert "say on the disk: bin \nsay on the disk: .complete bin \n" in played.reported


def test_what_a_disk_does_not_take_is_not_switched_to(tmp_path: Path) -> None:
    played = play(tmp_path, VENV + "sync() { return 1; }\ndo_install\n", ENABLED, newest=FRESH)
    assert (played.code, played.asked, in_use(tmp_path)) == (1, [], (OLD, "")), played
    assert not (tmp_path / "versions" / FRESH / ".complete").exists()
    assert "nothing has been switched" in played.complained


@pytest.mark.parametrize("package", [(), (PACKAGE,)], ids=["bundle", "package"])
@pytest.mark.parametrize("verb", ["install", "rollback"])
def test_a_unit_is_on_the_disk_before_its_version_is_in_use(tmp_path: Path, package: tuple[str], verb: str) -> None:
    """After a power cut soon after it was written it was empty, and the node had no agent."""
    disk = 'sync() { say "on the disk, $(current): $(echo $* | tr " " "\\n" | grep "nodeagent.s" | xargs cat)"; }\n'
    if verb == "rollback":
        (tmp_path / "previous").symlink_to(f"versions/{OLDEST}")
    played = play(tmp_path, f"{VENV}{disk}do_{verb}\n", ENABLED, *package)
    to = OLDEST if verb == "rollback" else NEW
    assert (played.code, in_use(tmp_path)) == (0, (to, OLD)), played
    assert f"on the disk, {OLD}: {to}{to}" in played.reported
    assert f"on the disk, {to}: " not in played.reported


@pytest.mark.parametrize("package", [(), (PACKAGE,)], ids=["bundle", "package"])
def test_a_unit_that_a_disk_does_not_take_is_not_switched_to(tmp_path: Path, package: tuple[str]) -> None:
    (tmp_path / "previous").symlink_to(f"versions/{OLDEST}")
    played = play(tmp_path, "sync() { return 1; }\ndo_rollback\n", ENABLED, *package)
    assert (played.code, played.asked, in_use(tmp_path)) == (1, [], (OLD, OLDEST)), played
    assert "nothing has been switched" in played.complained and unit(tmp_path) == OLD


def test_who_goes_back_to_the_version_before_does_so_whatever_the_disk_takes(tmp_path: Path) -> None:
    disk = 'sync() { case $* in *nodeagent.service*) [ "$(current)" != ' + NEW + " ] ;; esac; }\n"
    played = play(tmp_path, f"{VENV}{disk}do_install\n", ACTIVE, ENABLED, KEY, broken=NEW)
    assert (played.code, in_use(tmp_path)[0], unit(tmp_path)) == (1, OLD, OLD), played
    assert f"agent of {OLD} runs again" in played.complained
    assert "may not be on the disk" in played.reported


def mount(source: Path, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", str(source), str(place)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_purge_empties_nothing_that_is_mounted_in_what_it_removes(tmp_path: Path) -> None:
    """What a job's user had mounted deeper in a run folder was emptied, since the file system above it was busy."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/self").symlink_to("/proc/self")
    beside = tmp_path.with_name(f"{tmp_path.name}-beside")
    kept, pods = beside / "kept", beside / "run/pods"
    for folder in (kept, pods):
        folder.mkdir(parents=True)
    (kept / "file").touch()
    try:
        for _ in range(2):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "pods", str(pods)], check=True)
        mount(kept, pods / "key/inside")
        mount(kept, beside / "logs/job/inside")
        (beside / "state").mkdir()
        places = {name: str(beside / name) for name in ("state", "logs", "run", "prefix")}
        played = play(tmp_path, "do_purge\n", etc=str(beside / "etc"), **places)
        assert (kept / "file").exists(), played
        assert (beside / "logs/job").exists() and not (beside / "state").exists() and not (beside / "run").exists()
        assert (played.code, f"{beside}/run (other" in played.reported) == (1, True), played
        assert f"{beside}/logs/job/inside" in played.complained
        assert f"something is mounted in {beside}/logs (above)" in played.complained
    finally:
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(str(beside)):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
