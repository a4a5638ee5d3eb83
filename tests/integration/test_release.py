"""A release as a node gets it: built, installed from the bundle and from the .deb, upgraded, rolled back and removed,
in a copy of this machine's root that is thrown away (an overlay in a mount namespace of its own)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent import __version__
from release import bundle, deb, wheels

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
needs_dpkg = pytest.mark.skipif(shutil.which("dpkg") is None, reason="no dpkg on this machine")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MACHINE = os.uname().machine

ENTER = """
mount -t tmpfs tmpfs {at}
mkdir {at}/upper {at}/work {at}/root
mount -t overlay overlay -o lowerdir=/,upperdir={at}/upper,workdir={at}/work {at}/root
mount -t proc proc {at}/root/proc
mount --rbind /dev {at}/root/dev
mount --bind {bundles} {at}/root/mnt
rm -rf {at}/root/opt/nodeagent {at}/root/etc/nodeagent
exec chroot {at}/root sh -eux -c "$SCRIPT"
"""
HELPERS = """
deb=$(echo /mnt/nodeagent_*[0-9]_*.deb) later_deb=$(echo /mnt/nodeagent_*+b_*.deb)
unit() { tail -n 1 /etc/systemd/system/nodeagent.service; }
fails() { expected=$1; shift; code=0; "$@" || code=$?; [ "$code" = "$expected" ]; }
current() { readlink /opt/nodeagent/bin; }
nothing_left() {
    for path in /opt/nodeagent /etc/nodeagent /var/lib/nodeagent /var/log/nodeagent /run/nodeagent \
        /etc/systemd/system/nodeagent.service /usr/lib/systemd/system/nodeagent.service /usr/lib/nodeagent \
        /etc/sysusers.d/nodeagent.conf /usr/lib/tmpfiles.d/nodeagent.conf /etc/needrestart; do
        [ ! -e $path ]
    done
    there=$(find /usr/local/bin /usr/local/share /usr/bin /usr/share/man /usr/share/bash-completion -name '*nodeagent*')
    [ -z "$there" ]
}
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with three releases, a, b and c, and the .debs of the first two. They differ in a byte of their wheel,
    and in their unit."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare: a release is installed into a copy of the root")
    out = tmp_path_factory.mktemp("release")
    wheel = wheels.build(out)
    bundle.lay_out(wheel, [PYTHON], MACHINE, out / "a")
    for name in ("b", "c"):
        shutil.copytree(out / "a", out / name)
        with zipfile.ZipFile(out / name / "wheels" / wheel.name, "a") as archive:
            archive.comment = name.encode()
        with (out / name / "nodeagent.service").open("a") as unit:
            unit.write(f"# of {name}\n")
    if shutil.which("dpkg-deb"):
        deb.build(out / "a", __version__, MACHINE, out)
        deb.build(out / "b", f"{__version__}+b", MACHINE, out)
    yield out
    shutil.rmtree(out)


def inside(bundles: Path, at: Path, script: str) -> str:
    """What ``script`` says in the copy of the root, where ``bundles`` is /mnt; fails where one of its commands does."""
    base = Path(sys.base_prefix) / "bin"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-eu", "-c", ENTER.format(at=at, bundles=bundles)],
        env={"PATH": f"{base}:/usr/sbin:/usr/bin:/sbin:/bin", "SCRIPT": HELPERS + script, "HOME": "/root"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    if "mount:" in done.stderr and "+ " not in done.stderr:
        pytest.skip(f"no overlay of the root can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installed_upgraded_rolled_back_and_removed(bundles: Path, tmp_path: Path) -> None:
    output = inside(
        bundles,
        tmp_path,
        """
        fails 3 sh /mnt/a/setup.sh status
        umask 077  # as some make root's; jobs' users run what is installed
        sh /mnt/a/setup.sh install
        umask 022
        [ "$(find /opt/nodeagent -type d -not -perm 755)" = "" ]
        sh /mnt/a/setup.sh status
        fails 3 sh /mnt/b/setup.sh status
        first=$(current)
        /usr/local/bin/nodeagentctl --version
        /usr/local/bin/nodeagent check-config /etc/nodeagent/nodeagent.yaml
        [ -s /usr/local/share/man/man1/nodeagentctl-scale.1 ]
        [ -s /usr/local/share/bash-completion/completions/nodeagentctl ]
        [ -s /etc/systemd/system/nodeagent.service ]
        sh /mnt/a/setup.sh install
        [ "$(current)" = "$first" ]
        fails 6 /opt/nodeagent/setup rollback

        # A shim of the first version lives through two upgrades, and finds its files.
        /opt/nodeagent/$first/python -c 'import time; time.sleep(300)' -m nodeagent.shim /run/nodeagent/pods/pod &
        shim=$!
        sh /mnt/b/setup.sh install
        second=$(current)
        [ "$second" != "$first" ]
        sh /mnt/c/setup.sh install
        third=$(current)
        [ -e /opt/nodeagent/$first/nodeagent ]

        [ "$(unit)" = "# of c" ]
        /opt/nodeagent/setup rollback
        [ "$(current)" = "$second" ]
        [ "$(unit)" = "# of b" ]
        echo 'cluster: [1]' >/etc/nodeagent/nodeagent.yaml
        fails 1 sh /mnt/c/setup.sh install
        [ "$(current)" = "$second" ]

        fails 6 /opt/nodeagent/setup remove
        [ -e /opt/nodeagent/bin/nodeagent ]
        kill $shim
        wait $shim || true
        rm /etc/nodeagent/nodeagent.yaml
        sh /mnt/c/setup.sh install
        [ ! -e /opt/nodeagent/$first ]  # nobody runs it any more
        fails 2 /opt/nodeagent/setup remove --now
        sleeps() { exec /opt/nodeagent/$(current)/python -c 'import time; time.sleep(300)' "$@"; }
        sleeps -m nodeagent.shim /data/run/pods/pod & # of an agent with another dirs.run
        shim=$!
        sleeps /usr/local/bin/nodeagent run --config /data/nodeagent.yaml &
        agent=$!
        mkdir -p /tmp/nodeagent-1000/local/it
        touch /tmp/nodeagent-1000/local/it/cluster.json
        sleeps -m nodeagent.shim /tmp/nodeagent-1000/local/it/n1/pods/pod & # a person's own: no reason to stay
        local=$!
        for pid in $shim $agent $local; do
            until grep -q time.sleep /proc/$pid/cmdline; do sleep 0.1; done
        done
        fails 6 /opt/nodeagent/setup remove
        kill $shim
        wait $shim || true
        fails 6 /opt/nodeagent/setup remove --drain
        [ -e /opt/nodeagent/bin/nodeagent ]
        kill $agent
        wait $agent || true
        /opt/nodeagent/setup remove
        [ ! -e /opt/nodeagent ]
        kill $local
        wait $local || true
        [ -e /etc/nodeagent/nodeagent.yaml ]
        sh /mnt/a/setup.sh install
        /opt/nodeagent/setup purge
        nothing_left
        """,
    )
    assert f"nodeagentctl {__version__}" in output
    assert "is installed already" in output
    assert "1 pods of people's own" in output


@needs_dpkg
def test_a_debian_package(bundles: Path, tmp_path: Path) -> None:
    output = inside(
        bundles,
        tmp_path,
        """
        rm -f /etc/dpkg/dpkg.cfg.d/docker  # which leaves manual pages out
        # This machine's Python need not be the distribution's.
        dpkg --force-depends -i $deb
        /usr/bin/nodeagentctl --version
        [ -s /usr/share/man/man1/nodeagentctl.1.gz ]
        [ -s /usr/share/bash-completion/completions/nodeagentctl ]
        [ -s /usr/lib/systemd/system/nodeagent.service ]
        dpkg --force-depends -i $deb
        /usr/bin/nodeagent --version
        dpkg -r nodeagent
        [ ! -e /opt/nodeagent ]
        [ -s /etc/nodeagent/nodeagent.yaml ]
        dpkg -P nodeagent
        nothing_left
        """,
    )
    assert f"nodeagentctl {__version__}" in output


@needs_dpkg
def test_a_debian_package_that_is_refused(bundles: Path, tmp_path: Path) -> None:
    """The version before stays in use, and so does its unit; it is said how to go on."""
    output = inside(
        bundles,
        tmp_path,
        """
        state() { dpkg-query -W -f '${Version} ${db:Status-Status}' nodeagent; }
        unit() { tail -n 1 /usr/lib/systemd/system/nodeagent.service; }
        rm -f /etc/dpkg/dpkg.cfg.d/docker
        dpkg --force-depends -i $deb
        first=$(current) unit=$(unit)
        echo 'cluster: [1]' >/etc/nodeagent/nodeagent.yaml
        fails 1 dpkg --force-depends -i $later_deb 2>&1
        [ "$(current)" = "$first" ]
        [ "$(unit)" = "$unit" ]
        [ "$(state)" = "$VERSION+b half-configured" ]
        rm /etc/nodeagent/nodeagent.yaml
        dpkg --force-depends --configure nodeagent
        [ "$(current)" != "$first" ]
        [ "$(unit)" = "# of b" ]
        [ "$(state)" = "$VERSION+b installed" ]
        /opt/nodeagent/setup rollback
        [ "$(current)" = "$first" ]
        [ "$(unit)" = "$unit" ]
        dpkg -P nodeagent
        nothing_left
        """.replace("$VERSION", __version__),
    )
    assert "nothing has been switched. Mend the file, then: dpkg --configure nodeagent" in output


@needs_dpkg
def test_a_debian_package_over_a_bundle(bundles: Path, tmp_path: Path) -> None:
    """The bundle's unit stayed in /etc, and came before the package's. One that an administrator wrote there stays."""
    output = inside(
        bundles,
        tmp_path,
        """
        rm -f /etc/dpkg/dpkg.cfg.d/docker
        sh /mnt/a/setup.sh install
        dpkg --force-depends -i $deb
        for path in /etc/systemd/system/nodeagent.service /etc/systemd/system/nodeagent.slice \\
            /etc/sysusers.d/nodeagent.conf /etc/tmpfiles.d/nodeagent.conf /usr/local/bin/nodeagent \\
            /etc/needrestart/conf.d/nodeagent.conf; do
            [ ! -e $path ]
        done
        [ -s /etc/needrestart/conf.d/nodeagent-deb.conf ]
        [ -s /usr/lib/systemd/system/nodeagent.service ]
        /usr/bin/nodeagent --version
        echo '[Unit]' >/etc/systemd/system/nodeagent.service
        dpkg --force-depends -i $deb
        [ -s /etc/systemd/system/nodeagent.service ]
        rm /etc/systemd/system/nodeagent.service
        dpkg -P nodeagent
        nothing_left
        """,
    )
    assert output.count("a bundle was installed here") == 1


def test_no_wheels_for_the_python_that_is_there(bundles: Path, tmp_path: Path) -> None:
    inside(
        bundles,
        tmp_path,
        """
        cp -r /mnt/a /tmp/other
        cd /tmp/other/wheels
        for wheel in pydantic_core-*; do mv $wheel $(echo $wheel | sed 's/cp3[0-9]*/cp39/g'); done
        fails 1 sh /tmp/other/setup.sh install
        [ ! -e /opt/nodeagent ]
        """,
    )


def test_an_install_that_stopped_halfway_is_removed(bundles: Path, tmp_path: Path) -> None:
    """Wherever it stopped; and where nothing is installed, nothing is removed."""
    inside(
        bundles,
        tmp_path,
        """
        sh /mnt/a/setup.sh purge
        cp -r /mnt/a /tmp/other
        rm /tmp/other/wheels/aiohttp-*
        fails 1 sh /tmp/other/setup.sh install
        [ ! -e /opt/nodeagent/bin ]
        /opt/nodeagent/setup purge
        nothing_left

        sh /mnt/a/setup.sh install
        rm /opt/nodeagent/bin
        /opt/nodeagent/setup purge
        nothing_left
        sh /mnt/a/setup.sh purge
        """,
    )
