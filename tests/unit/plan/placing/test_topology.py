"""Which nodes make a gang by how they lie to each other: the smallest domain, neighbours, segments, spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.constraints import Constraints, Match
from nodeagent.plan.nodes.labels import tree
from nodeagent.plan.placing.topology import GangLayout, PastPlaces, gather, most, nearest, spread
from tests.unit.plan.build import REPEATABLE, make_cluster, make_node

LEVELS = ("zone", "rack")


def gang(domains: dict[str, str], within: int = 0, segment: int = 0) -> GangLayout:
    """``domains``: ``a1`` (zone a, rack 1) to the names of its nodes in one text; ``-`` stands for no label."""
    paths = {
        n: tuple(part.replace("-", "") for part in domain) for domain, nodes in domains.items() for n in nodes.split()
    }
    return GangLayout(LEVELS, paths, within, segment)


NEW = PastPlaces()


def found(
    of: GangLayout, want: int, *, least: int = 1, past: PastPlaces = NEW, pool: Sequence[Sequence[str]] = ()
) -> str:
    groups = pool or [[n for n in of.paths if n not in past.staying]]
    return " ".join(gather(groups, want, least, of, past))


def test_the_smallest_domain_that_holds_it_with_the_fewest_left_over() -> None:
    of = gang({"a1": "n1 n2 n3 n4", "a2": "n5 n6", "b1": "n7 n8 n9"})
    assert [found(of, n) for n in (1, 2, 3, 4)] == ["n5", "n5 n6", "n7 n8 n9", "n1 n2 n3 n4"]
    assert found(of, 5) == "n1 n2 n3 n4 n5"  # no rack, but a zone
    assert found(of, 7) == "n1 n2 n3 n4 n5 n6 n7"  # no zone: the largest whole, the rest where fewest are left over


def test_a_small_domain_of_a_large_one_is_found_where_the_best_fit_above_it_has_none() -> None:
    of = gang({"a1": "n1 n2", "a2": "n3 n4", "b1": "n5 n6 n7", "b2": "n8 n9"})
    assert found(of, 3) == "n5 n6 n7"


def test_nodes_of_no_domain_come_last() -> None:
    of = gang({"--": "n1 n2", "a-": "n3", "a1": "n4"})
    assert found(of, 3) == "n4 n3 n1"
    assert found(of, 2, least=2) == "n4 n3"


def test_within_one_domain_or_not_at_all() -> None:
    of = gang({"a1": "n1 n2", "a2": "n3 n4 n5", "b1": "n6 n7 n8 n9", "-1": "n10"}, within=2)
    assert found(of, 3) == "n3 n4 n5"
    assert found(of, 6) == "n6 n7 n8 n9"  # as many as are together
    assert most(of.paths, of) == 4
    assert most(of.paths, gang({"a1": "n1 n2", "a2": "n3 n4 n5", "-1": "n10"}, within=1)) == 5


def test_those_that_are_preferred_alone_if_they_suffice() -> None:
    of = gang({"a1": "n1 n2", "a2": "n3", "b1": "n4"})
    assert found(of, 2, pool=[["n3", "n4"], ["n1", "n2"]]) == "n3 n4"
    assert found(of, 3, pool=[["n3", "n4"], ["n1", "n2"]]) == "n1 n2 n3"  # then the smallest domain goes first


def test_of_equal_domains_the_one_that_gets_ready_already() -> None:
    of = gang({"a1": "n1 n2", "a2": "n3 n4"})
    assert found(of, 2) == "n1 n2"
    assert found(of, 2, past=PastPlaces(warm=frozenset({"n4"}))) == "n3 n4"


def test_survivors_stay_and_who_replaces_a_lost_one_is_its_neighbour() -> None:
    of = gang({"a1": "n1 n2 n3", "a2": "n4 n5 n6", "b1": "n7 n8 n9"})
    past = PastPlaces(members=("n1", "n2", "n4", "n5"), staying=("n1", "n2", "n5"))
    pool = [["n3", "n6", "n7"]]
    assert found(of, 4, past=past, pool=pool) == "n1 n2 n5 n6"  # n4 was lost, in rack a2
    assert found(of, 5, past=past, pool=pool) == "n1 n2 n5 n6 n3"  # and one more where most of them are
    assert found(of, 4, past=past, pool=[["n7", "n3"]]) == "n1 n2 n5 n3"  # no spare in its rack: in its zone
    assert found(of, 2, past=past, pool=pool) == "n1 n2"


def test_survivors_of_a_gang_within_a_domain_stay_while_it_holds_as_many() -> None:
    of = gang({"a1": "n1 n2 n3 n4", "b1": "n5 n6 n7", "b2": "n8 n9"}, within=2)
    past = PastPlaces(members=("n1", "n2", "n3"), staying=("n1", "n2"))
    assert found(of, 3, past=past, pool=[["n4", "n5", "n6", "n7"]]) == "n1 n2 n4"
    assert found(of, 3, past=past, pool=[["n5", "n6", "n7"]]) == "n5 n6 n7"  # it moves as a whole
    assert found(of, 3, past=past, pool=[["n8", "n9"]]) == "n1 n2"  # nobody has more: it goes on smaller
    assert found(of, 4, past=past, pool=[["n4", "n5", "n6", "n7"]]) == "n1 n2 n4"  # as many as it was
    assert found(of, 3, least=3, past=past, pool=[["n8", "n9"]]) == "n1 n2"  # waits: too few
    assert found(of, 3, least=2, past=PastPlaces(("n1", "n2", "n3"), ("n1",)), pool=[["n8", "n9"]]) == "n8 n9"
    assert found(of, 3, least=2, past=PastPlaces(("n1",), ("n1",)), pool=[["n8", "n9"]]) == "n8 n9"  # it was too small


def test_segments_lie_each_in_one_of_the_smallest_domains() -> None:
    of = gang({"a1": "n1 n2 n3", "a2": "n4", "b1": "n5 n6", "b2": "n7 n8 n9 n10", "--": "n11 n12"}, segment=2)
    assert found(of, 4) == "n7 n8 n9 n10"
    assert found(of, 8) == "n7 n8 n9 n10 n5 n6 n1 n2"
    assert found(of, 10) == "n7 n8 n9 n10 n5 n6 n1 n2"
    assert found(of, 3) == "n1 n2"
    assert most(of.paths, of) == 8


def test_a_segment_is_filled_up_where_it_is_or_goes_elsewhere_as_a_whole() -> None:
    of = gang({"a1": "n1 n2 n3", "a2": "n4 n5", "b1": "n6 n7"}, segment=2)
    past = PastPlaces(members=("n1", "n2", "n4", "n5"), staying=("n1", "n4", "n5"))
    assert found(of, 4, past=past, pool=[["n3", "n6", "n7"]]) == "n1 n3 n4 n5"
    assert found(of, 4, past=past, pool=[["n6", "n7"]]) == "n4 n5 n6 n7"
    assert found(of, 4, past=past, pool=[["n6"]]) == "n4 n5"


def test_spread_over_the_values_of_a_label() -> None:
    values = {"n1": "a", "n2": "a", "n3": "a", "n4": "b", "n5": "c", "n6": ""}
    assert spread([list(values)], 4, values, []) == ["n1", "n4", "n5", "n2"]
    assert spread([["n2", "n3", "n5"]], 3, values, ["n1", "n4"]) == ["n1", "n4", "n5"]
    assert spread([list(values)], 6, values, []) == ["n1", "n4", "n5", "n2", "n3", "n6"]


def test_near_means_the_smallest_common_domain() -> None:
    paths = {"n1": ("a", "1"), "n2": ("a", "2"), "n3": ("b", "1"), "n4": ("a", "1")}
    assert nearest(["n3", "n2", "n4"], 2, paths, [("a", "1")]) == ["n4", "n2"]
    assert nearest(["n3", "n2"], 1, dict.fromkeys(paths, ()), [()]) == ["n3"]


def test_the_topology_is_what_most_nodes_say_and_is_read_anew_only_when_it_changes() -> None:
    nodes = [make_node(f"n{i}", labels={"rack": str(i)}, topology=LEVELS) for i in (1, 2)]
    odd = make_node("n3", topology=("switch",))
    cluster = make_cluster([*nodes, odd])
    assert tree(cluster).levels == LEVELS
    assert tree(cluster).paths(LEVELS)["n2"] == ("", "2")
    assert tree(cluster).levels_for("rack") == LEVELS
    assert tree(cluster).levels_for("pdu") == ("pdu",)
    assert tree(make_cluster([make_node("n1"), make_node("n2", topology=LEVELS)])).levels == LEVELS


@REPEATABLE
@given(
    domains=st.lists(st.tuples(st.sampled_from("ab-"), st.sampled_from("12-")), min_size=1, max_size=12),
    want=st.integers(1, 8),
    within=st.integers(0, 2),
    segment=st.integers(0, 3),
    least=st.integers(1, 4),
    lost=st.sets(st.integers(0, 11)),
)
def test_hard_rules_are_never_broken_and_survivors_stay_when_they_may(
    domains: list[tuple[str, str]], want: int, within: int, segment: int, least: int, lost: set[int]
) -> None:
    paths = {f"n{i}": tuple(part.replace("-", "") for part in path) for i, path in enumerate(domains)}
    of = GangLayout(LEVELS, paths, within, segment)
    first = gather([list(paths)], want, least, of, PastPlaces())
    able = [n for i, n in enumerate(paths) if i not in lost]
    past = PastPlaces(tuple(first), tuple(n for n in first if n in able))
    second = gather([[n for n in able if n not in past.staying]], want, least, of, past)
    for nodes, pool in ((first, list(paths)), (second, able)):
        assert len(set(nodes)) == len(nodes) <= want
        assert set(nodes) <= set(pool)
        if within:
            assert len({paths[n][:within] for n in nodes}) <= 1
            assert all(paths[n][within - 1] for n in nodes)
        if segment:
            assert not len(nodes) % segment
            groups = [nodes[i : i + segment] for i in range(0, len(nodes), segment)]
            assert all(len({paths[n] for n in group}) == 1 and paths[group[0]][-1] for group in groups)
    assert len(first) == min(want - want % (segment or 1), most(paths, of))  # as many as there may be
    if not segment:
        _smallest(paths, first, want, within)
    if not within and not segment:
        assert set(past.staying) <= set(second)
        assert len(second) == min(want, len(able))


def _smallest(paths: dict[str, tuple[str, ...]], nodes: list[str], want: int, within: int) -> None:
    """No smaller domain would have held the gang."""
    if len(nodes) < want:
        return
    for depth in (2, 1):
        able = [path for path in paths.values() if not within or path[within - 1]]
        sizes = Counter(path[:depth] for path in able if path[depth - 1])
        if any(size >= want for size in sizes.values()):
            assert len({paths[n][:depth] for n in nodes}) == 1
            return


@REPEATABLE
@given(st.lists(st.dictionaries(st.sampled_from("123456"), st.sampled_from(["", "a1", "b1"])), min_size=1, max_size=5))
def test_what_is_kept_of_an_earlier_view_is_what_would_be_found_anew(views: list[dict[str, str]]) -> None:
    asked = Constraints(require=(Match(label="rack", values=("a1",)),))
    notes = make_cluster([]).notes
    for view in views:
        records = [
            make_node(n, labels={"rack": rack} if rack else {}, topology=("rack",) if rack else ())
            for n, rack in view.items()
        ]
        kept = tree(replace(make_cluster(records), notes=notes))
        anew = tree(make_cluster(records))
        assert kept.levels == anew.levels
        assert kept.paths(("rack",)) == anew.paths(("rack",))
        assert kept.allowed(asked) == anew.allowed(asked)


def test_the_topology_is_the_same_object_while_nothing_about_it_changes() -> None:
    cluster = make_cluster([make_node("n1", labels={"rack": "a"}), "n2"])
    news = {**cluster.nodes, "n2": cluster.nodes["n2"].model_copy(update={"rev": 9})}
    assert tree(replace(cluster, nodes=news)) is tree(cluster)
