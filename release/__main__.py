"""``python -m release``: everything a release consists of, into ``dist/``."""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
from pathlib import Path

from nodeagent import __version__
from release import bundle, deb, wheels

PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def main() -> None:
    """Build, and name what was built."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="Pythons that the nodes may have [%(default)s]")
    parser.add_argument("--out", type=Path, default=wheels.ROOT / "dist", help="folder [%(default)s]")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    machine = platform.machine()
    wheel = wheels.build(out)
    folder = out / f"nodeagent-{__version__}-linux-{machine}"
    bundle.lay_out(wheel, options.python, machine, folder)
    bundle.pack(folder, out / f"{folder.name}.tar.gz")
    if shutil.which("dpkg-deb"):
        deb.build(folder, __version__, machine, out)
    else:
        print("no dpkg-deb on this machine: no .deb", file=sys.stderr)
    shutil.rmtree(folder)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 2**20:7.1f} MiB  {path}")


if __name__ == "__main__":
    main()
