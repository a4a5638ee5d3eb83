"""Whether there is a driver to ask, and which GPUs a node starts with. The driver is asked in a process of its own,
since it can hang, and the start waits for it a moment only: GPUs that are found later join later, by the monitor.

Owns one file: the GPUs of this boot, so that a restart under a hung driver still knows what its workers run on.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nodeagent.hardware.plugins import NVIDIA
from nodeagent.hardware.probes.process import packages, reader_command
from nodeagent.model.node import Gpu
from nodeagent.osutil.commands import end
from nodeagent.osutil.linux import in_container, open_plain, write_atomic

if TYPE_CHECKING:  # the tool lists GPUs, too, and starts fast
    from nodeagent.spec.agentconfig import AgentConfig

SIGNS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Without any of these there is no NVIDIA driver to ask, and an agent's restart need not wait for the answer."""
DRIVER_LIMIT = 1.0
"""Seconds that a start waits for the driver."""
FIRST_START_LIMIT = 30.0
"""The same at the first start of a boot, and of a local cluster. Nothing runs here that a late start could end, and
without persistence mode each GPU takes seconds to come up: who joined before would be taken for a node without GPUs."""
DEADLINE = 5.0
"""Seconds where nobody looks after the node's health, so that no GPU could join later."""
FILE = "gpus.json"
"""In the ``state`` folder."""
_NVIDIA, _VGA, _3D = "0x10de", "0x0300", "0x0302"
"""As the PCI bus names the vendor, and the classes of devices that draw and of those that only compute."""


def asked_for_gpus(config: AgentConfig) -> bool:
    """The driver is asked where there is one, or where the config names GPUs."""
    if isinstance(config.node.gpus, tuple):
        return bool(config.node.gpus)
    return config.node.gpus == "auto" and any(sign.exists() for sign in SIGNS)


def installed_slots() -> Mapping[str, str]:
    """PCI address (``0000:3b:00``) to model of the GPUs that are this machine's own; none in a container, which sees
    those of its host, whoever has them."""
    return {} if in_container() else on_the_bus(Path("/sys"))


def on_the_bus(sysfs: Path) -> Mapping[str, str]:
    """PCI address to model of NVIDIA's GPUs that its driver has or could have: the kernel lists them without any. Not
    those that another driver has: a virtual machine's (vfio-pci), or nouveau's that may have a display."""
    try:
        devices = sorted((sysfs / "bus/pci/devices").iterdir())
    except OSError:  # a machine without PCI
        return {}
    return {device.name.partition(".")[0]: model for device in devices if (model := _own_gpu(device))}


def _own_gpu(device: Path) -> str:
    """Its model (``0x2335``); empty if it is none."""
    try:
        if (device / "vendor").read_text().strip() != _NVIDIA or (device / "physfn").exists():  # a slice of another
            return ""
        kind, link, model = (device / "class").read_text()[:6], device / "driver", (device / "device").read_text()
        driver = link.readlink().name if link.is_symlink() else "nvidia"
    except OSError:  # taken out just now
        return ""
    own = kind in (_VGA, _3D) and (driver == "nvidia" or (driver, kind) == ("nouveau", _3D))
    return model.strip() if own else ""


async def find_gpus(
    config: AgentConfig, boot: str, environ: Mapping[str, str], *, first: bool
) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs this node offers, and a sentence if they could not be read. ``first``: no agent ran before in this
    boot."""
    if not asked_for_gpus(config):
        return (), ""
    file = config.dirs.state / FILE
    found, problem = await _ask(
        environ, FIRST_START_LIMIT if first else DEADLINE if config.health is None else DRIVER_LIMIT
    )
    why = "not found" if found is not None else "the driver has not listed it yet"
    if found is None:
        found = _remembered(file, boot)
        problem += f"; {len(found)} are known from before" if found else "; none is offered until it does"
    else:
        problem = _remember(file, boot, found)
    if config.node.gpus == "auto":
        return found, problem
    by_uuid = {g.uuid: g for g in found}
    wanted = config.node.gpus
    missing = [u for u in wanted if u not in by_uuid]
    gpus = tuple(by_uuid.get(u) or Gpu(uuid=u, index=i, healthy=False, why=why) for i, u in enumerate(wanted))
    return gpus, problem or (f"GPUs of the config not found: {', '.join(missing)}" if missing else "")


async def _ask(environ: Mapping[str, str], patience: float) -> tuple[tuple[Gpu, ...] | None, str]:
    """What the driver lists; None, and why: it does not, or one GPU that is lost spoils the list."""
    process = await asyncio.create_subprocess_exec(
        *reader_command(sys.executable, NVIDIA, None), env={**environ, "PYTHONPATH": packages()},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(patience):
            out, _ = await process.communicate()
    except TimeoutError:
        await end(process)
        return None, f"GPUs unknown: the driver did not answer within {patience:g} s"
    return _listed(out)


def installed_gpus(command: Sequence[str] | None = None) -> tuple[list[str], str]:
    """The UUIDs of this machine's GPUs for a development cluster on it, and, when there is a driver that did not answer
    well, why there are none. ``command``: another one in tests. Must never fail: no answer is no GPU."""
    try:
        answer = subprocess.run(
            command or reader_command(sys.executable, NVIDIA, None), env={**os.environ, "PYTHONPATH": packages()},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
            timeout=FIRST_START_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        why = f"NVML did not answer within {FIRST_START_LIMIT:g} s"
        return [], f"{why}: the local nodes have no GPUs (see `nodeagentctl doctor`)"
    found, problem = _listed(answer.stdout)
    return [gpu.uuid for gpu in found or ()], f"{problem}: the local nodes have no GPUs" if problem else ""


def _listed(out: bytes) -> tuple[tuple[Gpu, ...] | None, str]:
    """The GPUs of a line of the reader; None, and why, where it failed."""
    try:
        line = json.loads(out)
        if "problem" in line:
            return ((), "") if line["absent"] else (None, f"the GPU query failed: {line['problem']}")
        return tuple(_gpu(gpu["uuid"], gpu["index"], gpu["name"], gpu.get("numa")) for gpu in line["gpus"]), ""
    except (ValueError, KeyError, TypeError):
        return None, "the GPU query failed: it ended without an answer"


def _gpu(uuid: str, index: int, name: str, numa: int | None) -> Gpu:
    return Gpu(uuid=uuid, index=index, name=name, numa=numa)


def _remember(file: Path, boot: str, gpus: tuple[Gpu, ...]) -> str:
    """For the next start; what went wrong with it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            file, json.dumps({"boot": boot, "gpus": [[g.uuid, g.index, g.name, g.numa] for g in gpus]}), durable=False
        )
    except OSError as error:
        return f"{file}: {error.strerror}"
    return ""


def _remembered(file: Path, boot: str) -> tuple[Gpu, ...]:
    """Those of this boot; none if they are not known."""
    try:
        with open_plain(file) as opened:
            kept = json.loads(opened.read())
        return tuple(_gpu(*known) for known in kept["gpus"]) if kept["boot"] == boot else ()
    except (OSError, ValueError, KeyError, TypeError):  # nothing known: the driver is asked again anyway
        return ()
