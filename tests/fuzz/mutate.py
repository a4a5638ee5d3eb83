"""Inputs that are almost right: a seed with a few changes, which hypothesis chooses and shrinks."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.targets import Target

MOST_CHANGES = 12


@st.composite
def inputs(draw: st.DrawFn, target: Target) -> bytes:
    """Any bytes now and then; else a seed in which pieces were put in, taken out, doubled or changed."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=400))
    data = bytearray(draw(st.sampled_from(target.seeds)))
    piece = st.binary(min_size=1, max_size=6)
    if target.words:
        piece = st.one_of(st.sampled_from(target.words), piece)
    for _ in range(draw(st.integers(0, MOST_CHANGES))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 20)))
        match draw(st.sampled_from(("insert", "remove", "replace", "double", "flip"))):
            case "insert":
                data[at:at] = draw(piece)
            case "remove":
                del data[at:end]
            case "replace":
                data[at:end] = draw(piece)
            case "double":
                data[at:at] = data[at:end]
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)
