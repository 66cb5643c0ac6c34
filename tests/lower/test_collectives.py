"""Each collective against what it means for the whole value, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosp_dtensor.lower import collectives, exchange
from autosp_dtensor.placement import Cover, Partial, Replicate, Shard
from tests.lower.wire import on_ranks
from tests.pieces import cut, glue, shardings

R, P = Replicate(), Partial()


def told(batch: int = 2, length: int = 8, heads: int = 12) -> Tensor:
    """1000*b + 10*s + h and a size of 1: every element says where it belongs."""
    b, s, h = torch.meshgrid(
        torch.arange(batch), torch.arange(length), torch.arange(heads), indexing="ij"
    )
    return (1000.0 * b + 10 * s + h / 100)[..., None].double().expand(-1, -1, -1, 3) + torch.arange(
        3
    )


def run(source: Any, target: Any, parts: list[Tensor]) -> Callable[[Any, int], Tensor]:
    """One collective, as codegen calls it."""

    def body(group: Any, rank: int) -> Tensor:
        x = parts[rank]
        if isinstance(source, Partial):
            if isinstance(target, Replicate):
                return collectives.all_reduce(group, x)
            return collectives.reduce_scatter(group, rank, target, x)
        if isinstance(target, Replicate):
            return collectives.all_gather(group, rank, source, x)
        if source.dim == target.dim:
            return collectives.relayout(group, rank, source, target, x)
        return exchange.all_to_all(group, rank, ((source, target),), [x])[0]

    return body


def terms(whole: Tensor, n: int) -> list[Tensor]:
    """Terms of a sum, no two alike."""
    generator = torch.Generator().manual_seed(n)
    drawn = [
        torch.randint(-9, 9, whole.shape, generator=generator).to(whole.dtype) for _ in range(n - 1)
    ]
    return [*drawn, whole - sum(drawn)] if drawn else [whole]


def parts_of(whole: Tensor, placement: Any, n: int) -> list[Tensor]:
    return terms(whole, n) if isinstance(placement, Partial) else cut(whole, placement, n)


def _sharded(dim: int, length: int, n: int) -> list[Shard]:
    return [Shard(dim, sizes, outer) for sizes, outer in shardings(length, n)]


def moves(n: int) -> list[tuple[Any, Any]]:
    """Every kind of move of [2, 8, 12, 3]: even and uneven, with empty parts, in several blocks."""
    tokens, heads = _sharded(1, 8, n), _sharded(2, 12, n)
    pairs: list[tuple[Any, Any]] = [(a, b) for a in tokens for b in heads]
    pairs += [(b, a) for a, b in pairs]
    pairs += [(a, b) for a in tokens for b in tokens if a != b]
    pairs += [(a, R) for a in (*tokens, *heads)]
    pairs += [(P, a) for a in (*tokens, *heads)] + [(P, R)]
    return pairs


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_result_is_the_part_of_the_whole(n: int) -> None:
    whole = told()
    for source, target in moves(n):
        given, _ = on_ranks(n, run(source, target, parts_of(whole, source, n)))
        for got, want in zip(given, cut(whole, target, n), strict=True):
            assert torch.equal(got, want), f"{source} -> {target}"
            assert got.is_contiguous(), f"{source} -> {target}"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_backward_is_the_transpose(n: int) -> None:
    """For any cotangents the gradient is that of joining and cutting, summed over ranks."""
    whole = told(heads=12)
    generator = torch.Generator().manual_seed(1)
    for source, target in moves(n):
        parts = [p.clone().requires_grad_() for p in parts_of(whole, source, n)]
        weights = [
            torch.randint(-9, 9, p.shape, generator=generator).double()
            for p in cut(whole, target, n)
        ]
        forward = run(source, target, parts)

        def body(group: Any, rank: int, forward=forward, weights=weights, parts=parts) -> Tensor:
            out = forward(group, rank)
            return torch.autograd.grad(out, parts[rank], weights[rank])[0]

        got, _ = on_ranks(n, body)
        outs = cut(glue(parts, source), target, n)
        total = sum((o * w).sum() for o, w in zip(outs, weights, strict=True))
        want = torch.autograd.grad(total, parts, allow_unused=True)
        for g, w, p in zip(got, want, parts, strict=True):
            w = torch.zeros_like(p) if w is None else w
            assert torch.equal(g, w), f"{source} -> {target}"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_there_and_back_is_the_identity_bit_for_bit(n: int) -> None:
    whole = torch.randn(2, 8, 12, 3, generator=torch.Generator().manual_seed(0))
    whole[0, 0, 0] = torch.tensor([float("nan"), float("inf"), -0.0])
    pairs = [(a, b) for a, b in moves(n) if isinstance(a, Shard) and isinstance(b, Shard)]
    for source, target in pairs:
        parts = cut(whole, source, n)
        away, _ = on_ranks(n, run(source, target, parts))
        home, _ = on_ranks(n, run(target, source, away))
        for got, want in zip(home, parts, strict=True):
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_several_tensors_travel_in_one_exchange(n: int, even: bool) -> None:
    """q [B, S, H, D], and keys with fewer heads, laid out [B, H, S, D]."""
    length, heads = (12, 12) if even else (7, 5)
    q, k = told(2, length, heads), told(2, length, 2 * n if even else 3).transpose(1, 2) + 0.5

    def each(dim: int, size: int) -> Shard:
        return Shard(dim, tuple(size // n + (r < size % n) for r in range(n)))

    sent = ((each(1, length), each(2, heads)), (each(2, length), each(1, k.shape[1])))
    parts = [cut(x, source, n) for x, (source, _) in zip((q, k), sent, strict=True)]
    given, calls = on_ranks(
        n, lambda group, rank: exchange.all_to_all(group, rank, sent, [p[rank] for p in parts])
    )
    assert calls == ["all_to_all"]
    for index, (x, (_, target)) in enumerate(zip((q, k), sent, strict=True)):
        for got, want in zip(given, cut(x, target, n), strict=True):
            assert torch.equal(got[index], want)


def test_gradient_of_several_tensors_comes_back_in_one_exchange_though_one_is_unused() -> None:
    n, sent = 2, ((Shard(1, (4, 4)), Shard(2, (6, 6))),) * 2
    parts = [[p.clone().requires_grad_() for p in cut(told(), Shard(1, (4, 4)), n)] for _ in "qk"]

    def body(group: Any, rank: int) -> list[Tensor]:
        mine = [p[rank] for p in parts]
        first, _ = exchange.all_to_all(group, rank, sent, [*mine])
        return list(torch.autograd.grad(first.sum(), mine))

    grads, calls = on_ranks(n, body)
    assert calls == ["all_to_all", "all_to_all"]
    for used, unused in grads:
        assert torch.equal(used, torch.ones_like(used))
        assert torch.equal(unused, torch.zeros_like(unused))


@pytest.mark.parametrize(
    ("n", "starts", "sizes"),
    [
        (4, (0, 0, 1, 1), (1, 1, 1, 1)),
        (3, (0, 0, 1), (1, 2, 1)),
        (2, (0, 1), (2, 1)),
        (4, (0, 1, 1, 2), (2, 1, 2, 1)),
        (2, (0, 3), (3, 0)),
    ],
)
def test_heads_that_several_ranks_read_are_sent_to_each_and_their_gradients_added(
    n: int, starts: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    heads = max(a + s for a, s in zip(starts, sizes, strict=True))
    whole = told(2, 8, heads)
    source = Shard(1, tuple(8 // n + (r < 8 % n) for r in range(n)))
    target = Cover(2, sizes, starts=starts, whole=heads)
    parts = [p.clone().requires_grad_() for p in cut(whole, source, n)]

    def body(group: Any, rank: int) -> tuple[Tensor, Tensor]:
        (out,) = exchange.all_to_all(group, rank, ((source, target),), [parts[rank]])
        return out, torch.autograd.grad(out, parts[rank], torch.full_like(out, rank + 1.0))[0]

    given, _ = on_ranks(n, body)
    weights = torch.zeros(heads, dtype=torch.float64)
    for rank, (a, s) in enumerate(zip(starts, sizes, strict=True)):
        weights[a : a + s] += rank + 1.0
    for (out, grad), start, size in zip(given, starts, sizes, strict=True):
        assert torch.equal(out, whole[:, :, start : start + size])
        assert torch.equal(grad, weights[:, None].expand_as(grad))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.complex64],
)
def test_any_dtype_is_moved(dtype: torch.dtype, n: int) -> None:
    drawn = torch.randint(0, 100, (2, 8, 12, 3), generator=torch.Generator().manual_seed(0))
    whole = drawn > 50 if dtype is torch.bool else drawn.to(dtype)
    if dtype.is_complex:
        whole = whole + 1j * whole.flip(1)
    tokens, heads = Shard(1, (8 - n + 1, *(1,) * (n - 1))), Shard(2, (12 // n,) * n)
    for source, target in ((tokens, heads), (heads, tokens), (tokens, R), (heads, R)):
        given, _ = on_ranks(n, run(source, target, cut(whole, source, n)))
        for got, want in zip(given, cut(whole, target, n), strict=True):
            assert got.dtype == dtype and torch.equal(got, want), f"{source} -> {target}"


@pytest.mark.parametrize("target", [Shard(2, (6, 6)), Shard(1, (3, 5)), R], ids=str)
def test_complex_numbers_are_moved_conjugated_or_not_and_so_are_their_gradients(
    target: Any,
) -> None:
    n, source = 2, Shard(1, (4, 4))
    whole = torch.complex(told(), told().flip(1))
    parts = [p.clone().requires_grad_() for p in cut(whole, source, n)]
    forward = run(source, target, [p.conj() for p in parts])

    def body(group: Any, rank: int) -> tuple[Tensor, Tensor]:
        out = forward(group, rank)
        loss = torch.view_as_real(out.resolve_conj())[..., 1].sum()
        return out, torch.autograd.grad(loss, parts[rank])[0]

    given, _ = on_ranks(n, body)
    times = n if isinstance(target, Replicate) else 1
    for (out, grad), want in zip(given, cut(whole.conj(), target, n), strict=True):
        assert torch.equal(out.resolve_conj(), want.resolve_conj())
        assert torch.equal(grad, torch.full_like(grad, -1j * times))


@pytest.mark.parametrize("n", [2, 3])
def test_strides_do_not_matter(n: int) -> None:
    whole = told()
    views = {
        "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "expanded": lambda x: x[..., :1].expand_as(x),
    }
    tokens, heads = Shard(1, (8 - n + 1, *(1,) * (n - 1))), Shard(2, (12 // n,) * n)
    pairs = [(tokens, heads), (heads, tokens), (tokens, Shard(1, (0,) * (n - 1) + (8,)))]
    for name, view in views.items():
        value = view(whole)
        for source, target in [*pairs, (tokens, R), (P, tokens), (P, R)]:
            parts = [view(p) for p in parts_of(value, source, n)]
            assert any(not p.is_contiguous() for p in parts)
            given, _ = on_ranks(n, run(source, target, parts))
            total = glue(parts, source)
            for got, want in zip(given, cut(total, target, n), strict=True):
                assert torch.equal(got, want), f"{name} {source} -> {target}"


@pytest.mark.parametrize("source", [P, Shard(1, (4, 4))], ids=str)
def test_input_is_not_written_to(source: Any) -> None:
    parts = parts_of(told(), source, 2)
    before = [p.clone() for p in parts]
    for target in (R, Shard(2, (6, 6)), Shard(1, (5, 3))):
        on_ranks(2, run(source, target, parts))
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))


def test_scale_grad_keeps_the_value_and_multiplies_the_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    y = collectives.scale_grad(2.5, x)
    assert torch.equal(x, y)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 2.5))


def test_mean_grad_keeps_the_value_and_averages_the_gradient() -> None:
    def body(group: Any, rank: int) -> tuple[Tensor, Tensor]:
        x = torch.full((3,), 1.0, requires_grad=True)
        y = collectives.mean_grad(group, 4, x)
        return y, torch.autograd.grad(y.sum() * rank, x)[0]

    given, calls = on_ranks(4, body)
    assert calls == ["all_reduce"]
    for value, grad in given:
        assert torch.equal(value, torch.ones(3)) and torch.equal(grad, torch.full((3,), 1.5))


@pytest.mark.parametrize(
    ("source", "target"),
    [(Shard(1, (4, 4)), Shard(2, (6, 6))), (Shard(1, (4, 4)), Shard(1, (6, 2))),
     (Shard(1, (4, 4)), R), (P, Shard(1, (4, 4))), (P, R)],
    ids=str,
)  # fmt: skip
def test_second_derivative_is_right_or_refused(source: Any, target: Any) -> None:
    """A gradient penalty must not lose its gradient in silence."""
    n = 2
    parts = [p.clone().requires_grad_() for p in parts_of(told() / 1000, source, n)]
    forward = run(source, target, parts)

    def body(group: Any, rank: int) -> Tensor | str:
        out = forward(group, rank)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), parts[rank], create_graph=True)
        try:
            grad.pow(2).sum().backward()
        except RuntimeError as error:
            return str(error)
        return parts[rank].grad

    given, _ = on_ranks(n, body)
    if all(isinstance(g, str) for g in given):
        assert all("once_differentiable" in g for g in given), given[0]
        return
    outs = cut(glue(parts, source), target, n)
    grads = torch.autograd.grad(sum(o.pow(3).sum() for o in outs), parts, create_graph=True)
    want = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), parts)
    for g, w in zip(given, want, strict=True):
        torch.testing.assert_close(g, w)
