"""On a CUDA device: masks made of runs go to flash-attn or to torch's varlen_attn, as exact as bf16
is.

All but the kernel runs on a CPU as well, where a reference in bf16 stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.place.masks import varlen
from tests.place.test_varlen import runs_in
from tests.reference_attention import references_here
from tests.simulate import Ranks, lowered


def positions(d: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(d.shape[1], device=d.device)
    return at[:, None], at


def causal_in(d: Tensor) -> Tensor:
    q, k = positions(d)
    return (d[:, None, :, None] == d[:, None, None, :]) & (k <= q)


def window(d: Tensor) -> Tensor:
    q, k = positions(d)
    return (k <= q) & (q - k < 300)


def both_ways(d: Tensor) -> Tensor:
    q, k = positions(d)
    return causal_in(d).mT | causal_in(d) & ((q - k).abs() < 100)


def padding(d: Tensor) -> Tensor:
    q, k = positions(d)
    return (k <= q) & (d[:, None, None, :] < 2)


MASKS = {each.__name__: each for each in (causal_in, window, both_ways, padding)}
PACKAGES = {varlen.FLASH_ATTN: "flash_attn", varlen.TORCH: "torch.nn.attention.varlen"}


def by_hand(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Each step rounded to the dtype of q, as a kernel rounds weights. (SDPA takes fp32 inside for
    key heads that are shared, and no kernel could be held to twice its error.)"""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    none = ~allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(~allowed, -torch.inf).masked_fill(none, 0.0).softmax(-1)
    return weights.masked_fill(none, 0.0) @ v


def assert_as_exact_as_by_hand(name: str, keys: int, kernel: str, device: str, length: int) -> None:
    """The kernel's result and gradients, as the program of one rank calls it, against fp64."""
    generator = torch.Generator(device).manual_seed(0)
    documents = (torch.rand(2, length, device=device, generator=generator) < 0.003).cumsum(1)
    q, k, v, weight = (
        torch.randn(2, heads, length, 64, device=device, generator=generator).bfloat16()
        for heads in (8, keys, keys, 8)
    )

    def attention(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, MASKS[name](d), enable_gqa=True)

    def run(dtype: torch.dtype, call: Callable[..., Tensor], last: Tensor) -> list[Tensor]:
        given = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = call(*given, last)
        grads = torch.autograd.grad(out, given, weight.to(dtype))
        return [each.double() for each in (out, *grads)]

    halves = [x.clone().requires_grad_() for x in (q, k, v)]
    program = lowered(attention, (*halves, documents), 1, 2)
    (runs,) = runs_in(program)
    assert runs is not None and runs.kernel == kernel

    def ours(*given: Tensor) -> Tensor:
        ((out,),) = Ranks(1, program.state).run(program.root, [[x] for x in given])
        return out

    allowed = MASKS[name](documents)
    exact, rounded = (run(t, by_hand, allowed) for t in (torch.float64, torch.bfloat16))
    for want, other, mine in zip(exact, rounded, run(torch.bfloat16, ours, documents), strict=True):
        assert 0 < (mine - want).abs().max() <= 2 * (other - want).abs().max()


@pytest.mark.parametrize("keys", [8, 2])
@pytest.mark.parametrize("kernel", PACKAGES)
@pytest.mark.parametrize("name", MASKS)
def test_with_references_in_bf16(
    name: str, kernel: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the comparison holds of what is no kernel, and needs no GPU."""
    monkeypatch.setattr(varlen, "TAKES", {"cpu": (torch.bfloat16,)})
    with references_here():
        if kernel == varlen.TORCH:
            monkeypatch.setattr(varlen, "_flash_attn", lambda: None)
        assert_as_exact_as_by_hand(name, keys, kernel, "cpu", 320)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keys", [8, 2])
@pytest.mark.parametrize("kernel", PACKAGES)
@pytest.mark.parametrize("name", MASKS)
def test_result_and_gradients_are_as_exact_as_by_hand(
    name: str, kernel: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(PACKAGES[kernel])
    if kernel == varlen.TORCH:
        monkeypatch.setattr(varlen, "_flash_attn", lambda: None)
    assert_as_exact_as_by_hand(name, keys, kernel, "cuda", 1500)
