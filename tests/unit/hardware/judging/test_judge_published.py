"""What other nodes hear: bounded, the worst first, and not another for each repetition."""

from __future__ import annotations

from nodeagent.hardware.judging.judge import MOST_PUBLISHED, RAW, JudgeMemory, judge, offered_gpus, published
from nodeagent.hardware.readings import GpuReading, Readings
from nodeagent.model.health import Severity, Verdict
from nodeagent.model.node import Gpu

KNOWN = (Gpu(uuid="GPU-a", index=0, name="H100"), Gpu(uuid="GPU-b", index=1, name="H100"))


def verdict(
    rule: str, device: str = "GPU-a", severity: Severity = "fatal", dry: bool = False, **more: object
) -> Verdict:
    base = Verdict(
        rule=rule, device=device, severity=severity, action="reboot", text="it is lost", since=100.0, seen=100.0,
        dry_run=dry,
    )  # fmt: skip
    return base.model_copy(update=more)


def test_the_worst_come_first_and_the_harmless_are_left_out() -> None:
    many = [verdict(f"i{n}", severity="info") for n in range(MOST_PUBLISHED)]
    found = published([*many, verdict("d", severity="degraded"), verdict("f"), verdict("dry", dry=True)])
    assert [v.rule for v in found][:3] == ["f", "dry", "d"]
    assert len(found) == MOST_PUBLISHED


def test_repetitions_are_no_news_until_there_are_ten_times_as_many() -> None:
    first = published([verdict("f", count=10, seen=7_300.0)])
    assert published([verdict("f", count=99, seen=10_000.0)]) == first
    assert published([verdict("f", count=100, seen=10_000.0)]) != first
    assert published([verdict("f", count=10, seen=10_900.0)]) != first


def test_what_was_never_seen_again_was_seen_at_its_beginning_and_long_lines_are_cut() -> None:
    (one,) = published([verdict("f", raw="x" * 1000)])
    assert (one.seen, one.count, len(one.raw)) == (100.0, 1, RAW)


def test_a_gpu_with_a_fatal_verdict_is_left_out_and_says_why() -> None:
    first, second = offered_gpus(KNOWN, (), [verdict("xid.79"), verdict("z", "GPU-b", "degraded")], may_join=True)
    assert (first.healthy, first.why) == (False, "it is lost (xid.79)")
    assert second.healthy


def test_a_gpu_that_is_cut_into_slices_is_given_last() -> None:
    """A worker that is given it has one slice, at most."""
    memory = judge(JudgeMemory(), Readings("b1", gpus=(GpuReading("GPU-a", 0, mig=True),)), None, 1000.0, 0.0)
    (found,) = memory.verdicts
    assert (found.rule, found.severity) == ("gpu.mig", "degraded")
    assert offered_gpus(KNOWN, (), memory.verdicts, may_join=True) == KNOWN


def test_a_gpu_that_somebody_else_uses_or_that_is_being_checked_is_not_counted_as_free() -> None:
    used = verdict("gpu.foreign", severity="degraded", raw="pid 8 (slurm: python a.py)")
    first, second = offered_gpus(KNOWN, (), [used], may_join=True, held=("GPU-b",))
    assert (first.healthy, first.why) == (
        False, "used by somebody else: pid 8 (slurm: python a.py) (gpu.foreign)",
    )  # fmt: skip
    assert (second.healthy, second.why) == (False, "it is being checked (nodeagentctl diag)")
    beside = verdict("gpu.shared", severity="degraded", raw="pid 8")
    dry = used.model_copy(update={"dry_run": True})
    assert offered_gpus(KNOWN, (), [beside, dry], may_join=True) == KNOWN


def test_it_stays_out_until_its_probation_is_over_and_a_dry_run_leaves_nothing_out() -> None:
    on_probation = verdict("xid.79", stage="probation", until=200.0)
    assert offered_gpus(KNOWN, (), [on_probation], may_join=True)[0].why == "it is lost (xid.79), on probation"
    assert offered_gpus(KNOWN, (), [verdict("xid.79", dry=True)], may_join=True) == KNOWN
    assert offered_gpus(KNOWN, (), [verdict("probe.nvml.hung", "")], may_join=True) == KNOWN


def test_of_what_nobody_can_tell_no_work_is_given_and_nothing_is_taken() -> None:
    """A driver that is not loaded, or a GPU that cannot be read, was taken for sound."""
    one = verdict("nvml.unreadable", severity="unknown", text="the GPU cannot be read")
    first, second = offered_gpus(KNOWN, (), [one], may_join=True)
    assert (first.healthy, first.why) == (False, "the GPU cannot be read (nvml.unreadable)")
    assert second.healthy
    assert not one.bars
    every = verdict("probe.nvml.broken", "", severity="unknown", text="GPUs unknown")
    assert [(g.healthy, g.why) for g in offered_gpus(KNOWN, (), [every], may_join=True)] == [
        (False, "GPUs unknown (probe.nvml.broken)")
    ] * 2
    assert offered_gpus(KNOWN, (), [every.model_copy(update={"dry_run": True})], may_join=True) == KNOWN
    assert offered_gpus(KNOWN, (), [one.model_copy(update={"stage": "repaired"})], may_join=True) == KNOWN


def test_a_gpu_that_is_found_late_joins_unless_the_config_names_others() -> None:
    seen = (GpuReading("GPU-a", 0, name="H100"), GpuReading("GPU-c", 2, name="H100"))
    assert [g.uuid for g in offered_gpus(KNOWN, seen, (), may_join=True)] == ["GPU-a", "GPU-b", "GPU-c"]
    lost = (Gpu(uuid="GPU-a", index=0, healthy=False, why="not found"),)
    assert offered_gpus(lost, seen, (), may_join=False) == (Gpu(uuid="GPU-a", index=0, name="H100"),)


def test_a_gpu_that_belongs_to_the_machine_and_is_not_there_counts_as_installed() -> None:
    """A boot that found 7 of 8 was offered as a sound machine of 7, and one that found none as one without GPUs."""
    missing = (Gpu(uuid="GPU-a", index=0), Gpu(uuid="GPU-c", index=0))
    found = offered_gpus(KNOWN, (), [], may_join=True, unlisted=missing)
    assert [(g.uuid, g.index, g.healthy) for g in found] == [
        ("GPU-a", 0, True), ("GPU-b", 1, True), ("GPU-c", 2, False),
    ]  # fmt: skip
    assert found[2].why == "its driver has not listed it yet"
    gone = verdict("nvml.missing", "GPU-c", text="the GPU is not there any more")
    assert offered_gpus(KNOWN, (), [gone], may_join=True, unlisted=missing)[2].why == (
        "the GPU is not there any more (nvml.missing)"
    )
    broken = verdict("probe.nvml.broken", "", severity="unknown", text="GPUs unknown")
    assert [(g.index, g.healthy, g.why) for g in offered_gpus((), (), [broken], may_join=True, unlisted=missing)] == [
        (0, False, "GPUs unknown (probe.nvml.broken)"), (1, False, "GPUs unknown (probe.nvml.broken)"),
    ]  # fmt: skip


def test_which_numa_node_a_gpu_is_near_to_is_published() -> None:
    seen = (GpuReading("GPU-a", 0, name="H100", numa=1), GpuReading("GPU-b", 1, name="H100"))
    assert [gpu.numa for gpu in offered_gpus(KNOWN, seen, [], may_join=True)] == [1, None]
