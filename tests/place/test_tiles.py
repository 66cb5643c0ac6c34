"""Masks that depend on data, made tile by tile while attention runs: like the whole mask."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import facts
from autosp_dtensor.place.masks import tiles
from autosp_dtensor.place.masks.frame import Rect
from tests.pieces import glue
from tests.place import positions
from tests.simulate import Lowered, Ranks, assert_program_equals_whole, lowered

LENGTH = 13
INF = float("inf")
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [0] * 1 + [1] * 11 + [2] * 1])
PADDING = torch.tensor([[1] * 9 + [0] * 4, [0] * 5 + [1] * 8])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller than the sequence, so that borders are met."""
    monkeypatch.setattr(tiles, "TILE", 4)


q_at, k_at, causal = (
    functools.partial(each, LENGTH) for each in (positions.q_at, positions.k_at, positions.causal)
)


def documents(d: Tensor) -> Tensor:
    return (d[:, None, :, None] == d[:, None, None, :]) & causal()


def padding(p: Tensor) -> Tensor:
    return p[:, None, None, :].bool() & causal()


def both(d: Tensor, p: Tensor) -> Tensor:
    return documents(d) & p[:, None, None, :].bool()


def packed(d: Tensor) -> Tensor:
    """One row of documents for the whole batch, two dims."""
    return (d[0][:, None] == d[0][None, :]) & causal()


def window(p: Tensor) -> Tensor:
    return padding(p) & (q_at() - k_at() < 4)


def additive(p: Tensor) -> Tensor:
    return torch.where(padding(p), 0.0, -INF).double()


def additive_finite(p: Tensor) -> Tensor:
    return torch.zeros(2, 1, LENGTH, LENGTH).double().masked_fill(~padding(p), -1e9)


def bidirectional(d: Tensor) -> Tensor:
    return (d[:, None, :, None] == d[:, None, None, :]).expand(-1, 4, -1, -1)


def prefix(p: Tensor) -> Tensor:
    return causal() | (k_at() < p.sum(1)[:, None, None, None] - 4)


def slopes(p: Tensor) -> Tensor:
    """A bias of each head, as ALiBi has."""
    each = torch.tensor([0.5, 0.25, 0.125, 0.0625]).double()[None, :, None, None]
    return (each * (k_at() - q_at()).double()).masked_fill(~padding(p), -INF)


def heads_apart(p: Tensor) -> Tensor:
    """Odd heads look back, even ones at a window."""
    odd = (torch.arange(4) % 2 == 1)[None, :, None, None]
    return padding(p) & (odd | (q_at() - k_at() < 3))


def nothing_for_some(p: Tensor) -> Tensor:
    return padding(p) & p[:, None, :, None].bool()


MASKS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "documents": (documents, (DOCUMENTS,)),
    "padding": (padding, (PADDING,)),
    "documents and padding": (both, (DOCUMENTS, PADDING)),
    "one row of documents": (packed, (DOCUMENTS,)),
    "padding and a window": (window, (PADDING,)),
    "padding, added": (additive, (PADDING,)),
    "padding, added, finite": (additive_finite, (PADDING,)),
    "documents both ways, for each head": (bidirectional, (DOCUMENTS,)),
    "prefix of a length in the data": (prefix, (PADDING,)),
    "slopes": (slopes, (PADDING,)),
    "heads apart": (heads_apart, (PADDING,)),
    "queries that read nothing": (nothing_for_some, (PADDING,)),
}


def model(mask: Callable[..., Tensor], heads: int = 4, keys: int = 4) -> Callable[..., Tensor]:
    table = torch.randn(16, heads * 2, generator=torch.Generator().manual_seed(0)).double()
    table.requires_grad_()

    def call(ids: Tensor, *data: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        q = (x * 1.3).unflatten(-1, (heads, 2)).transpose(1, 2)
        k, v = (
            (x[..., : keys * 2] * factor).unflatten(-1, (keys, 2)).transpose(1, 2)
            for factor in (0.7, -0.9)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask(*data), enable_gqa=heads != keys
        )
        return out.transpose(1, 2).flatten(2)

    return call


IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_one_device(name: str, n: int) -> None:
    build, data = MASKS[name]
    assert_program_equals_whole(model(build), (IDS, *data), n)


def test_attention_in_one_tile_is_that_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 512)
    for build, data in MASKS.values():
        assert_program_equals_whole(model(build), (IDS, *data), 2)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("keys", [1, 2])
def test_shared_key_heads_are_those_of_one_device(keys: int, n: int) -> None:
    assert_program_equals_whole(model(both, keys=keys), (IDS, DOCUMENTS, PADDING), n)


def _without_square(program: Lowered) -> bool:
    return program.largest() < LENGTH * LENGTH * 2


@pytest.mark.parametrize("name", ["documents", "padding", "documents and padding",
                                  "padding and a window", "padding, added"])  # fmt: skip
def test_no_rank_makes_the_whole_mask(name: str) -> None:
    build, data = MASKS[name]
    program = lowered(model(build), (IDS, *data), 2)
    assert len(program.named("tiled_attention")) == 1
    assert _without_square(program)


def _results(program: Lowered, *inputs: Tensor) -> Tensor:
    n = program.n
    (parts,) = Ranks(n, program.state).run(program.root, [[x] * n for x in inputs])
    output = next(node for node in program.flat.nodes if node.op == "output")
    return glue(parts, facts(output).placements[0])


@pytest.mark.parametrize("n", [2, 4])
def test_program_follows_data_that_changes_from_call_to_call(n: int) -> None:
    """Each step brings new documents in new tensors, and the old ones are gone."""
    call = model(documents)
    program = lowered(call, (IDS, DOCUMENTS), n)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        steps = torch.rand(2, LENGTH, generator=generator) < 0.3
        data = steps.long().cumsum(1)
        torch.testing.assert_close(_results(program, IDS, data), call(IDS, data))
        del data, steps


@pytest.mark.parametrize("n", [2, 4])
def test_program_follows_data_that_changes_in_place(n: int) -> None:
    call = model(padding)
    data = PADDING.clone()
    program = lowered(call, (IDS, data), n)
    for column in range(LENGTH):
        data[0, column] = 1 - data[0, column]
        data[:, 0] = 1
        torch.testing.assert_close(_results(program, IDS, data), call(IDS, data))


def test_tiles_are_found_anew_for_tensors_that_took_the_place_of_others() -> None:
    """A freed tensor's id is given to the next one: the same id is not the same data."""
    program = lowered(model(padding), (IDS, PADDING), 1)
    (node,) = program.named("tiled_attention")
    mask = node.kwargs["mask"]
    shapes = [facts(leaf).meta for leaf in mask.leaves]
    fixed = {meta.shape: torch.arange(LENGTH).view(meta.shape) for meta in shapes if
             meta.dtype == torch.int64}  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        allowed = torch.rand(2, 1, 1, LENGTH, generator=generator) < 0.5
        leaves = [allowed if m.dtype == torch.bool else fixed[m.shape] for m in shapes]
        assert mask.bands(leaves) == mask._find_bands(leaves)
        del allowed, leaves


def test_tiles_that_allow_nothing_are_not_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work grows with the strips, not with their square."""
    counts = []
    real = tiles.bounds
    monkeypatch.setattr(tiles, "bounds", lambda *given: counts.append(1) or real(*given))

    def looked(length: int) -> int:
        q = torch.randn(1, 1, length, 4, dtype=torch.float64)

        def call(q: Tensor) -> Tensor:
            at = torch.arange(length)
            mask = (at <= at[:, None]) & (at[:, None] - at < 5)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

        program = lowered(call, (q,), 1)
        counts.clear()
        torch.testing.assert_close(_results(program, q), call(q))
        return len(counts)

    assert looked(1024) < 2.5 * looked(512)


def test_two_layers_with_other_masks_do_not_mix() -> None:
    first, second = model(documents), model(window)

    def call(ids: Tensor, d: Tensor, p: Tensor) -> Tensor:
        return first(ids, d) + second(ids, p) + first(ids, p)

    assert_program_equals_whole(call, (IDS, DOCUMENTS, PADDING), 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + out.transpose(1, 2).flatten(2)


class LayersApart(nn.Module):
    """Each layer's mask is built by the same operations from another number."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.mask = mask

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer, number in zip(self.layers, (3, 5, 3), strict=True):
            x = layer(x, self.mask(number))
        return x


@pytest.mark.parametrize("mask", [
    lambda w: causal() & (q_at() - k_at() < w),
    lambda w: causal() & (q_at() // w == k_at() // w),
    lambda w: ((k_at() - q_at()) / w).double(),
    lambda w: torch.where((q_at() - k_at()).abs() < w, 0.0, -INF).double(),
], ids=["window", "chunks", "bias", "window both ways, added"])  # fmt: skip
def test_layers_whose_masks_differ_in_a_number_alone_do_not_mix(
    mask: Callable[[int], Tensor],
) -> None:
    """They would be one block, and take the first one's mask."""
    torch.manual_seed(0)
    assert_program_equals_whole(LayersApart(mask), (IDS,), 2)


def test_text_that_ranks_compare_tells_masks_apart() -> None:
    model = LayersApart(lambda w: causal() & (q_at() - k_at() < w))
    nodes = lowered(model, (IDS,), 2).named("tiled_attention")
    texts = [repr(node.kwargs["mask"]) for node in nodes]
    assert texts[0] == texts[2] != texts[1]


def test_mask_that_is_made_of_no_tensor_is_made_where_queries_are() -> None:
    """Else a band of a window, written as tril and triu of ones, would stay on the CPU."""
    banded = model(lambda: torch.ones(LENGTH, LENGTH).tril().triu(-3).bool())
    (node,) = lowered(banded, (IDS,), 1).named("tiled_attention")
    mask = node.kwargs["mask"]
    assert mask.leaves == []
    rect = Rect(0, 4, 0, 4)
    assert mask.values([], rect, torch.device("meta")).device.type == "meta"


def test_trained_bias_keeps_its_gradient() -> None:
    bias = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)).double()
    bias.requires_grad_()
    for n in (1, 2, 4):
        assert_program_equals_whole(
            model(lambda p: bias.masked_fill(~padding(p), -INF)), (IDS, PADDING), n
        )


@pytest.mark.parametrize("n", [2, 4])
def test_attention_under_autocast_is_that_of_one_device(n: int) -> None:
    table = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    table.requires_grad_()

    def call(ids: Tensor, d: Tensor) -> Tensor:
        x = F.embedding(ids, table).unflatten(-1, (4, 2)).transpose(1, 2)
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=documents(d))
        return out.transpose(1, 2).flatten(2)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_program_equals_whole(call, (IDS, DOCUMENTS), n, gradients=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_attention_by_hand_with_a_mask_from_data_is_that_of_one_device(n: int) -> None:
    table = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).double()
    table.requires_grad_()

    def call(ids: Tensor, d: Tensor, p: Tensor) -> Tensor:
        x = F.embedding(ids, table).unflatten(-1, (4, 2)).transpose(1, 2)
        scores = (x @ x.mT) * 0.5 + torch.where(both(d, p), 0.0, -1e9)
        return (scores.softmax(-1) @ x).transpose(1, 2).flatten(2)

    assert_program_equals_whole(call, (IDS, DOCUMENTS, PADDING), n)
