"""Nested values come apart and together again, each in its own class."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from autosp_dtensor.tree import flatten, paths, unflatten

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Out:
    logits: Any
    loss: Any = None
    kept: int = field(default=0, init=False)


@dataclass(frozen=True)
class Frozen:
    value: Any


class Named(dict):
    """A mapping of a class of its own."""


TREES: list[Any] = [
    1,
    None,
    "text",
    (),
    [],
    {},
    (1, 2),
    [1, (2, [3])],
    {"a": 1, "b": {"c": (2,)}},
    OrderedDict(z=1, a=2),
    Named(z=1),
    Pair(1, [2]),
    Out(1, {"x": 2}),
    Frozen((1, 2)),
    {1: "int key", (2, 3): "tuple key"},
    (Out(Pair(1, 2)), [Frozen(None)]),
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_tree_is_the_same_after_flattening(tree: Any) -> None:
    leaves, spec = flatten(tree)
    again = unflatten(spec, leaves)
    assert again == tree and type(again) is type(tree)
    assert not any(isinstance(leaf, (list, dict, tuple)) for leaf in leaves)


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_structure_can_be_a_key(tree: Any) -> None:
    assert hash(flatten(tree)[1]) == hash(flatten(tree)[1])
    assert flatten(tree)[1] == flatten(tree)[1]


def test_structures_that_differ_are_told_apart() -> None:
    specs = [flatten(tree)[1] for tree in TREES if not isinstance(tree, (int, str, type(None)))]
    assert len(set(specs)) == len(specs)
    assert flatten({"a": 1, "b": 2})[1] != flatten({"b": 2, "a": 1})[1]
    assert flatten((1,))[1] != flatten([1])[1]


def test_leaves_are_put_in_the_order_they_came() -> None:
    leaves, spec = flatten({"b": [1, 2], "a": (3, Out(4, 5))})
    assert leaves[:4] == [1, 2, 3, 4]
    made = unflatten(spec, [leaf if leaf is None else leaf * 10 for leaf in leaves])
    assert made["b"] == [10, 20] and made["a"][1].logits == 40


def test_dataclass_is_made_without_its_constructor() -> None:
    out = Out(1)
    out.kept = 7
    leaves, spec = flatten(out)
    again = unflatten(spec, leaves)
    assert again.kept == 7 and again is not out


def test_tensors_and_unknown_objects_are_leaves() -> None:
    thing, tensor = object(), torch.ones(2)
    leaves, _ = flatten([thing, {"t": tensor}, torch.Size([2, 3]), range(3)])
    assert leaves[0] is thing and leaves[1] is tensor


def test_output_of_transformers_keeps_its_class_and_its_keys() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    out = outputs.CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=torch.ones(2))
    leaves, spec = flatten(out)
    again = unflatten(spec, leaves)
    assert type(again) is type(out) and list(again) == ["loss", "logits"]
    assert again.past_key_values is None and again[0] is out.loss


def test_paths_name_each_leaf_in_order() -> None:
    tree = ({"mask": 1, "pair": Pair(2, [3])}, Out(4, loss=5), OrderedDict(a=(6,)), 7, ())
    leaves, spec = flatten(tree)
    named = dict(zip(paths(spec), leaves, strict=True))
    assert named == {
        "0.mask": 1, "0.pair.first": 2, "0.pair.second.0": 3, "1.logits": 4, "1.loss": 5,
        "1.kept": 0, "2.a.0": 6, "3": 7,
    }  # fmt: skip
