"""Every rule is a claim: the operation on shards, glued, is the operation on the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.node import Node, map_aggregate

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.graph import facts, short_name
from autosp_dtensor.lower import bound
from autosp_dtensor.place.canonical import canonicalize
from autosp_dtensor.place.rule import Op, Option, Rule, Slot, fill
from autosp_dtensor.place.table import _BY_NAME, find_rule
from autosp_dtensor.placement import Partial, Replicate, Shard
from tests.pieces import cut, glue, shardings
from tests.place.rule_cases import CASES, Case, b, f, i
from tests.simulate import run_whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),  # kl_div
    pytest.mark.filterwarnings("ignore:.*degrees of freedom"),  # std of an empty part
]
NAMES = sorted(_BY_NAME)
RANKS = (1, 2, 3, 4)


@dataclass
class Traced:
    """One operation as the placer sees it, with the values it takes and gives on one device."""

    case: Case
    node: Node
    rule: Rule
    values: list[Tensor]
    results: list[Tensor]

    def op(self, n: int) -> Op:
        return op_of(self.node, n)


def op_of(node: Node, n: int) -> Op:
    count = 0

    def slot(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Node):
            return value
        count += 1
        return Slot(count - 1)

    args, kwargs = map_aggregate((node.args, node.kwargs), slot)
    known = facts(node)
    ins = tuple(facts(t).meta for t in _tensors(node))
    name = short_name(node.target)
    return Op(node.target, name, args, kwargs, ins, known.outs, n, known.single)


def _tensors(node: Node) -> list[Node]:
    found: list[Node] = []
    map_aggregate(
        (node.args, node.kwargs), lambda v: found.append(v) if isinstance(v, Node) else None
    )
    return found


@functools.cache
def traced(name: str, index: int) -> Traced:
    case = CASES[name][index]
    graph = capture(read_call(case.call, case.tensors, {}, _no_dtensor)).graph
    if case.canonical:
        graph = canonicalize(graph, 2)
    nodes = [n for n in graph.nodes if n.op == "call_function" and short_name(n.target) == name]
    seen = [short_name(n.target) for n in graph.nodes if n.op == "call_function"]
    assert nodes, f"no operation named {name!r} was recorded, but {seen}"
    node = nodes[-1]
    values = run_whole(graph, case.tensors, lambda origin: None)
    rule = find_rule(node.target, name, facts(node))
    assert rule is not None
    result = values[node]
    results = [result] if isinstance(result, Tensor) else [t for t in result]
    return Traced(case, node, rule, [values[t] for t in _tensors(node)], results)


def _no_dtensor(tensor: Any) -> Any:
    raise AssertionError


def assert_local(what: Traced, op: Op, option: Option) -> None:
    """The option's placements fit, and the local calls glue to the result on the whole."""
    n = op.axis_size
    assert len(option.ins) == len(op.ins) and len(option.outs) == len(op.outs)
    for meta, placement in zip((*op.ins, *op.outs), (*option.ins, *option.outs), strict=True):
        if isinstance(placement, Shard):
            assert len(placement.sizes) == n
            assert placement.outer * placement.block == meta.shape[placement.dim], placement
    local = what.rule.localize(op, option)
    held = [cut(v, p, n) for v, p in zip(what.values, option.ins, strict=True)]
    outs: list[list[Tensor]] = []
    for rank in range(n):
        args = bound(fill(local.args, [h[rank] for h in held]), rank)
        kwargs = bound(fill(dict(local.kwargs), [h[rank] for h in held]), rank)
        result = local.target(*args, **kwargs)
        outs.append([result] if isinstance(result, Tensor) else list(result))
    for index, (want, placement) in enumerate(zip(what.results, option.outs, strict=True)):
        parts = [each[index] for each in outs]
        if what.case.drawn and not isinstance(placement, Shard):
            parts = parts[:1]
        got = glue(parts, placement)
        if what.case.drawn:
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
        elif not _equal(got, want):
            torch.testing.assert_close(got, want, msg=lambda m: f"{option}: {m}")


def _equal(got: Tensor, want: Tensor) -> bool:
    """A fast yes, for the many that are equal."""
    same = got.shape == want.shape and got.dtype == want.dtype
    return same and torch.equal(got, want)


def _shards(length: int, dim: int, n: int) -> Iterator[Shard]:
    for sizes, outer in shardings(length, n):
        yield Shard(dim, sizes, outer)


def _flat(names: list[str] = NAMES) -> list[Any]:
    return [
        pytest.param(name, k, id=f"{name}-{k}")
        for name in names
        for k in range(len(CASES.get(name, ())))
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_has_a_case(name: str) -> None:
    assert CASES.get(name), f"bring cases of {name!r} to rule_cases/"


@pytest.mark.parametrize(("name", "index"), _flat())
def test_operation_on_shards_glued_is_the_operation_on_the_whole(name: str, index: int) -> None:
    what = traced(name, index)
    for n in RANKS:
        op = what.op(n)
        for i_, meta in enumerate(op.ins):
            for dim, length in enumerate(meta.shape):
                for shard in _shards(length, dim, n):
                    if 0 in shard.sizes and not what.case.empty:
                        continue
                    option = what.rule.from_input(op, i_, shard)
                    if option is not None:
                        assert option.ins[i_] == shard
                        assert_local(what, op, option)


@pytest.mark.parametrize(("name", "index"), _flat())
def test_dims_that_may_be_split_are_those_of_the_table(name: str, index: int) -> None:
    """A refusal holds for any sizes; a dim that may be split takes two equal parts."""
    what = traced(name, index)
    op = what.op(2)
    assert [len(t) for t in what.case.terms()] == [len(meta.shape) for meta in op.ins]
    for i_, (term, meta) in enumerate(zip(what.case.terms(), op.ins, strict=True)):
        for dim, (mark, length) in enumerate(zip(term, meta.shape, strict=True)):
            where = f"dim {dim} of tensor {i_}"
            if mark == "x":
                half = Shard(dim, (length // 2, length - length // 2))
                assert what.rule.from_input(op, i_, half) is not None, where
                continue
            for n in (2, 3, 4):
                for shard in _shards(length, dim, n):
                    if sum(size > 0 for size in shard.sizes) < 2:
                        continue  # one rank holds all: nothing is split
                    option = what.rule.from_input(what.op(n), i_, shard)
                    assert option is None, f"{where}: {option}"


@pytest.mark.parametrize(("name", "index"), _flat())
def test_option_asked_for_by_its_result_gives_that_result(name: str, index: int) -> None:
    what = traced(name, index)
    for n in (1, 3):
        op = what.op(n)
        for dim, length in enumerate(op.outs[0].shape):
            for shard in _shards(length, dim, n):
                if 0 in shard.sizes and not what.case.empty:
                    continue
                option = what.rule.from_output(op, shard)
                if option is not None:
                    assert option.outs[0] == shard
                    assert_local(what, op, option)


@pytest.mark.parametrize(("name", "index"), _flat())
def test_fresh_and_whole_options_are_legal(name: str, index: int) -> None:
    what = traced(name, index)
    for n in RANKS:
        op = what.op(n)
        for option in what.rule.fresh(op):
            assert any(isinstance(p, Shard) for p in option.outs)
            for placement in (*option.ins, *option.outs):
                assert not isinstance(placement, Shard) or min(placement.sizes) > 0
            assert_local(what, op, option)
        assert_local(what, op, what.rule.whole(op))


@pytest.mark.parametrize(("name", "index"), _flat())
def test_operation_that_takes_tensors_as_they_are_gives_the_same_result(
    name: str, index: int
) -> None:
    what = traced(name, index)
    op = what.op(2)
    for k, meta in enumerate(op.ins):
        for dim, length in enumerate(meta.shape):
            for shard in _shards(length, dim, 2):
                have = [shard if j == k else Replicate() for j in range(len(op.ins))]
                option = what.rule.as_is(op, have)
                if option is not None:
                    assert list(option.ins) == have
                    assert_local(what, op, option)


@pytest.mark.parametrize(("name", "index"), _flat())
def test_where_elements_go_is_where_a_legal_option_puts_them(name: str, index: int) -> None:
    """local=False says the same as an option, where there is one."""
    what = traced(name, index)
    op = what.op(2)
    for i_, meta in enumerate(op.ins):
        for dim, length in enumerate(meta.shape):
            shard = Shard(dim, (length // 2, length - length // 2))
            legal = what.rule.from_input(op, i_, shard)
            moved = what.rule.from_input(op, i_, shard, local=False)
            if legal is None or any(isinstance(p, Partial) for p in legal.outs):
                continue
            assert moved is not None and moved.outs == legal.outs


# -- what must be refused ------------------------------------------------------------------------

_X, _TAPS, _CLASSES = f(4, 8, 6), f(6, 6, 3), i(4, 6)
_INDEX, _MASK = i(4, 8, 6, high=8), b(6, 6)
_FORBIDDEN: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "softmax over the tokens": (lambda x: x.softmax(1), (_X,), 1),
    "softmax over the tokens, by numpy's word": (lambda x: x.softmax(axis=1), (_X,), 1),
    "log_softmax": (lambda x: F.log_softmax(x, 1), (_X,), 1),
    "cumsum": (lambda x: x.cumsum(1), (_X,), 1),
    "cummax": (lambda x: x.cummax(1).values, (_X,), 1),
    "flip": (lambda x: x.flip(1), (_X,), 1),
    "flip of the second of two": (lambda x: x.flip(2, 1), (_X,), 1),
    "roll": (lambda x: x.roll(1, 1), (_X,), 1),
    "sort": (lambda x: x.sort(1).values, (_X,), 1),
    "argsort": (lambda x: x.argsort(1), (_X,), 1),
    "normalize": (lambda x: F.normalize(x, dim=1), (_X,), 1),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), (_X,), 2),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)), (_X,), 2),
    "tril": (lambda x: x.tril(), (f(8, 8),), 0),
    "triu": (lambda x: x.triu(1), (f(8, 8),), 1),
    "causal attention by queries": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        (f(2, 8, 6),),
        1,
    ),
    "attention by keys": (
        lambda k: F.scaled_dot_product_attention(k, k, k),
        (f(2, 8, 6),),
        1,
    ),
    "attention by head size": (
        lambda k: F.scaled_dot_product_attention(k, k, k),
        (f(2, 8, 6),),
        2,
    ),
    "convolution over tokens": (lambda x: F.conv1d(x, _TAPS, padding=1), (f(4, 6, 8),), 2),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 1)), (_X,), 1),
    "gather": (lambda x: x.gather(1, _INDEX), (_X,), 1),
    "repeat": (lambda x: x.repeat(1, 2, 1), (_X,), 1),
    "repeat_interleave flat": (lambda x: x.repeat_interleave(2), (f(4, 8),), 1),
    "cat with another": (lambda x: torch.cat([x, x * 2], 1), (_X,), 1),
    "glu": (lambda x: F.glu(x, 1), (_X,), 1),
    "topk": (lambda x: x.topk(8, 1).values, (_X,), 1),
    "diagonal of einsum": (lambda x: torch.einsum("ii->i", x), (f(6, 6),), 0),
    "cross entropy by classes": (
        lambda x: F.cross_entropy(x, _CLASSES, reduction="none"),
        (_X,),
        1,
    ),
    "index with a table": (lambda x: x[:, torch.arange(7, -1, -1)], (_X,), 1),
    "where on other rows": (lambda x: torch.where(_MASK, x, 0.0).tril(), (f(6, 6),), 0),
}


@pytest.mark.parametrize("what", _FORBIDDEN)
def test_forbidden_dim_is_refused_and_would_be_wrong(what: str) -> None:
    call, tensors, dim = _FORBIDDEN[what]
    (x,) = tensors
    # The first half twice as long: nothing is right by symmetry.
    first = x.shape[dim] - x.shape[dim] // 3
    parts = x.split([first, x.shape[dim] - first], dim)
    try:
        glued = torch.cat([call(part) for part in parts], dim)
        wrong = glued.shape != call(x).shape or not torch.allclose(glued, call(x))
    except (RuntimeError, IndexError, ValueError):
        wrong = True
    assert wrong, "the operation is local on this dim after all"

    graph = capture(read_call(call, tensors, {}, _no_dtensor)).graph
    shard = Shard(dim, tuple(part.shape[dim] for part in parts))
    source = next(n for n in graph.nodes if n.op == "placeholder")
    refused = []
    for node in graph.nodes:
        if node.op == "call_function" and source in _tensors(node):
            rule = find_rule(node.target, short_name(node.target), facts(node))
            assert rule is not None
            op = op_of(node, 2)
            takes = [k for k, t in enumerate(_tensors(node)) if t is source]
            option = rule.from_input(op, takes[-1], shard)
            refused.append(option is None or option.ins[takes[0]] == Replicate())
    if what == "where on other rows":  # where itself is local; the triangle after it is not
        return
    assert any(refused), "taken as local"
