"""What a worker's environment says, under nodeagent, under torchrun and under nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.train.context import Context, context

OURS = {
    "NODEAGENT_JOB": "resnet50", "NODEAGENT_NODE": "n7", "NODEAGENT_GENERATION": "8", "NODEAGENT_RESTARTS": "3",
    "NODEAGENT_REASON": "rank 3 died", "NODEAGENT_FAULTY": '{"nodes": {"n2": "silent"}, "devices": {}}',
    "NODEAGENT_CHECKPOINT_DIR": "/shared/ckpt", "NODEAGENT_CHECKPOINT": "c7",
    "TORCHELASTIC_RUN_ID": "abc", "RANK": "5", "LOCAL_RANK": "1",
    "GROUP_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "9",
}  # fmt: skip


def test_under_nodeagent() -> None:
    assert context(OURS) == Context(
        job="resnet50", uid="abc", node="n7", generation=8, restarts=3, reason="rank 3 died",
        faulty={"nodes": {"n2": "silent"}, "devices": {}}, rank=5, local_rank=1, group_rank=2, world_size=8,
        local_world_size=2, checkpoint_dir=Path("/shared/ckpt"), checkpoint="c7",
    )  # fmt: skip
    assert context(OURS).managed


def test_under_torchrun() -> None:
    found = context({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "RANK": "1", "WORLD_SIZE": "2"})
    assert found == Context(uid="none", restarts=2, rank=1, world_size=2)
    assert not found.managed


def test_under_nothing() -> None:
    assert context({}) == Context()


def test_a_broken_environment_is_named() -> None:
    with pytest.raises(ValueError, match="RANK='one'"):
        context({"RANK": "one"})
