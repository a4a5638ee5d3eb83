"""Which nodes a term is about, and what is said of those that constraints rule out."""

from __future__ import annotations

import pytest

from nodeagent.model.constraints import Constraints, Match, is_pattern, names

GPU = Match(label="gpu", values=("h100", "h200"))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("n7", ["n7"], ["n70", "n", "N7"]),
        ("n[1-8,12]", ["n1", "n8", "n12"], ["n0", "n9", "n01", "n", "n1x", "nx"]),
        ("gpu[01-16]-a", ["gpu01-a", "gpu16-a"], ["gpu1-a", "gpu001-a", "gpu17-a", "gpu01-b"]),
        ("[3]", ["3"], ["4"]),
        ("n[8-10]", ["n8", "n10"], ["n08", "n11"]),
        ("n[1-999999999]", ["n999999999"], ["n1000000000", "n" + 5000 * "1"]),
    ],
)
def test_names_with_ranges(pattern: str, yes: list[str], no: list[str]) -> None:
    assert is_pattern(pattern)
    assert [n for n in [*yes, *no] if names(pattern, n)] == yes


@pytest.mark.parametrize("text", ["", "n[8-1]", "n[1-", "n]1[", "n[]", "n[a-b]", "a[1][2]"])
def test_what_names_no_nodes(text: str) -> None:
    assert not is_pattern(text)


def test_a_bare_label_is_there_with_any_value() -> None:
    bare = Match(label="nvlink")
    assert bare.holds("n1", {"nvlink": "3"})
    assert not bare.holds("n1", {"gpu": "3"})
    assert (str(bare), str(GPU)) == ("nvlink", "gpu=h100|h200")


def test_why_a_node_may_not_be_used() -> None:
    asked = Constraints(
        require=(GPU, Match(label="node", values=("n[1-4]",))),
        exclude=(Match(label="spot"), Match(label="node", values=("n3",))),
    )
    good = {"gpu": "h200"}
    assert asked.unmet("n1", good) == ""
    assert asked.unmet("n1", {"gpu": "a100"}) == "has gpu=a100, needed is gpu=h100|h200"
    assert asked.unmet("n1", {}) == "has no label gpu, needed is gpu=h100|h200"
    assert asked.unmet("n5", good) == "is not one of the nodes that are required (n[1-4])"
    assert asked.unmet("n3", good) == "is excluded by name"
    assert asked.unmet("n1", good | {"spot": "yes"}) == "has spot=yes, which is excluded"
    assert asked.words == "with gpu=h100|h200 and node=n[1-4], without spot or node=n3"


def test_more_of_what_is_preferred_and_less_of_what_is_avoided() -> None:
    asked = Constraints(prefer=(GPU, Match(label="fast")), avoid=(Match(label="spot"),))
    assert not asked.hard
    labels: list[dict[str, str]] = [{"gpu": "h100", "fast": ""}, {"gpu": "h100"}, {}, {"spot": "1"}]
    assert [asked.score("n", one) for one in labels] == [2, 1, 0, -1]


def test_a_list_of_names_and_ranges_names_all_of_them() -> None:
    listed = Match(label="node", values=("a", "n[1-2]", "b"))
    assert [n for n in ("a", "b", "c", "n1", "n2", "n3") if listed.holds(n, {})] == ["a", "b", "n1", "n2"]


def test_many_patterns_together_name_what_each_of_them_names() -> None:
    """Ranges with the same text around them are looked at together."""
    texts = [f"{low}-{low + more}" for low in (0, 2, 7, 9, 10, 12) for more in (0, 3)] + ["01-03", "02-11", "007-009"]
    patterns = [f"{before}[{text}]{after}" for text in texts for before, after in (("n", ""), ("n", "-a"), ("n1", ""))]
    nodes = [f"n{number:0{digits}}{after}" for number in range(25) for digits in (1, 2, 3) for after in ("", "-a")]
    for i in range(len(patterns)):
        some = tuple(patterns[i : i + 5])
        found = {node for node in nodes if Match(label="node", values=some).holds(node, {})}
        assert found == {node for node in nodes for one in some if names(one, node)}
    assert names("n[02-11]", "n03") and not names("n[02-11]", "n3") and not names("n[2-11]", "n03")
