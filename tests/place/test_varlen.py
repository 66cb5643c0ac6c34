"""Masks made of runs of keys go to flash-attn's variable-length kernel, whatever built them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.errors import UsageError
from autosp_dtensor.place.masks import Runs, tiles, varlen
from tests.place import positions
from tests.place.varlen import flash_attn_here
from tests.simulate import Lowered, Ranks, assert_program_equals_whole, lowered

__all__ = ["flash_attn_here"]

LENGTH = 13
INF = float("inf")
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
# Over cuts, at cuts, of one token; each row its own.
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [0] * 1 + [1] * 10 + [2] * 1 + [3] * 1])
ALONE = torch.arange(LENGTH).expand(2, -1).contiguous()
# A document goes on after another one.
TORN = torch.tensor([[0] * 4 + [1] * 6 + [0] * 3, [0] * 5 + [1] * 8])
PADDING = torch.tensor([[1] * 9 + [0] * 4, [0] * 5 + [1] * 8])

# Which distances each of four heads reads.
HEADS_OF = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0]])

Mask = Callable[..., Tensor]
Fixture = list[tuple[int, int]]


q_at, k_at, causal = (
    functools.partial(each, LENGTH) for each in (positions.q_at, positions.k_at, positions.causal)
)


def same(d: Tensor) -> Tensor:
    return d[:, None, :, None] == d[:, None, None, :]


def real(p: Tensor) -> Tensor:
    return p[:, None, None, :].bool()


def added(allowed: Tensor, least: float = -INF) -> Tensor:
    return torch.where(allowed, 0.0, least).double()


# A mask, what it is made of, and the windows of the calls that run it.
PROVED: dict[str, tuple[Mask, set[tuple[int, int]]]] = {
    "window": (lambda: causal() & (q_at() - k_at() < 4), {(3, 0)}),
    "window, by a distance": (lambda: (q_at() - k_at() - 1.5).abs() < 2, {(3, 0)}),
    "window, added": (lambda: added(causal() & (q_at() - k_at() < 4)), {(3, 0)}),
    "window, by a number": (lambda: added(causal() & (q_at() - k_at() < 4), -1e9), {(3, 0)}),
    "window both ways": (lambda: (q_at() - k_at()).abs() < 3, {(2, 2)}),
    "window, uneven": (lambda: (q_at() - k_at() < 2) & (k_at() - q_at() < 4), {(1, 3)}),
    "window of one": (lambda: q_at() == k_at(), {(-1, -1)}),
    "chunks": (lambda: causal() & (q_at() // 4 == k_at() // 4), {(-1, 0)}),
    "chunks both ways": (lambda: q_at() // 5 == k_at() // 5, {(-1, -1)}),
    "prefix": (lambda: causal() | (k_at() < 5), {(-1, -1), (-1, 0)}),
    "window by tril and triu": (
        lambda: torch.ones(LENGTH, LENGTH).tril(0).triu(-3).bool(), {(3, 0)}
    ),
}  # fmt: skip
FOUND: dict[str, tuple[Mask, tuple[Tensor, ...], set[tuple[int, int]]]] = {
    "documents": (lambda d: same(d) & causal(), (DOCUMENTS,), {(-1, 0)}),
    "documents by a difference": (
        lambda d: ((d[:, None, :, None] - d[:, None, None]).abs() < 1) & causal(),
        (DOCUMENTS,), {(-1, 0)},
    ),
    "documents both ways": (same, (DOCUMENTS,), {(-1, -1)}),
    "documents, added": (lambda d: added(same(d) & causal()), (DOCUMENTS,), {(-1, 0)}),
    "documents, by a number": (
        lambda d: added(same(d) & causal(), -1e9), (DOCUMENTS,), {(-1, 0)}
    ),
    "documents of one token": (lambda d: same(d) & causal(), (ALONE,), {(-1, -1)}),
    "documents of one row": (
        lambda d: (d[0][:, None] == d[0][None]) & causal(), (DOCUMENTS,), {(-1, 0)}
    ),
    "documents and a window": (
        lambda d: same(d) & causal() & (q_at() - k_at() < 3), (DOCUMENTS,), {(2, 0)}
    ),
    "documents and a window both ways": (
        lambda d: same(d) & ((q_at() - k_at()).abs() < 3), (DOCUMENTS,), {(2, 2)}
    ),
    "padding": (lambda p: real(p) & causal(), (PADDING,), {(-1, 0), (-1, -1)}),
    "padding, queries too": (
        lambda p: real(p) & causal() & p[:, None, :, None].bool(), (PADDING,), {(-1, 0)}
    ),
    "padding both ways": (
        lambda p: real(p).expand(-1, -1, LENGTH, -1) & (k_at() > q_at() - 99), (PADDING,),
        {(-1, -1)},
    ),
    "padding of keys alone": (lambda p: real(p), (PADDING,), {(-1, -1)}),
    "padding of keys alone, added": (lambda p: added(real(p)), (PADDING,), {(-1, -1)}),
    "padding of keys alone, for each head": (
        lambda p: real(p).expand(-1, 4, -1, -1), (PADDING,), {(-1, -1)}
    ),
    "padding and a window": (
        lambda p: real(p) & causal() & (q_at() - k_at() < 6), (PADDING,), {(5, 0), (1, -1)}
    ),
    "documents and padding": (
        lambda d, p: same(d) & real(p) & causal(), (DOCUMENTS, PADDING), {(-1, 0)}
    ),
    "documents, said for each head": (
        lambda d: (same(d) & causal()).expand(-1, 4, -1, -1), (DOCUMENTS,), {(-1, 0)}
    ),
    "a row that reads nothing": (
        lambda p: real(p) & causal(), (PADDING * torch.tensor([[1], [0]]),), {(-1, 0), (-1, -1)}
    ),
    "prefix of a length in the data": (
        lambda p: causal() | (k_at() < p.sum(1)[:, None, None, None] - 4), (PADDING,),
        {(-1, -1), (-1, 0)},
    ),
}  # fmt: skip
TILES: dict[str, tuple[Mask, tuple[Tensor, ...]]] = {
    "ids that come back": (lambda d: same(d) & causal(), (TORN,)),
    "holes": (lambda p: causal() & (real(p) | (k_at() % 3 == 0)), (PADDING,)),
    "holes in keys alone": (lambda p: real(p) | (k_at() % 3 == 0), (PADDING,)),
    "nothing at all": (lambda p: real(p) & causal(), (PADDING * 0,)),
    "a query that reads nothing, by a number": (
        lambda p: added(real(p) & causal(), -1e9), (PADDING,)
    ),
    "a bias": (lambda p: added(real(p) & causal()) - (q_at() - k_at()).abs(), (PADDING,)),
    "heads apart by a table": (
        lambda p: (q_at() - k_at()).clamp(0, 3)[None] * 0
        + HEADS_OF[(q_at() - k_at()).clamp(0, 3)].permute(2, 0, 1) == 1, (PADDING,)
    ),
    "heads apart": (
        lambda p: real(p) & ((torch.arange(4) > 1)[:, None, None] | causal()), (PADDING,)
    ),
}  # fmt: skip


class Attention:
    """Queries, keys and values of one table; values of `size` may be wider than keys."""

    def __init__(
        self, mask: Mask, heads: int = 4, keys: int = 4, wide: int = 2, by: str = "sdpa"
    ) -> None:
        self.mask, self.heads, self.keys, self.wide, self.by = mask, heads, keys, wide, by
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(16, heads * 4, generator=generator, dtype=torch.float64)
        self.table.requires_grad_()
        self.scale: float | None = None

    def __call__(self, ids: Tensor, *data: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        q = (x[..., : self.heads * 2] * 1.3).unflatten(-1, (self.heads, 2)).transpose(1, 2)
        k = (x[..., : self.keys * 2] * 0.7).unflatten(-1, (self.keys, 2)).transpose(1, 2)
        v = x[..., -self.keys * self.wide :] * -0.9
        v = v.unflatten(-1, (self.keys, self.wide)).transpose(1, 2)
        mask = self.mask(*data)
        if self.by == "sdpa":
            grouped = self.keys != self.heads
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=grouped
            )
        else:
            scores = q @ k.transpose(-1, -2) * (2**-0.5 if self.scale is None else self.scale)
            if mask.dtype != torch.bool:
                scores = scores + mask
            else:
                scores = scores.masked_fill(~mask, -INF if self.by == "-inf" else -1e9)
            out = scores.softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


def runs_in(program: Lowered) -> list[Runs | None]:
    return [node.kwargs.get("runs") for node in program.named("tiled_attention")]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("by", ["sdpa", "-inf", "-1e9"])
@pytest.mark.parametrize("name", PROVED)
def test_mask_that_no_data_says_is_proved(
    flash_attn_here: Fixture, name: str, by: str, n: int
) -> None:
    mask, windows = PROVED[name]
    program = assert_program_equals_whole(Attention(mask, by=by), (IDS,), n)
    (runs,) = runs_in(program)
    assert runs is not None and runs.known is not None
    assert set(flash_attn_here) == windows


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", FOUND)
def test_mask_that_data_say_is_found_while_it_runs(
    flash_attn_here: Fixture, name: str, n: int
) -> None:
    mask, data, windows = FOUND[name]
    program = assert_program_equals_whole(Attention(mask), (IDS, *data), n)
    assert runs_in(program) == [Runs()]
    assert set(flash_attn_here) == windows


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("by", ["-inf", "-1e9"])
@pytest.mark.parametrize(
    "name", [name for name in FOUND if "padding" not in name and "row" not in name]
)
def test_mask_that_data_say_in_attention_by_hand(
    flash_attn_here: Fixture, name: str, by: str, n: int
) -> None:
    mask, data, windows = FOUND[name]
    program = assert_program_equals_whole(Attention(mask, by=by), (IDS, *data), n)
    assert len(program.named("tiled_attention")) == 1
    assert set(flash_attn_here) == windows


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", ["padding", "documents and padding", "a row that reads nothing"])
def test_query_that_reads_nothing_by_hand_reads_all_keys_alike(
    flash_attn_here: Fixture, name: str, n: int
) -> None:
    """Where masks are finite numbers: no kernel does so."""
    mask, data, _ = FOUND[name]
    program = assert_program_equals_whole(Attention(mask, by="-1e9"), (IDS, *data), n)
    assert len(program.named("tiled_attention")) == 1
    assert not flash_attn_here


class Capped(Attention):
    def __call__(self, ids: Tensor, *data: Tensor) -> Tensor:
        x = F.embedding(ids, self.table).unflatten(-1, (8, 2)).transpose(1, 2)
        scores = torch.tanh(x @ x.mT * 0.3).masked_fill(~self.mask(*data), -1e9)
        return (scores.softmax(-1) @ x).transpose(1, 2).flatten(2)


def test_scores_that_are_capped_go_by_strips(flash_attn_here: Fixture) -> None:
    mask, data, _ = FOUND["documents"]
    program = assert_program_equals_whole(Capped(mask), (IDS, *data), 2)
    assert runs_in(program) == [None] and not flash_attn_here


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", TILES)
def test_mask_that_is_no_runs_goes_by_tiles(flash_attn_here: Fixture, name: str, n: int) -> None:
    mask, data = TILES[name]
    program = assert_program_equals_whole(Attention(mask), (IDS, *data), n)
    assert len(program.named("tiled_attention")) == 1
    assert not flash_attn_here


@pytest.mark.parametrize(("heads", "keys"), [(7, 7), (9, 3), (14, 2), (4, 1), (3, 1)])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_any_number_of_heads(flash_attn_here: Fixture, heads: int, keys: int, n: int) -> None:
    mask, data, windows = FOUND["documents and a window"]
    assert_program_equals_whole(Attention(mask, heads, keys), (IDS, *data), n)
    assert set(flash_attn_here) == windows


@pytest.mark.parametrize("scale", [0.3, 0.0, 1.0])
def test_scale_is_the_models(flash_attn_here: Fixture, scale: float) -> None:
    mask, data, _ = FOUND["documents"]
    attention = Attention(mask)
    attention.scale = scale
    assert_program_equals_whole(attention, (IDS, *data), 2)
    assert flash_attn_here


@pytest.mark.parametrize("wide", [1, 4])
def test_values_of_another_size_go_by_tiles(flash_attn_here: Fixture, wide: int) -> None:
    mask, data, _ = FOUND["documents"]
    program = assert_program_equals_whole(Attention(mask, wide=wide), (IDS, *data), 2)
    assert runs_in(program) == [None] and not flash_attn_here


def test_mask_is_looked_at_once_for_all_layers(
    flash_attn_here: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    spans = tiles.spans
    monkeypatch.setattr(tiles, "spans", lambda *a: (looks.append(a), spans(*a))[1])
    mask, data, _ = FOUND["documents"]
    layer = Attention(lambda given: given)

    def layers(ids: Tensor, d: Tensor) -> Tensor:
        shared = mask(d)
        return layer(ids, shared) + layer(ids, shared) * 2

    assert_program_equals_whole(layers, (IDS, *data), 1)
    assert len(flash_attn_here) == 2
    assert len(looks) == 2  # rows of the batch


def test_gradients_of_gradients_are_refused(flash_attn_here: Fixture) -> None:
    mask, data, _ = FOUND["documents"]
    attention = Attention(mask)
    program = lowered(attention, (IDS, *data), 1)
    ((out,),) = Ranks(1, program.state).run(program.root, [[IDS], [data[0]]])
    with pytest.raises(UsageError, match="flash-attn"):
        torch.autograd.grad(out.sum(), attention.table, create_graph=True)


def test_dropout_is_the_kernels(flash_attn_here: Fixture) -> None:
    """Values are ones: without dropout each result is 1. Heads and ranks draw their own."""
    mask, data, _ = FOUND["documents"]

    def dropped(q: Tensor, d: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q * 0 + 1, attn_mask=mask(d), dropout_p=0.5)

    x = torch.randn(2, 4, LENGTH, 2, dtype=torch.float64)
    program = lowered(dropped, (x, *data), 2, 2)
    (parts,) = Ranks(2, program.state).run(program.root, [[*x.chunk(2, 2)], [data[0]] * 2])
    assert flash_attn_here
    first, *others = torch.cat(parts, 2)[..., 0].transpose(0, 1).flatten(1)
    assert first.unique().numel() > LENGTH
    assert not any(torch.equal(first, other) for other in others)


def test_under_autocast_what_autocast_gives_is_taken(flash_attn_here: Fixture) -> None:
    mask, data, _ = FOUND["documents"]
    attention = Attention(mask)
    attention.table = attention.table.detach().float()
    for dtypes, taken in [((torch.bfloat16,), True), ((torch.float64,), False)]:
        varlen.TAKES["cpu"] = dtypes
        with torch.autocast("cpu", dtype=torch.bfloat16):
            program = lowered(lambda ids, d: attention(ids, d), (IDS, *data), 2)
        assert (runs_in(program) == [Runs()]) is taken


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [4, 9, 20])
def test_keys_of_another_sequence(flash_attn_here: Fixture, length: int, n: int) -> None:
    """Padded keys, a window that moves with the queries, and causal counted from the front."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(16, 8, generator=generator, dtype=torch.float64).requires_grad_()
    other = torch.randint(16, (2, length), generator=generator)
    padding = torch.ones(2, length, dtype=torch.int64)
    padding[0, length // 2 :] = 0
    keys = torch.arange(length)

    def attention(ids: Tensor, other: Tensor, p: Tensor) -> Tensor:
        q, k = (F.embedding(x, table).unflatten(-1, (4, 2)).transpose(1, 2) for x in (ids, other))
        one = F.scaled_dot_product_attention(q, k, k * 2, attn_mask=real(p))
        two = F.scaled_dot_product_attention(one, k, k, attn_mask=real(p) & (keys <= q_at()))
        near = (q_at() * length // LENGTH - keys).abs() < 3
        return F.scaled_dot_product_attention(two, k, k, attn_mask=near)

    assert_program_equals_whole(attention, (IDS, other, padding), n)
    assert flash_attn_here


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, dtype=torch.float64)
        self.inner = nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.table(ids)
        return self.inner(x, x, x, key_padding_mask=padding == 0, need_weights=False)[0]


@pytest.mark.parametrize("n", [2, 3])
def test_padding_of_multihead_attention(flash_attn_here: Fixture, n: int) -> None:
    """It says one mask for each head, and all are alike."""
    torch.manual_seed(0)
    assert_program_equals_whole(Padded(), (IDS, PADDING), n)
    assert set(flash_attn_here) == {(-1, -1)}
