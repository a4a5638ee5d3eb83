"""docs/protocol-invariants.md: its cases hold of what ships, and the places that it names are there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.lease.lending import Ask, answer
from nodeagent.model.timing import Timing
from tests.inprocess.server import Server
from tests.unit.agent.failsafe_support import reported_of
from tests.unit.plan.build import life, make_cluster, make_generation, make_job

ROOT = Path(__file__).parents[2]
CODE = ROOT / "nodeagent"
SCRIPTS = CODE / "store" / "scripts"
TEXT = (ROOT / "docs/protocol-invariants.md").read_text()
PLACE = re.compile(r"`([\w/]+\.(?:lua|py))([#!~])([^`]+)`")
PATTERNS = {"#": r"\b{}\(", "!": r"refuse\('{}'", "~": "{}"}
NOW = 200_000_000
"""Served ms: a day and more since the beginning."""


def rows(name: str) -> list[list[str]]:
    """Of one table of cases."""
    lines = TEXT[TEXT.index(f"<!-- cases: {name} -->\n") :].splitlines()[3:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def there(file: str, kind: str, what: str) -> bool:
    path = SCRIPTS / file if file.endswith(".lua") else CODE / file
    return path.is_file() and re.search(PATTERNS[kind].format(re.escape(what)), path.read_text()) is not None


def run(body: str, **arguments: object) -> object:
    """Behind the preludes, whose own names it may set; served time is NOW."""
    server = Server(lambda: 1_000_000.0)
    return server.run("served, amnesty, recover = 200000000, 0, 0\n" + body, **arguments)


# --- the document


def test_every_place_is_there() -> None:
    places = PLACE.findall(TEXT)
    assert len(places) > 40
    assert [place for place in places if not there(*place)] == []


def test_a_place_that_is_not_there_is_found_out() -> None:
    assert there("_clock.lua", "#", "lapsed")
    assert not there("_clock.lua", "#", "lapse")
    assert not there("join.lua", "!", "busy")
    assert not there("joins.lua", "!", "lost")


def test_every_rule_says_who_keeps_it() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[2:]
    assert all("| part | kept by |" in section and "\n    " in section for section in sections)
    kept = [row for section in sections for row in section[section.index("| part | kept by |") :].splitlines()[2:]]
    assert all(PLACE.search(row) for row in kept if row.startswith("|"))


def test_every_table_of_cases_is_run() -> None:
    assert set(re.findall(r"<!-- cases: (\w+) -->", TEXT)) == set(CASES)
    assert all(len({row[-1] for row in rows(name)}) == 2 for name in CASES), "a table has cases of both kinds"


# --- the cases


def lapsed(left: str, lost: str, ends: str, served: str, shelter: str) -> bool:
    return bool(run(
        """
        node_save({ id = 'n', life = 'a', start = '1', left = A.left, lost = A.lost })
        if A.ends then redis.call('ZADD', LEASE, A.ends, 'n') end
        served, amnesty, recover = A.served, A.shelter, 0
        return lapsed('n') and 1 or 0
        """,
        left=str(int(left == "yes")), lost=str(int(lost == "yes")), served=int(served), shelter=int(shelter),
        **({} if ends == "-" else {"ends": int(ends)}),
    ))  # fmt: skip


def active(acks: str, lives: str, holders: str, failsafe_members: str) -> bool:
    """Of the members m1 and m2; the failsafe members are k1 and k2."""
    member = {"life": "a", "group_rank": 0, "devices": []}
    job = {"uid": "u", "name": "j", "active_number": "1", **{f"member:{m}": json.dumps(member) for m in ("m1", "m2")}}
    if acks == "one is missing":
        job["missing:m2"] = '"a"'
    if holders == "one":
        job["holder:h"] = json.dumps({"life": "a", "devices": []})
    if failsafe_members != "none":
        job |= {f"failsafe_member:{k}": '"a"' for k in ("k1", "k2")}
        job["generation_released"] = str(int(failsafe_members == "one let go"))
    return run(
        """
        for _, id in ipairs({ 'm1', 'm2' }) do
          node_save({ id = id, life = 'a', start = '1', left = '0', lost = '0' })
          redis.call('ZADD', LEASE, served + 1000, id)
        end
        if A.lives == 'one lapsed' then redis.call('ZADD', LEASE, served, 'm2') end
        if A.lives == 'one came back with a new life' then
          local other = copied(node_read('m2'))
          other.life = 'b'
          node_save(other)
        end
        return not_ready(A.job) or 'ready'
        """,
        job=job, lives=lives,
    ) == "ready"  # fmt: skip


def lend(generation: str, failsafe_members: str, asker: str, renewed: str) -> bool:
    newer = generation == "a newer one"
    state = generation if generation in ("forming", "ended") else "active"
    current = make_generation(["n1", "n2"], number=3 if newer else 2, state=state)  # type: ignore[arg-type]
    kept = {n: life(n) for n in ("n1", "n2")}
    job = make_job("running", current).model_copy(update={"failsafe_members": kept})
    if failsafe_members == "without this node":
        kept = {"n2": life("n2")}
        job = job.model_copy(update={"failsafe_members": kept})
    known = reported_of(make_cluster(["n1", "n2"], job), "n1")
    token = make_generation(["n1", "n2"], number=2).token
    asked = Ask(
        uid=job.uid, token=(token.number, token.id), node="n9" if asker == "no member" else "n2",
        failsafe_members=kept | {"n3": life("n3")} if failsafe_members == "others" else kept,
        life="earlier" if asker == "a member's earlier life" else life("n2"),
    )  # fmt: skip
    return answer(known, asked._replace(to="n1", to_life=life("n1")), 60.0 if renewed == "long ago" else 0.1, 0.75).yes


def free(holders: str, received: str, ended: str) -> bool:
    ago = {"0": 0, "a day and more": NOW, "-": 0}
    job = {"uid": "u", "name": "j", "since": str(NOW - ago[ended])}
    if holders != "none":
        job["holder:h"] = json.dumps({"life": "b" if holders == "one of an earlier life" else "a", "devices": []})
    if received != "-":
        job["failsafe_member:k"] = '"a"'
    return run(
        """
        lease_ms, meta.limit = 3000, A.limit
        for _, id in ipairs({ 'h', 'k' }) do
          node_save({ id = id, life = 'a', start = '1', left = '0', lost = '0' })
        end
        redis.call('ZADD', LEASE, served + (A.holders == 'one that lapsed' and 0 or 1000), 'h')
        redis.call('ZADD', LEASE, served - A.received, 'k')
        return still_held(A.job) or 'free'
        """,
        job=job, holders=holders, received=ago[received], limit=str(int(Timing().failsafe_limit * 1000)),
    ) == "free"  # fmt: skip


def taken(view: str, known: str, rev: str, stored: str, offered: str) -> bool:
    source = (SCRIPTS / "restore.lua").read_text()
    rule = source[source.index("local function taken(") :]
    return bool(run(
        "known = A.known\nlocal full = A.full == 1\n" + rule[: rule.index("\nend\n") + 5]
        + "return taken(A.stored, A.offered) and 1 or 0",
        full=int(view == "newer, complete"), known=int(known), rev=int(rev), offered=int(offered),
        **({} if stored == "-" else {"stored": int(stored)}),
    ))  # fmt: skip


CASES: dict[str, Callable[..., bool]] = {
    "lapsed": lapsed, "active": active, "lend": lend, "free": free, "taken": taken,
}  # fmt: skip


def every_case() -> Iterator[tuple[str, tuple[str, ...], str]]:
    for name in CASES:
        for *case, verdict in rows(name):
            yield name, tuple(case), verdict


@pytest.mark.parametrize(("name", "case", "verdict"), list(every_case()))
def test_the_cases_are_what_ships(name: str, case: tuple[str, ...], verdict: str) -> None:
    assert verdict in ("yes", "no")
    assert CASES[name](*case) == (verdict == "yes")
