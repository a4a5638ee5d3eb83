"""What this machine is expected to have: GPUs by name or by slot, NVLinks and network ports, as far as they were seen
once; a person does without some of them.

Values only: each change makes a new one. Must never look at the machine, judge, or keep anything by itself: the monitor
reads, asks and saves. A plug-in's devices are with ``plugins.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nodeagent.hardware.judging.rules import MISSING, NVML_BROKEN, UNLISTED
from nodeagent.hardware.readings import GpuReading
from nodeagent.model.node import Gpu


@dataclass(frozen=True, slots=True)
class Seen:
    """What is kept of it: a boot that finds less is not taken for a machine that has less."""

    gpus: tuple[str, ...] = ()
    """UUIDs, of every boot."""
    buses: Mapping[str, str] = field(default_factory=dict)
    """UUID to bus id."""
    links: Mapping[str, int] = field(default_factory=dict)
    """UUID to the most NVLinks that were up at a time in this boot."""
    ports: tuple[str, ...] = ()
    """Network ports that were up, of every boot."""
    renounced: tuple[str, ...] = ()
    """PCI addresses of GPUs that a person does without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What the config and the PCI bus tell, before any driver is asked."""

    configured: Sequence[str] | None = None
    """UUIDs that the config names: they are expected whatever is found, and no other GPU of the machine is this node's
    business. None: every one is."""
    slots: Sequence[str] = ()
    """PCI addresses of the GPUs that are installed, where no driver listed one at the start."""
    models: Mapping[str, str] = field(default_factory=dict)
    """PCI address to model of each GPU that is installed."""

    def has(self, uuid: str) -> bool:
        """Whether such a GPU of the machine is this node's business."""
        return self.configured is None or uuid in self.configured


@dataclass(frozen=True, slots=True)
class Expected:
    """All of it at one moment."""

    installed: Installed
    gpus: tuple[str, ...] = ()
    """UUIDs that are expected here."""
    buses: Mapping[str, str] = field(default_factory=dict)
    """Bus id to UUID of every GPU that was read: a driver that hangs names none."""
    listed: frozenset[str] | None = None
    """Bus ids of the GPUs that the driver listed the last time; None: it has not answered."""
    links: Mapping[str, int] = field(default_factory=dict)
    """As in ``Seen``."""
    ports: tuple[str, ...] = ()
    """Network ports that are expected to be up."""
    accepted: frozenset[str] = frozenset()
    """Ports that are down, and not expected to be up any more."""
    renounced: frozenset[str] = frozenset()
    """As in ``Seen``."""

    @classmethod
    def restored(cls, installed: Installed, seen: Seen, same_boot: bool) -> Expected:
        """At the start, after what was seen, in this boot or before it."""
        gpus = tuple(seen.gpus if installed.configured is None else installed.configured)
        return cls(
            installed,
            gpus,
            {bus: uuid for uuid, bus in seen.buses.items() if uuid in gpus},
            links=seen.links if same_boot else {},
            ports=tuple(port for port in seen.ports if "/" in port),  # an interface: as long as the config names it
            renounced=frozenset(seen.renounced),
        )

    @property
    def seen(self) -> Seen:
        """What is to be kept of it."""
        buses = {uuid: bus for bus, uuid in self.buses.items() if uuid in self.gpus}
        return Seen(self.gpus, buses, self.links, self.ports, tuple(sorted(self.renounced)))

    @property
    def undriven(self) -> tuple[str, ...]:
        """PCI addresses, which stand for the GPUs of a machine of which no driver ever listed one."""
        return () if self.gpus else tuple(slot for slot in self.installed.slots if slot not in self.renounced)

    @property
    def slots(self) -> Mapping[str, bool]:
        """Whether the driver lists the GPU at a PCI address, for each that is installed and of the very model of one
        that it lists: of others it may know nothing. Without those that are missed by their names. Until it answers,
        it lists what it did before."""
        models, known = self.installed.models, {bus for bus, uuid in self.buses.items() if uuid in self.gpus}
        listed = known if self.listed is None else self.listed
        driven, missed = {models.get(pci) for pci in listed}, known - listed
        return {
            slot: slot in listed
            for slot, model in models.items()
            if "" not in listed and model in driven and slot not in missed and slot not in self.renounced
        }

    def unlisted(self, listed: Collection[str], ignored: Collection[str]) -> tuple[Gpu, ...]:
        """Those that are not among these, whose number is not known; without those that only an ignored rule would
        miss."""
        kinds = (
            (MISSING, self.gpus),
            (NVML_BROKEN, self.undriven),
            (UNLISTED, [slot for slot, there in self.slots.items() if not there]),
        )
        return tuple(
            Gpu(uuid=name, index=0)
            for rule, names in kinds if rule.id not in ignored for name in names if name not in listed
        )  # fmt: skip

    def named(self, device: str) -> str:
        """The UUID of the GPU at this bus id, where that is known; else what was given."""
        return self.buses.get(device, device)

    def own(self, every: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
        """Those that are this node's business, with what is known of their NVLinks since the boot."""
        return tuple(
            gpu if gpu.links_up is None else replace(gpu, links_once=self.links.get(gpu.uuid))
            for gpu in every if self.installed.has(gpu.uuid)
        )  # fmt: skip

    def replaced(self, every: Collection[GpuReading]) -> frozenset[str]:
        """GPUs in whose slots the driver lists others, which are new here; none of those that the config names."""
        if self.installed.configured is not None:
            return frozenset()
        fresh = {gpu.pci for gpu in every if gpu.uuid not in self.gpus}
        return frozenset(uuid for bus, uuid in self.buses.items() if bus in fresh) - {gpu.uuid for gpu in every}

    def read(self, every: Collection[GpuReading]) -> Expected:
        """Once the driver has listed these, other nodes' among them."""
        own, gone = [gpu for gpu in every if self.installed.has(gpu.uuid)], self.replaced(every)
        up = {gpu.uuid: max(gpu.links_up, self.links.get(gpu.uuid, 0)) for gpu in own if gpu.links_up is not None}
        return replace(
            self,
            gpus=(
                *(uuid for uuid in self.gpus if uuid not in gone),
                *(gpu.uuid for gpu in own if gpu.uuid not in self.gpus),
            ),
            buses={**self.buses, **{gpu.pci: gpu.uuid for gpu in every if gpu.pci}},
            listed=frozenset(gpu.pci for gpu in every),
            links={**self.links, **up},
            renounced=self.renounced - {gpu.pci for gpu in every},
        )

    def read_ports(self, up: Iterable[str], down: Collection[str]) -> Expected:
        """Once these ports were read. What is up is expected to stay so, even if it was given up before."""
        return replace(self, ports=tuple(sorted({*self.ports, *up})), accepted=self.accepted.intersection(down))

    def without_gpu(self, uuid: str) -> Expected:
        """A person does without this one, which the driver does not list."""
        named = self.installed.configured is not None
        one = self if named else replace(self, gpus=tuple(gpu for gpu in self.gpus if gpu != uuid))
        return one.without_slots(bus for bus, gpu in self.buses.items() if gpu == uuid)

    def without_slots(self, slots: Iterable[str]) -> Expected:
        """A person does without the GPUs at these PCI addresses."""
        return replace(self, renounced=self.renounced.union(slots))

    def without_driver(self) -> Expected:
        """A person takes the machine, which has no driver, as one without GPUs."""
        return replace(self, gpus=(), listed=None).without_slots(self.installed.slots)

    def without_ports(self, down: Iterable[str]) -> Expected:
        """A person does without these ports, which are down."""
        accepted = self.accepted.union(down)
        return replace(self, accepted=accepted, ports=tuple(port for port in self.ports if port not in accepted))
