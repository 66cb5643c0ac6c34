"""On a CUDA device with flash-attn: masks made of runs go to it, as exact as SDPA is in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.place.test_varlen import runs_in
from tests.simulate import Ranks, lowered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH, CUDA = 1500, torch.device("cuda")


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(LENGTH, device=CUDA)[:, None], torch.arange(LENGTH, device=CUDA)


def causal_in(d: Tensor) -> Tensor:
    q, k = positions()
    return (d[:, None, :, None] == d[:, None, None, :]) & (k <= q)


def window(d: Tensor) -> Tensor:
    q, k = positions()
    return (k <= q) & (q - k < 300)


def both_ways(d: Tensor) -> Tensor:
    q, k = positions()
    return causal_in(d).mT | causal_in(d) & ((q - k).abs() < 100)


def padding(d: Tensor) -> Tensor:
    q, k = positions()
    return (k <= q) & (d[:, None, None, :] < 2)


MASKS = {each.__name__: each for each in (causal_in, window, both_ways, padding)}


@pytest.mark.parametrize("keys", [8, 2])
@pytest.mark.parametrize("name", MASKS)
def test_result_and_gradients_are_as_exact_as_sdpa(name: str, keys: int) -> None:
    pytest.importorskip("flash_attn")
    mask = MASKS[name]
    generator = torch.Generator(CUDA).manual_seed(0)
    documents = (torch.rand(2, LENGTH, device=CUDA, generator=generator) < 0.003).cumsum(1)
    q, k, v, weight = (
        torch.randn(2, heads, LENGTH, 64, device=CUDA, generator=generator)
        for heads in (8, keys, keys, 8)
    )

    def attention(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(d), enable_gqa=True)

    def run(dtype: torch.dtype, call: Callable[..., Tensor]) -> list[Tensor]:
        given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = call(*given, documents)
        grads = torch.autograd.grad(out, given, weight.to(dtype))
        return [each.double() for each in (out, *grads)]

    halves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    program = lowered(attention, (*halves, documents), 1, 2)
    (runs,) = runs_in(program)
    assert runs is not None

    def ours(*given: Tensor) -> Tensor:
        ((out,),) = Ranks(1, program.state).run(program.root, [[x] for x in given])
        return out

    exact, theirs = run(torch.float64, attention), run(torch.bfloat16, attention)
    for want, other, mine in zip(exact, theirs, run(torch.bfloat16, ours), strict=True):
        assert (mine - want).abs().max() <= 2 * (other - want).abs().max()
