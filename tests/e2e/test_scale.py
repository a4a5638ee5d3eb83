"""Jobs that are scaled while they train: in time, too late, twice, by name."""

from __future__ import annotations

import json
import sys

import pytest

from tests.e2e.stubborn import STUBBORN, outlived
from tests.e2e.support import Cluster, check_steps, check_undisturbed, digits_job, is_alive, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 3


def test_a_scale_out_to_more_nodes_than_there_are_disturbs_not_one_step(
    calm: Cluster, reference: dict[int, float]
) -> None:
    calm.submit(digits_job(calm.work, "wide", nodes="{min: 1, max: 6, target: 2}", steps=600, delay=0.1, workers=1))
    first = calm.until_running("wide", 2)["generation"]  # 2 where a node was ready later than the other
    calm.until_steps("wide", 10)
    workers = calm.until_workers("wide", 2)
    late = calm.ctl("scaleout", "wide", "--count", "3", "--timeout", "5s", check=4)
    assert "scale to 5 timed out after 5s: 3 of 5 nodes fit" in late.stderr
    assert "went back to 2" in late.stderr
    assert "wide: running: runs on 2 of 5 nodes: 3 of 5 nodes fit" in late.stderr, "what it waited for"
    job = calm.job("wide")
    assert (job["target"], job["scale"]["state"], job["why"]) == (2, "rolled_back", [])
    assert "scale to 5 timed out after 5s" in calm.ctl("describe", "wide").stdout
    assert len(calm.happened("JobScaleRolledBack", "wide")) == 1
    asked, back = calm.happened("JobScaled", "wide")[0], calm.happened("JobScaleRolledBack", "wide")[0]
    assert back - asked > 4, "not before its time"
    calm.until_steps("wide", 10)
    assert calm.workers("wide") == workers
    calm.ctl("stop", "wide")
    rows = read_steps(calm.work, "wide")
    check_undisturbed([row for row in rows if row["generation"] == first])
    check_steps(rows, reference)


def test_a_scale_out_is_met_once_and_its_request_counts_once(calm: Cluster, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "once", nodes="{min: 1, max: 3, target: 1}", steps=600, delay=0.1, workers=1))
    first = calm.until_running("once", 1)["generation"]
    calm.until_steps("once", 5)
    for _ in range(2):
        done = calm.ctl("scaleout", "once", "--count", "1", "--timeout", "60s", "--request-id", "more")
        assert done.stdout == "job/once scaled: trains on 2 nodes\n"
    job = calm.until_running("once", 2, above=first)
    assert (job["target"], job["generation"], job["cause"]["kind"]) == (2, first + 1, "scale")
    other = calm.ctl("scaleout", "once", "--count", "2", "--request-id", "more", check=6)
    assert "was used for another change" in other.stderr
    assert len(calm.happened("JobScaled", "once")) == 1
    calm.until_steps("once", 5)
    assert calm.job("once")["generation"] == first + 1
    calm.ctl("stop", "once")
    check_steps(read_steps(calm.work, "once"), reference)


def test_a_named_node_leaves_and_its_worker_has_the_time_it_was_given(calm: Cluster) -> None:
    folder, script = calm.work / "named", calm.work / "named.py"
    folder.mkdir()
    script.write_text(STUBBORN.format(folder=str(folder)))
    calm.submit(
        f"name: named\ncommand: {json.dumps([sys.executable, str(script)])}\nnodes: {{min: 1, max: 3, target: 3}}\n"
        "workers_per_node: 1\ngrace: 15s\n"
    )
    whole = calm.until_running("named", 3)["generation"]  # more where a node was ready later than the others
    calm.until(lambda: len(list(folder.glob(f"*.{whole}"))) == 3, 20, "all of them beat")
    first = calm.until_workers("named", 3)
    leaves = next(p["node"] for p in calm.job("named")["pods"] if p["workers"][0]["rank"] == 0)
    calm.ctl("scalein", "named", "--node", leaves, "--timeout", "4s")
    assert not any(is_alive(pid) for pid in first.values())
    for rank in range(3):
        assert 1 < outlived(folder / f"rank{rank}.{whole}") < 12, "the scale-in's time, not the job's grace"
    job = calm.until_running("named", 2, above=whole)
    assert leaves not in {p["node"] for p in job["pods"]}
    assert (job["target"], job["budget"]["used"], job["cause"]["text"][: len(leaves)]) == (2, 0, leaves)
    assert calm.nodes()[leaves] == "ready", "it is not cordoned"
    calm.ctl("scalein", "named", "--count", "1", "--timeout", "1s")
    alone = calm.until_running("named", 1, above=job["generation"])["generation"]
    refused = calm.ctl("scalein", "named", "--count", "1", check=6)
    assert "allows 1 to 3" in refused.stderr
    calm.until((folder / f"rank0.{alone}").exists, 20, "the third generation beats")
    calm.ctl("stop", "named")
    assert outlived(folder / f"rank0.{alone}") > 12, "a stop has the job's grace again"
