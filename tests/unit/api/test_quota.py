"""Limits as they are shown: the values in force, and what of them the owner of a job uses."""

from __future__ import annotations

import grp
import os
from pathlib import Path

from nodeagent.api.auth import UserDatabase
from nodeagent.api.limits import Usage, limits_json, owner_json
from nodeagent.model.jobspec import Submitter
from nodeagent.spec.sections import LimitsConfig
from tests.unit.api.fakes import FakeView, spec

ALICE = 54321


def test_every_limit_is_shown_with_its_value() -> None:
    shown = limits_json(LimitsConfig(jobs=7, restarts_per_job=5))
    assert set(shown) == set(LimitsConfig.model_fields)
    assert (shown["jobs"], shown["job_bytes"], shown["restarts_per_job"], shown["nodes_per_job"]) == (
        7, 16 * 1024**2, 5, None,
    )  # fmt: skip


async def test_what_the_owner_of_a_job_uses(tmp_path: Path) -> None:
    view, usage, names = FakeView(tmp_path), Usage(), UserDatabase(lambda _uid: "alice")
    await view.join()
    await view.store.submit("u1", spec("one"), ALICE, 1.0, "alice", "r1")
    await view.store.submit("u2", spec("two"), ALICE, 1.0, "alice", "r2")
    await view.store.submit("u3", spec("other"), ALICE + 1, 1.0, "bob", "r3")
    await view.refresh()
    await view.end(view.job("two"), "stopped", "by hand")
    await view.refresh()
    assert usage.begin(ALICE, view.config.limits, follows=True) == ""
    await names.learn([ALICE])
    shown = await owner_json(view, usage, names, view.job("one"))
    assert shown is not None
    size = sum(len(view.job(name).spec.to_json()) for name in ("one", "two"))
    assert shown["used"] == {"jobs": 1, "job_bytes": size, "concurrent": 1, "followers": 1}
    assert (shown["owner"], shown["node"], shown["values"]["jobs"]) == ("alice", "n1", 100)
    other = await owner_json(view, usage, names, view.job("other"))
    assert other is not None
    assert other["used"]["followers"] == 0


async def test_an_owner_without_limits(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    view, names = FakeView(tmp_path, operators=group), UserDatabase(lambda _uid: "root")
    await view.join()
    operator = Submitter(user="root", uid=ALICE, gid=os.getgid(), host="n1", cwd="/tmp")
    await view.store.submit("u1", spec("one"), 0, 1.0, "root", "r1")
    await view.store.submit("u2", spec("two", submitter=operator), ALICE, 1.0, "root", "r2")
    await view.refresh()
    assert await owner_json(view, Usage(), names, view.job("one")) is None
    assert await owner_json(view, Usage(), names, view.job("two")) is None
