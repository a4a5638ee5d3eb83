"""A state taken apart and put together again: every kind of tensor, bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from nodeagent.train.flat import ALIGN, copy_into, cut, put_back, put_together, take_apart, total  # noqa: E402

pytestmark = pytest.mark.torch


def through_memory(state: dict[str, Any]) -> dict[str, Any]:
    flat = take_apart(state)
    data = torch.full((flat.data_bytes,), 7, dtype=torch.uint8)
    copy_into([cut(data, place) for place in flat.places], flat.tensors)
    return put_together(flat.rest, data, state)


def test_every_kind_of_tensor() -> None:
    tensors = {
        "floats": torch.randn(3, 5), "half": torch.randn(7).to(torch.bfloat16), "bools": torch.tensor([True, False]),
        "one": torch.tensor(3), "none": torch.empty(0, 4), "turned": torch.randn(4, 6).t(), "part": torch.randn(9)[2:5],
        "complex": torch.randn(3, dtype=torch.complex64), "bytes": torch.arange(5, dtype=torch.uint8),
    }  # fmt: skip
    found = through_memory({"all": tensors})["all"]
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_is_no_tensor_stays_what_it_was() -> None:
    rest = {"step": 7, "names": ["a", (1, None)], "ordered": OrderedDict(a=1.5), "text": "x"}
    assert through_memory(rest) == rest


def test_tensors_lie_apart_and_aligned() -> None:
    flat = take_apart({"a": torch.ones(3), "b": torch.ones(100), "c": torch.ones(1)})
    assert [p.begin for p in flat.places] == [0, ALIGN, ALIGN + 448]
    assert flat.data_bytes == ALIGN + 448 + ALIGN


def test_training_goes_on_in_place() -> None:
    def made() -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 4)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": 0}

    def train(state: dict[str, Any], steps: int) -> None:
        for _ in range(steps):
            state["step"] += 1
            state["model"](torch.full((2, 4), float(state["step"]))).sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    alone, first, second = made(), made(), made()
    train(alone, 7)
    train(first, 3)
    put_back(second, through_memory(first))
    train(first, 2)  # what was kept is a copy
    train(second, 4)
    assert second["step"] == 7
    assert torch.equal(alone["model"].weight, second["model"].weight)


def test_a_part_that_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="has no scheduler"):
        put_back({"scheduler": {}}, {"model": {}})


def test_tensors_that_are_not_plain_memory_are_refused() -> None:
    with pytest.raises(TypeError, match="plain tensors"):
        take_apart({"sparse": torch.eye(3).to_sparse()})


def test_one_changed_bit_changes_the_sum() -> None:
    data = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    before = total(data)
    for at in (0, 7, 2048, 4095):
        for bit in (1, 128):
            data[at] ^= bit
            assert total(data) != before
            data[at] ^= bit
    assert total(data) == before
