"""Masks are recognized by what they allow, whoever built them and however; and never by half."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.place.masks import Pattern, recognize
from tests.simulate import assert_program_equals_whole, lowered

Build = Callable[[Tensor, int], Tensor]
INF = float("inf")
LEAST = torch.finfo(torch.float32).min


def attend(build: Build) -> Callable[[Tensor], Tensor]:
    def call(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=build(q, q.shape[-2]))

    return call


def mask_of(build: Build, length: int, heads: int = 2) -> Node:
    q = torch.empty(1, heads, length, 4)
    graph = capture(read_call(attend(build), (q,), {}, lambda t: None)).graph
    (node,) = [n for n in graph.nodes if getattr(n.target, "__name__", "") == _SDPA]
    mask = node.kwargs["attn_mask"]
    assert isinstance(mask, Node)
    return mask


_SDPA = "scaled_dot_product_attention"


def pattern(build: Build, length: int) -> Pattern | None:
    return recognize(mask_of(build, length))


def _rows(s: int) -> tuple[Tensor, Tensor]:
    return torch.arange(s)[:, None], torch.arange(s)[None, :]


def _by_rule(holds: Callable[[Tensor, Tensor], Tensor]) -> Build:
    def build(q: Tensor, s: int) -> Tensor:
        rows, columns = _rows(s)
        return holds(rows, columns)

    return build


def _ones(q: Tensor, s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool, device=q.device)


CAUSAL: dict[str, Build] = {
    "tril of ones": lambda q, s: torch.tril(torch.ones(s, s, dtype=torch.bool, device=q.device)),
    "tril method": lambda q, s: _ones(q, s).tril(),
    "tril in place": lambda q, s: _ones(q, s).tril_(),
    "tril of float ones as bool, viewed": lambda q, s: (
        torch.tril(torch.ones(s, s)).view(1, 1, s, s).bool()
    ),
    "tril of ones compared": lambda q, s: torch.tril(torch.ones(s, s)) == 1,
    "triu of ones negated": lambda q, s: ~torch.triu(_ones(q, s), 1),
    "triu of ones, logical_not": lambda q, s: torch.logical_not(torch.triu(_ones(q, s), 1)),
    "triu of -inf": lambda q, s: torch.triu(torch.full((s, s), -INF, device=q.device), diagonal=1),
    "triu of -inf in place": lambda q, s: torch.full((s, s), -INF).triu_(1),
    "triu of the least value": lambda q, s: torch.full((s, s), LEAST).triu(1)[None, None],
    "-inf filled where triu": lambda q, s: torch.zeros(s, s).masked_fill(_ones(q, s).triu(1), -INF),
    "-1e9 filled in place where not tril": lambda q, s: torch.zeros(s, s).masked_fill_(
        torch.tril(torch.ones(s, s)) == 0, -1e9
    ),
    "positions compared >=": _by_rule(lambda r, c: r >= c),
    "positions compared <=": _by_rule(lambda r, c: c <= r),
    "positions compared <": _by_rule(lambda r, c: c < r + 1),
    "positions compared, unsqueezed": lambda q, s: (
        torch.arange(s).unsqueeze(-1) >= torch.arange(s).unsqueeze(0)
    )[None, None],
    "positions compared, views": lambda q, s: (
        torch.arange(s).view(1, s) <= torch.arange(s).view(s, 1)
    ),
    "difference of positions": _by_rule(lambda r, c: r - c >= 0),
    "where on positions": lambda q, s: torch.where(_rows(s)[1] <= _rows(s)[0], 0.0, LEAST),
    "where on positions, tensors": lambda q, s: torch.where(
        _rows(s)[1] > _rows(s)[0], torch.tensor(-INF), torch.tensor(0.0)
    ),
    "comparison times the least value": lambda q, s: (_rows(s)[1] > _rows(s)[0]) * LEAST,
    "tril expanded to heads": lambda q, s: _ones(q, s).tril().expand(*q.shape[:2], s, s),
    "tril sliced from a larger one": lambda q, s: torch.ones(s + 3, s + 3, dtype=torch.bool).tril()[
        :s, :s
    ],
    "both ways at once": _by_rule(lambda r, c: (c <= r) & (c - r <= 0)),
    "causal and a window that never ends": _by_rule(lambda r, c: (c <= r) & (r - c < 1 << 30)),
    "causal or never": _by_rule(lambda r, c: (c <= r) | (c < 0)),
    "one document": lambda q, s: (
        _by_rule(lambda r, c: c <= r)(q, s)
        & (torch.zeros(s, dtype=torch.int64)[:, None] == torch.zeros(s, dtype=torch.int64)[None])
    ),
    "cumulative positions": lambda q, s: (
        torch.ones(s, dtype=torch.int64).cumsum(0)[:, None]
        >= torch.ones(s, dtype=torch.int64).cumsum(0)[None]
    ),
    "float positions": _by_rule(lambda r, c: r.float() >= c.float()),
}
FULL: dict[str, Build] = {
    "ones": _ones,
    "zeros to add": lambda q, s: torch.zeros(1, 1, s, s, device=q.device),
    "nothing forbidden": _by_rule(lambda r, c: c >= 0),
    "window on both sides as wide as can be": _by_rule(lambda r, c: (r - c).abs() < 1 << 30),
    "full then filled nowhere": lambda q, s: torch.zeros(s, s).masked_fill(
        torch.zeros(s, s, dtype=torch.bool), -INF
    ),
    "one row for all queries": lambda q, s: torch.ones(1, 1, 1, s, dtype=torch.bool),
    "one column for all keys": lambda q, s: torch.zeros(s, 1),
}
LENGTHS = (1, 2, 7, 130, 1000)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_mask_is_recognized_however_it_is_built(name: str, length: int) -> None:
    want = Pattern.CAUSAL if length > 1 else Pattern.FULL  # of one token both are the same
    assert pattern(CAUSAL[name], length) is want


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", FULL)
def test_mask_that_allows_all_is_recognized(name: str, length: int) -> None:
    assert pattern(FULL[name], length) is Pattern.FULL


# Recognized at any length, but not by their bounds, so not at this one.
_NOT_LONG = {"cumulative positions", "one document", "window on both sides as wide as can be"}


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in _NOT_LONG])
def test_causal_mask_of_128k_tokens_is_recognized_in_two_seconds(name: str) -> None:
    mask = mask_of(CAUSAL[name], 131072)
    start = time.process_time()
    assert recognize(mask) is Pattern.CAUSAL
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("name", [n for n in CAUSAL if n not in {*_NOT_LONG, "float positions"}])
def test_causal_mask_of_16m_tokens_is_recognized_at_once(name: str) -> None:
    """Integer positions are lines: no tile along the diagonal is looked at."""
    mask = mask_of(CAUSAL[name], 1 << 24)
    start = time.process_time()
    assert recognize(mask) is Pattern.CAUSAL
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("name", [name for name in FULL if name not in _NOT_LONG])
def test_full_mask_of_128k_tokens_is_recognized_in_two_seconds(name: str) -> None:
    mask = mask_of(FULL[name], 131072)
    start = time.process_time()
    assert recognize(mask) is Pattern.FULL
    assert time.process_time() - start < 2.0


# -- near misses -----------------------------------------------------------------------------------


def _flipped(row: int, column: int) -> Build:
    """Causal but for one element."""

    def build(q: Tensor, s: int) -> Tensor:
        rows, columns = _rows(s)
        return (columns <= rows) ^ ((rows == row % s) & (columns == column % s))

    return build


def _dented(row: int, column: int) -> Build:
    """All allowed but for one element."""
    return lambda q, s: _rows(s)[0].ne(row % s) | _rows(s)[1].ne(column % s)


_PLACES = [(0, 0), (-1, -1), (-1, 0), (0, -1), (0, 1), (1, 0), (5, 5), (5, 6), (6, 5), (511, 512)]


@pytest.mark.parametrize(("row", "column"), _PLACES)
@pytest.mark.parametrize("length", [7, 130, 1000, 1025])
def test_one_element_less_or_more_is_not_causal(row: int, column: int, length: int) -> None:
    assert pattern(_flipped(row, column), length) is None


@pytest.mark.parametrize(("row", "column"), _PLACES)
@pytest.mark.parametrize("length", [7, 130, 1000, 1025])
def test_one_element_forbidden_is_not_full(row: int, column: int, length: int) -> None:
    assert pattern(_dented(row, column), length) is None


@pytest.mark.parametrize(("row", "column"), [(0, 0), (70000, 70000), (131071, 0), (99, 7)])
def test_one_element_less_of_128k_squared_is_noticed(row: int, column: int) -> None:
    less = _by_rule(lambda r, c: (c <= r) & (r.ne(row) | c.ne(column)))
    assert pattern(less, 131072) is None


@pytest.mark.parametrize(("row", "column"), [(0, 131071), (70000, 70001), (7, 99)])
def test_one_element_more_of_128k_squared_is_noticed(row: int, column: int) -> None:
    more = _by_rule(lambda r, c: (c <= r) | (r.eq(row) & c.eq(column)))
    assert pattern(more, 131072) is None


def _overwritten(mask: Tensor) -> Tensor:
    mask[2:3] = True
    return mask


NEAR: dict[str, Build] = {
    "strictly below the diagonal": lambda q, s: _ones(q, s).tril(-1),
    "one above the diagonal": lambda q, s: _ones(q, s).tril(1),
    "triu of -inf from 2": lambda q, s: torch.full((s, s), -INF).triu(2),
    "triu of -inf from 0": lambda q, s: torch.full((s, s), -INF).triu(0),
    "anticausal": lambda q, s: _ones(q, s).triu(),
    "window": _by_rule(lambda r, c: (c <= r) & (r - c < 3)),
    "window of all but one": lambda q, s: _by_rule(lambda r, c: (c <= r) & (r - c < s - 1))(q, s),
    "window on both sides": _by_rule(lambda r, c: (r - c).abs() < 3),
    "prefix": _by_rule(lambda r, c: (c <= r) | (c < 2)),
    "two documents": lambda q, s: (
        _by_rule(lambda r, c: c <= r)(q, s)
        & (_rows(s)[0].ge(s // 2) == _rows(s)[1].ge(s // 2))
    ),
    "every other key": _by_rule(lambda r, c: (c <= r) & (c % 2 == 0)),
    "chunks": _by_rule(lambda r, c: (c <= r) & (c // 4 == r // 4)),
    "nothing allowed": lambda q, s: torch.zeros(s, s, dtype=torch.bool),
    "bias": lambda q, s: torch.full((s, s), -INF).triu(1) + 0.5,
    "slope": _by_rule(lambda r, c: torch.where(c <= r, (c - r) * 0.1, -INF)),
    "weakly forbidden": lambda q, s: torch.zeros(s, s).masked_fill(_ones(q, s).triu(1), -10.0),
    "wrong sign": lambda q, s: torch.full((s, s), INF).triu(1),
    "causal on one head only": lambda q, s: torch.stack(
        [_ones(q, s).tril(), _ones(q, s)]
    ),
    "documents from data": lambda q, s: (
        _by_rule(lambda r, c: c <= r)(q, s) & (q[0, 0, :, 0] > 0)[None, :]
    ),
    "comparison times -inf, NaN where allowed": lambda q, s: (_rows(s)[1] > _rows(s)[0]) * -INF,
    "diagonal filled again": lambda q, s: _ones(q, s).tril().float().fill_diagonal_(0.0).bool(),
    "rows overwritten": lambda q, s: _overwritten(_ones(q, s).tril()),
    "random": lambda q, s: torch.rand(s, s) > 0.5,
    "causal and dropped at random": lambda q, s: _ones(q, s).tril() & (torch.rand(s, s) > 0.5),
    "transposed by index": lambda q, s: _ones(q, s).tril()[:, torch.arange(s - 1, -1, -1)],
    "causal rows shifted": lambda q, s: torch.ones(s + 1, s, dtype=torch.bool).tril()[1:],
    "causal columns shifted": lambda q, s: torch.ones(s, s + 1, dtype=torch.bool).tril()[:, 1:],
}  # fmt: skip


@pytest.mark.parametrize("length", [7, 130, 1000])
@pytest.mark.parametrize("name", NEAR)
def test_near_miss_is_not_recognized(name: str, length: int) -> None:
    assert pattern(NEAR[name], length) is None


@pytest.mark.parametrize("name", ["window", "two documents", "anticausal", "documents from data"])
def test_near_miss_at_128k_is_given_up_in_five_seconds(name: str) -> None:
    mask = mask_of(NEAR[name], 131072)
    start = time.process_time()
    assert recognize(mask) is None
    assert time.process_time() - start < 5.0


def test_mask_that_is_a_parameter_is_not_recognized() -> None:
    """Its values may change at any step."""
    bias = torch.zeros(7, 7, requires_grad=True)
    assert pattern(lambda q, s: bias * 1.0, 7) is None


def test_mask_for_fewer_queries_than_keys_is_never_causal() -> None:
    """The kernel's is_causal would count from the first key."""

    def call(q: Tensor, k: Tensor) -> Tensor:
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=columns <= rows)

    graph = capture(
        read_call(call, (torch.empty(1, 2, 4, 8), torch.empty(1, 2, 9, 8)), {}, lambda t: None)
    ).graph
    (node,) = [n for n in graph.nodes if getattr(n.target, "__name__", "") == _SDPA]
    assert recognize(node.kwargs["attn_mask"]) is None


# -- what is done with it --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_program_holds_no_square(name: str) -> None:
    program = lowered(attend(CAUSAL[name]), (torch.empty(1, 4, 512, 4),), 4, seq_dim=2)
    (node,) = program.named(_SDPA)
    assert node.kwargs["is_causal"] is True and node.kwargs["attn_mask"] is None
    assert program.largest() < 512 * 512


@pytest.mark.parametrize("name", FULL)
def test_full_program_holds_no_square(name: str) -> None:
    program = lowered(attend(FULL[name]), (torch.empty(1, 4, 512, 4),), 4, seq_dim=2)
    (node,) = program.named(_SDPA)
    assert not node.kwargs["is_causal"] and node.kwargs["attn_mask"] is None
    assert program.largest() < 512 * 512


_SMALL = [*CAUSAL.items(), *FULL.items(), *NEAR.items()]
_RANDOM = ("random", "causal and dropped at random")


@pytest.mark.parametrize(("name", "build"), [p for p in _SMALL if p[0] not in _RANDOM])
def test_attention_under_any_mask_is_that_of_one_device(name: str, build: Build) -> None:
    if name in ("nothing allowed", "wrong sign") or "NaN" in name:
        pytest.skip("one device gives NaN")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 9, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def double(q: Tensor, s: int) -> Tensor:
        mask = build(q, s)
        return mask.double() if mask.is_floating_point() else mask

    assert_program_equals_whole(attend(double), (q,), 3, seq_dim=2)


class Keeps(nn.Module):
    """A mask kept as a buffer, larger than any sequence."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)

    def forward(self, q: Tensor) -> Tensor:
        s = q.shape[-2]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.kept[..., :s, :s])


def test_causal_mask_kept_in_a_buffer_is_recognized() -> None:
    model = Keeps(torch.ones(1, 1, 16, 16, dtype=torch.bool).tril())
    q = torch.randn(1, 2, 12, 4, dtype=torch.float64)
    program = assert_program_equals_whole(model, (q,), 2, seq_dim=2)
    (node,) = program.named(_SDPA)
    assert node.kwargs["is_causal"] is True


def test_other_mask_kept_in_a_buffer_is_kept() -> None:
    kept = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    kept[..., 7, 3] = False
    q = torch.randn(1, 2, 12, 4, dtype=torch.float64)
    program = assert_program_equals_whole(Keeps(kept), (q,), 2, seq_dim=2)
    (node,) = program.named(_SDPA)
    assert not node.kwargs.get("is_causal")
