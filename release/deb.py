"""The Debian package: the bundle at a fixed place, the files that dpkg should know, and scripts that call setup.sh.

The program itself is installed by the package's script, beside the version before: dpkg would replace a version's
files under the shims that run from them.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

from release.wheels import ROOT

PLACE = "usr/lib/nodeagent"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

CONTROL = """\
Package: nodeagent
Version: {version}
Architecture: {architecture}
Maintainer: The nodeagent authors <nodeagent@localhost>
Section: admin
Priority: optional
Depends: python3 (>= 3.11), systemd (>= 247)
Suggests: redis-server (>= 6.2)
Installed-Size: {size}
Description: elastic, fault-tolerant distributed training on bare-metal GPU machines
 One agent on each node and one Redis keep distributed training alive: when a
 worker, a GPU or a node fails, the job goes on without it from its last
 checkpoint.
"""
SCRIPTS = {
    "postinst": f"""\
#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
FILES=no sh /{PLACE}/setup.sh install
""",
    "prerm": f"""\
#!/bin/sh
set -e
# An upgrade leaves the version before alone: it is in use until the next one is switched to.
[ "$1" = remove ] || exit 0
sh /{PLACE}/setup.sh remove
""",
    "postrm": """\
#!/bin/sh
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
[ "$1" = purge ] || exit 0
# As setup.sh does: what is mounted in a folder is not emptied.
while umount -l /run/nodeagent/pods 2>/dev/null; do :; done
mounts=$(cut -d' ' -f5 /proc/self/mountinfo)
for folder in /etc/nodeagent /var/lib/nodeagent /var/log/nodeagent /run/nodeagent; do
    if printf '%s\\n' "$mounts" | grep "^$folder/" >&2; then
        echo "nodeagent: that is mounted in $folder, which is left: umount -l it, then rm -rf $folder" >&2
    else
        rm -rf "$folder"
    fi
done
""",
}


def build(bundle: Path, version: str, machine: str, out: Path) -> Path:
    """``nodeagent_VERSION_ARCH.deb`` in ``out``. Raises KeyError for an unknown machine, subprocess.CalledProcessError
    where dpkg-deb refuses, FileNotFoundError where there is none."""
    tree = out / "deb"
    shutil.copytree(bundle, tree / PLACE)
    for unit in ("nodeagent.service", "nodeagent.slice"):
        _copy(bundle / unit, tree / "usr/lib/systemd/system" / unit)
    for kind in ("sysusers", "tmpfiles"):
        _copy(bundle / f"nodeagent.{kind}.conf", tree / f"usr/lib/{kind}.d/nodeagent.conf")
    # Apart from a bundle's own, which the package's script removes.
    _copy(bundle / "nodeagent.needrestart.conf", tree / "etc/needrestart/conf.d/nodeagent-deb.conf")
    for page in (bundle / "man").iterdir():
        target = tree / f"usr/share/man/man1/{page.name}.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(page.read_bytes(), mtime=0))
    _copy(bundle / "completion/bash", tree / "usr/share/bash-completion/completions/nodeagentctl")
    _copy(bundle / "completion/zsh", tree / "usr/share/zsh/vendor-completions/_nodeagentctl")
    _copy(bundle / "LICENSE", tree / "usr/share/doc/nodeagent/copyright")
    _copy(bundle / "CHANGELOG.md", tree / "usr/share/doc/nodeagent/changelog")
    for program in ("nodeagent", "nodeagentctl", "nodeagent-run"):
        link = tree / "usr/bin" / program
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"/opt/nodeagent/bin/{program}")
    architecture = ARCHITECTURES[machine]
    size = sum(path.lstat().st_size for path in tree.rglob("*")) // 1024
    control = tree / "DEBIAN"
    control.mkdir()
    (control / "control").write_text(CONTROL.format(version=version, architecture=architecture, size=size))
    for name, text in SCRIPTS.items():
        (control / name).write_text(text)
        (control / name).chmod(0o755)
    package = out / f"nodeagent_{version}_{architecture}.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(tree), str(package)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    shutil.rmtree(tree)
    return package


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
