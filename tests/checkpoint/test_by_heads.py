"""Attention by groups of heads: the values and gradients of one call, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

import autosp_dtensor as autosp
from autosp_dtensor.checkpoint import Checkpoint, flops_of, record, tile_free
from autosp_dtensor.checkpoint.by_heads import ByHeads
from autosp_dtensor.checkpoint.head_groups import MOST_WORKSPACE, Heads, groups_of
from autosp_dtensor.checkpoint.kinds import inner, is_attention
from autosp_dtensor.checkpoint.tiling import attend_by_heads
from autosp_dtensor.errors import UsageError
from autosp_dtensor.graph import facts, short_name
from autosp_dtensor.lower import Region
from autosp_dtensor.placement import Shard
from autosp_dtensor.run import compile
from tests import simulate
from tests.checkpoint.layers import layer_region
from tests.checkpoint.test_recompute import asked
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.run.one_rank import mesh  # noqa: F401
from tests.run.test_codegen import assert_ranks_give_the_whole
from tests.simulate import Lowered, assert_program_equals_whole, lowered

LENGTH, SIZE = 9, 4
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
SHARED = [(8, 1), (8, 2), (8, 4), (8, 8), (7, 7), (6, 3)]  # heads, key heads
WHOLE = 100  # tokens of a tile: more than there are, so that attention alone is cut


@pytest.fixture(autouse=True)
def kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections and exchanges have all heads: groups of those are place/groups.py's."""
    for module in (simulate, compile):
        monkeypatch.setattr(module, "in_groups", lambda *_: None)


def sizes(heads: int, key_heads: int) -> Heads:
    return Heads(heads, key_heads, 2 * LENGTH, 2 * LENGTH, SIZE, SIZE)


# -- which heads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize(("heads", "key_heads"), SHARED)
def test_each_head_is_in_one_group_beside_the_key_head_it_reads(
    heads: int, key_heads: int, parts: int
) -> None:
    known = sizes(heads, key_heads)
    groups = groups_of(known, 8, known.workspace(8) // parts + 1)
    seen = []
    for group in groups:
        (first, count), (key, key_count) = group.queries, group.keys
        assert count % key_count == 0
        for i in range(count):  # as a kernel reads them, and as one call of all would
            assert key + i // (count // key_count) == (first + i) // known.each
        seen += range(first, first + count)
    assert seen == list(range(heads))
    assert (len(groups) == 1) == (parts == 1)


@pytest.mark.parametrize(("heads", "key_heads"), SHARED)
def test_there_are_as_few_groups_as_keep_within_the_limit(heads: int, key_heads: int) -> None:
    known = sizes(heads, key_heads)
    last = 1
    for most in range(known.workspace(2) + 1, 0, -500):
        groups = groups_of(known, 2, most)
        within = [
            Heads(g.queries[1], g.keys[1], 2 * LENGTH, 2 * LENGTH, SIZE, SIZE).workspace(2)
            for g in groups
        ]
        assert max(within) < most or len(groups) == heads
        assert len(groups) >= last
        last = len(groups)
    assert last == heads == len(groups_of(known, 2, None))


def test_workspace_is_what_flash_attention_allocates() -> None:
    """Llama-3.1-8B, 1M tokens, sp=8: 4 heads of 128 read one key head."""
    tokens = 1 << 20
    shared = Heads(4, 1, tokens, tokens, 128, 128)
    lse = 4 * tokens * 4
    assert shared.workspace(2) == 4 * tokens * 4 * 128 + lse + 2 * 2 * tokens * 4 * 128
    own = Heads(4, 4, tokens, tokens, 80, 80)
    assert own.workspace(2) == 4 * tokens * 4 * 96 + lse  # a head's size is rounded to 32


# -- one call --------------------------------------------------------------------------------------


@contextmanager
def kernel_calls() -> Iterator[list[tuple[int, int]]]:
    """(query heads, key heads) of each call by groups: those alone name their queries."""
    found: list[tuple[int, int]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention and "query" in (kwargs or {}):
                found.append((kwargs["query"].shape[-3], kwargs["key"].shape[-3]))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield found


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


def operands(
    heads: int, key_heads: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        drawn(2, LENGTH, h, SIZE, dtype=dtype, seed=s).transpose(1, 2).requires_grad_()
        for s, h in enumerate((heads, key_heads, key_heads))
    )
    return q, k, v


@pytest.mark.parametrize("mask", [None, (1, 1), (1, 8), (2, 8), (2, 1)])
@pytest.mark.parametrize("key_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("most", [None, "half"])
def test_groups_give_results_and_gradients_of_one_call(
    most: Any, key_heads: int, mask: tuple[int, int] | None
) -> None:
    inputs = list(operands(8, key_heads))
    given: dict[str, Any] = {"enable_gqa": key_heads != 8, "is_causal": mask is None}
    if mask is not None:
        given["attn_mask"] = drawn(*mask, LENGTH, LENGTH, seed=5).requires_grad_()
        inputs.append(given["attn_mask"])
    weight = drawn(2, 8, LENGTH, SIZE, seed=7)
    want = F.scaled_dot_product_attention(*inputs[:3], **given)
    limit = None if most is None else sizes(8, key_heads).workspace(8) // 2 + 1
    with kernel_calls() as calls:
        got = ByHeads(F.scaled_dot_product_attention, limit)(*inputs[:3], **given)
    assert calls == [(1, 1)] * 8 if most is None else len(calls) == 2
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    wanted = torch.autograd.grad(want, inputs, weight)
    for _ in range(2):  # a graph may be gone through again
        grads = torch.autograd.grad(got, inputs, weight, retain_graph=True)
        torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 2)])
def test_a_part_of_the_gradients(asked: tuple[int, ...]) -> None:
    inputs = [x.detach().requires_grad_(k in asked) for k, x in enumerate(operands(6, 3))]
    outs = [
        call(*inputs, is_causal=True, enable_gqa=True)
        for call in (
            F.scaled_dot_product_attention,
            ByHeads(F.scaled_dot_product_attention, None),
        )
    ]
    want, got = (
        torch.autograd.grad(out, [inputs[k] for k in asked], torch.ones_like(out)) for out in outs
    )
    torch.testing.assert_close(got, want)


def test_key_heads_gradients_are_added_wide_and_rounded_once() -> None:
    q, k, v = operands(8, 2, torch.bfloat16)
    weight = drawn(2, 8, LENGTH, SIZE, dtype=torch.bfloat16, seed=7)
    out = ByHeads(F.scaled_dot_product_attention, None)(q, k, v, enable_gqa=True)
    _, dk, dv = torch.autograd.grad(out, (q, k, v), weight)
    own = [x.detach().repeat_interleave(4, 1).requires_grad_() for x in (k, v)]
    each = F.scaled_dot_product_attention(q, *own)
    for got, grad in zip((dk, dv), torch.autograd.grad(each, own, weight), strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, grad.float().unflatten(1, (2, 4)).sum(2).bfloat16())
        assert not torch.equal(got, sum(grad.unflatten(1, (2, 4)).unbind(2)))  # rounded each time


def test_autocast_is_that_of_the_call() -> None:
    inputs = operands(4, 4, torch.float32)
    outs = []
    for call in (F.scaled_dot_product_attention, ByHeads(F.scaled_dot_product_attention, None)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs.append(call(*inputs, is_causal=True))
    assert outs[0].dtype == outs[1].dtype == torch.bfloat16
    assert torch.equal(*outs)
    for a, b in zip(*(torch.autograd.grad(o.float().sum(), inputs) for o in outs), strict=True):
        assert torch.equal(a, b)


def test_without_a_gradient_it_is_one_call() -> None:
    inputs = operands(4, 2)
    call = ByHeads(F.scaled_dot_product_attention, None)
    with kernel_calls() as calls:
        with torch.no_grad():
            call(*inputs, enable_gqa=True)
        call(*(x.detach() for x in inputs), enable_gqa=True)
    assert not calls


def test_gradients_of_gradients_are_refused() -> None:
    inputs = operands(4, 2)
    out = ByHeads(F.scaled_dot_product_attention, None)(*inputs, enable_gqa=True)
    with pytest.raises(UsageError, match="do not go through attention by groups of heads"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_what_is_saved_is_what_one_call_saves(key_heads: int) -> None:
    """The same bytes: no group's result beside the whole one."""

    def saved(call: Callable[..., Tensor]) -> int:
        kept: list[Tensor] = []
        inputs = operands(4, key_heads)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.detach()), id):
            out = call(*inputs, is_causal=True, enable_gqa=key_heads != 4)
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        assert {t.untyped_storage().data_ptr() for t in (*inputs, out)} <= {*sizes}
        return sum(sizes.values())

    one = saved(F.scaled_dot_product_attention)
    assert saved(ByHeads(F.scaled_dot_product_attention, None)) == one


def test_the_groups_graphs_hold_no_memory() -> None:
    """Hooks that save a note in place of each tensor free them all."""
    inputs = [x.clone() for x in operands(4, 2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.shape, torch.zeros):
        out = ByHeads(F.scaled_dot_product_attention, None)(*inputs, enable_gqa=True)
    memory = [StorageWeakRef(t.untyped_storage()) for t in (*inputs, out)]
    loss = out.sum()
    del inputs, out
    assert loss.requires_grad and all(ref.expired() for ref in memory)


# -- programs --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """One attention under a mask of its own, or a causal one."""

    def __init__(self, heads: int, key_heads: int, mask: int | None = None) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(8, heads * SIZE), nn.Linear(heads * SIZE, 8)
        self.k, self.v = nn.Linear(8, key_heads * SIZE), nn.Linear(8, key_heads * SIZE)
        self.shared = heads != key_heads
        self.mask = None
        if mask is not None:
            self.mask = nn.Parameter(torch.randn(1, mask, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(
            q, k, v, self.mask, is_causal=self.mask is None, enable_gqa=self.shared
        )
        return x + self.o(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *sizes: Any, kind: type[nn.Module] = Layer, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(kind(*sizes) for _ in range(layers))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def by_heads(program: Lowered) -> list[Node]:
    return [n for n in program.nodes() if any(isinstance(f, ByHeads) for f in (n.target, *n.args))]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("heads", "key_heads"), [*SHARED, (7, 1), (9, 3), (14, 7)])
def test_program_by_heads_is_that_of_one_device(heads: int, key_heads: int, n: int) -> None:
    with kernel_calls() as calls:
        program = assert_program_equals_whole(Model(heads, key_heads), (IDS,), n, tile=WHOLE)
    (node,) = by_heads(program)
    placed = facts(node).placement  # on two ranks each may have a row of the batch
    split = isinstance(placed, Shard) and placed.dim == 1
    there = placed.sizes if split else [heads] * n
    # What reads one key head each is one call for each head; so is a rank that has just one.
    assert calls == [(1, 1)] * sum(count for count in there if count > 1)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (7, 7)])
@pytest.mark.parametrize("mask", [1, "each"])
def test_masks_go_with_their_heads(mask: Any, heads: int, key_heads: int, n: int) -> None:
    model = Model(heads, key_heads, heads if mask == "each" else 1)
    program = assert_program_equals_whole(model, (IDS,), n, tile=WHOLE)
    (node,) = by_heads(program)
    assert "the mask as it is given" in facts(node).note


# -- checkpointing ---------------------------------------------------------------------------------


MODES: dict[str, tuple[str | Checkpoint, int | None]] = {
    "none": ("none", None),
    "full": ("full", None),
    "sequence": ("sequence", None),
    "by name": (Checkpoint(("scaled_dot_product_attention",)), None),
    "exchanges": (Checkpoint(("exchanges",)), None),
    "auto, little": ("auto", 3_000),
    "auto, more": ("auto", 30_000),
}


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [(8, 2), (7, 7)])
def test_what_runs_again_is_the_same(heads: tuple[int, int], mode: str, n: int) -> None:
    """Generated code on threads: exchanges of ranks whose heads differ in number run again."""
    model = Model(*heads, layers=2)
    ran = assert_ranks_give_the_whole(model, (IDS,), n, asked(*MODES[mode]), WHOLE)
    assert len(by_heads(ran.program)) == 2


@pytest.mark.parametrize("mode", ["none", "full", "sequence", "auto"])
def test_offloaded_values_come_back(mode: str, mesh: DeviceMesh) -> None:  # noqa: F811
    ids = ids_of_t(2, 13)
    grads = []
    for offload in ("none", 1 << 30):
        model = ModelT(TConfig(layers=3, heads=4, kv_heads=2))
        model = autosp.parallelize(model, mesh, tile=WHOLE, checkpoint=mode, offload=offload)
        model(ids, ids).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert "4 groups of heads" in str(autosp.explain(model))
    assert grads[0]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def cut_region(length: int, most: int | None = MOST_WORKSPACE) -> tuple[Region, Node]:
    region = layer_region(length)
    attend_by_heads(region, most)
    (node,) = (n for n in region.graph.nodes if is_attention(n))
    return region, node


def test_attention_stays_attention() -> None:
    region, node = cut_region(65536)
    plain, before = cut_region(65536, 1 << 60)
    assert isinstance(node.target, ByHeads) and not isinstance(before.target, ByHeads)
    assert inner(node) is F.scaled_dot_product_attention
    assert flops_of(node) == flops_of(before) > 0
    assert Checkpoint(("scaled_dot_product_attention",)).keeps(node)
    (a, ka), (b, kb) = ((record(r).kept_bytes(), n) for r, n in ((region, node), (plain, before)))
    assert a[ka] == b[kb] and sum(a.values()) == sum(b.values())


@pytest.mark.parametrize(("length", "groups"), [(32768, 1), (65536, 2), (131072, 4), (1 << 20, 4)])
def test_auto_makes_groups_where_workspace_is_large(length: int, groups: int) -> None:
    """Four heads of 128 that read one key head, on each of eight ranks."""
    _, node = cut_region(length)
    assert isinstance(node.target, ByHeads) == (groups > 1)
    assert facts(node).note == "sdpa: is_causal" + (
        f", {groups} groups of heads" if groups > 1 else ""
    )


@pytest.mark.parametrize(("tile", "cut"), [("none", 0), ("auto", 0), (WHOLE, 1)])
def test_tile_says_whether_there_are_groups(tile: str | int, cut: int) -> None:
    for grad in (True, False):
        program = lowered(Model(4, 2), (IDS,), 2)
        tile_free(program.root, 1, tile, grad=grad)
        assert len(by_heads(program)) == (cut and grad)


def test_dropout_and_what_is_no_kernel_stay_whole() -> None:
    """A draw for some heads at a time would be another."""

    class Other(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                y(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.q, self.k, self.v)
            )
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            return out + ((q @ k.mT).tanh().tril().softmax(-1) @ v)

    program = lowered(Model(4, 4, kind=Other), (IDS,), 2, tile=WHOLE)
    assert not by_heads(program)
    assert {"scaled_dot_product_attention", "tiled_attention"} <= {
        short_name(n.target) for n in program.nodes()
    }
