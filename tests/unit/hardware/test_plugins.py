"""What an agent believes of the lines that a plug-in writes, and which plug-ins it starts at all."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from nodeagent.hardware import plugins
from nodeagent.hardware.judging.judge import JudgeMemory, JudgePolicy, judge, rules
from nodeagent.hardware.plugins import PACKAGED, RESERVED, Plugin, Vendor, installed
from nodeagent.hardware.probes.process import NotUnderstoodError
from nodeagent.hardware.readings import ProbeReading, Readings
from nodeagent.model.node import Gpu

RULE = {
    "id": "acme.health", "severity": "fatal", "action": "service", "heals": "reading", "text": "it is sick",
    "source": "acme-smi", "after": 0.0, "window": 0.0, "times": 0,
}  # fmt: skip
DECLARED = {"name": "acme", "variable": "ACME_VISIBLE_DEVICES", "rules": [RULE]}
DEVICE = {"uuid": "acme-0a", "index": 0, "name": "Acme X1", "visible": "0", "looks": [["acme.health", False, ""]]}
FIRST = {"accelerator": DECLARED, "gpus": [DEVICE]}


def vendor(*expected: Gpu, offered: bool = False) -> Vendor:
    """Its probe never runs: the test speaks for it."""
    return Vendor(Plugin("acme", "acme:Acme"), {}, "python", lambda: None, expected, offered)


def fatal(of: Vendor) -> list[tuple[str, str]]:
    readings = Readings(boot="b", events=of.take_events(), accelerators=(of.reading(),))
    memory = judge(JudgeMemory(), readings, None, 1_000.0, 0.0, policy=JudgePolicy(declared=of.rules))
    return [(v.rule, v.device) for v in memory.verdicts if v.bars]


def test_devices_rules_and_variable_come_with_the_first_line() -> None:
    one = vendor()
    one.receive(FIRST)
    assert [gpu.uuid for gpu in one.last] == ["acme-0a"]
    assert one.expected["acme-0a"] == Gpu(
        uuid="acme-0a", index=0, name="Acme X1", variable="ACME_VISIBLE_DEVICES", visible="0"
    )
    assert one.rules["acme.health"].severity == "fatal"
    assert fatal(one) == []
    one.receive({"gpus": [DEVICE | {"looks": [["acme.health", True, "Health: bad"]]}]})
    assert fatal(one) == [("acme.health", "acme-0a")]


def test_which_numa_node_a_device_is_near_to_is_kept() -> None:
    one = vendor()
    one.receive({"accelerator": DECLARED, "gpus": [DEVICE | {"numa": 1}]})
    assert one.expected["acme-0a"].numa == 1
    assert vendor(one.expected["acme-0a"], offered=True).last[0].numa == 1


def test_an_event_makes_a_declared_rule_fire() -> None:
    one = vendor()
    one.receive(FIRST)
    one.receive({"events": [["acme-0a", "acme.health", 1e18, 2, "link down"]]})
    assert fatal(one) == [("acme.health", "acme-0a")]
    assert one.take_events() == (), "each event is judged once"


LIES: list[dict[str, Any]] = [
    {"gpus": [DEVICE | {"uuid": "GPU-a"}]},
    {"gpus": [DEVICE | {"uuid": "cpu0"}]},
    {"gpus": [DEVICE | {"uuid": "acme-\n"}]},
    {"gpus": [DEVICE | {"uuid": "acme-" + "x" * 200}]},
    {"gpus": [DEVICE | {"index": -1}]},
    {"gpus": [DEVICE | {"temperature": "hot"}]},
    {"gpus": [DEVICE | {"temperature": float("nan")}]},
    {"gpus": [DEVICE | {"memory_used": 10**400}]},
    {"gpus": [DEVICE | {"name": "x" * 300}]},
    {"gpus": [DEVICE | {"visible": "0,1"}]},
    {"gpus": [DEVICE | {"processes": [[1, 1]] * 2000}]},
    {"gpus": [DEVICE | {"looks": [["nvml.lost", True, ""]]}]},
    {"gpus": [DEVICE | {"looks": [["acme.health", "yes", ""]]}]},
    {"gpus": [DEVICE, DEVICE]},
    {"gpus": [DEVICE | {"uuid": f"acme-{n}"} for n in range(65)]},
    {"gpus": {"uuid": "acme-1"}},
    {"gpus": [7]},
    {"events": [["acme-0a", "xid.79", 1.0, 1, ""]]},
    {"events": [["acme-0a", 79, 1.0, 1, ""]]},
    {"events": [["acme-9", "acme.health", 1.0, 1, ""]]},
    {"events": [["acme-0a", "acme.health", "now", 1, ""]]},
    {"events": [["acme-0a", "acme.health", 1.0, -1, ""]]},
    {"events": [["acme-0a", "acme.health"]]},
    {"accelerator": DECLARED | {"name": "nvidia"}},
    {"accelerator": DECLARED | {"variable": "LD_PRELOAD=x"}},
    {"accelerator": DECLARED | {"rules": [RULE | {"id": "xid.79"}]}},
    {"accelerator": DECLARED | {"rules": [RULE | {"severity": "worst"}]}},
    {"accelerator": DECLARED | {"rules": [RULE | {"text": "x" * 300}]}},
    {"accelerator": DECLARED | {"rules": [RULE] * 65}},
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie)[:60])
def test_a_line_that_cannot_be_is_refused_whole(lie: dict[str, Any]) -> None:
    one = vendor()
    one.receive(FIRST)
    before = (one.devices, one.reading(), one.rules, dict(one.expected))
    with pytest.raises(NotUnderstoodError):
        one.receive(lie)
    assert (one.devices, one.reading(), one.rules, dict(one.expected)) == before
    assert one.take_events() == ()


def test_after_a_restart_the_devices_of_this_boot_are_there_until_the_plug_in_says_otherwise() -> None:
    known = Gpu(uuid="acme-0a", index=0, name="Acme X1", variable="ACME_VISIBLE_DEVICES", visible="0")
    one = vendor(known, offered=True)
    assert [(gpu.uuid, gpu.visible) for gpu in one.last] == [("acme-0a", "0")]
    assert one.reading().devices is None
    one.receive({"accelerator": DECLARED, "gpus": []})
    assert one.last == ()
    assert not vendor(known).last, "of an earlier boot nothing is offered"


def test_a_silent_plug_in_says_so_and_its_devices_stay_known() -> None:
    one = vendor()
    one.receive(FIRST)
    one.probe.reading = ProbeReading("acme", missed=2)
    assert one.reading().devices is None
    assert "acme: 2 deadlines" in one.reading().problem
    assert [gpu.uuid for gpu in one.last] == ["acme-0a"]


def test_a_device_that_is_gone_is_forgotten_on_an_operators_word_alone() -> None:
    one = vendor()
    one.receive(FIRST)
    one.forget("acme-0a")
    assert "acme-0a" in one.expected, "it is there"
    one.receive({"gpus": []})
    one.forget("acme-0a")
    assert one.expected == {}


def test_no_name_of_a_plug_in_makes_its_rules_look_like_others() -> None:
    assert {rule.id.partition(".")[0] for rule in rules()} <= RESERVED


def test_entry_points_are_listed_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("acme", "no.such.module:Acme", plugins.GROUP),
        EntryPoint("xid", "no.such.module:Xid", plugins.GROUP),
        EntryPoint("A b", "no.such.module:B", plugins.GROUP),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == plugins.GROUP else [])
    assert installed() == (*PACKAGED, Plugin("acme", "no.such.module:Acme"))
    assert not replace(installed()[-1]).packaged, "it is started with its site's packages"
