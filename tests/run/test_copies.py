"""An exchange copies each value twice, to pack it and to unpack it; layouts need no other copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autosp_dtensor.placement import Shard
from tests.lower import wire
from tests.lower.wire import on_ranks
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.pieces import cut
from tests.run.test_codegen import bound
from tests.simulate import lowered

_COPIES = {"copy_", "clone", "cat", "_to_copy", "constant_pad_nd"}
IDS = ids_of_t(2, 16)


class Copies(TorchDispatchMode):
    """Counts operations that copy a tensor as it is, [B, S, ..] or of so many dims at least."""

    def __init__(self, dims: int = 3) -> None:
        super().__init__()
        self.count, self.dims = 0, dims

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ in _COPIES
            and out.is_floating_point()
            and out.dim() >= self.dims
        ):
            self.count += 1
        return out


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for a network copies as well."""
    real = wire._all_to_all

    def sent(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            real(*args, **kwargs)

    monkeypatch.setattr(wire, "_all_to_all", sent)


def copies(n: int, attention: str) -> int:
    model = ModelT(TConfig(layers=1, attention=(attention,)))
    own = [copy.deepcopy(model) for _ in range(n)]
    programs = [lowered(each, (IDS, IDS), n) for each in own]

    def body(group: Any, rank: int) -> int:
        run = bound(programs[rank], own[rank], group, rank)
        with torch.no_grad(), Copies() as counted:
            run(0, IDS, IDS)
        return counted.count

    counts, calls = on_ranks(n, body)
    assert calls.count("all_to_all") == (2 if n > 1 else 0)  # q, k and v together; the output
    assert len(set(counts)) == 1
    return counts[0]


@pytest.mark.parametrize("attention", ["sdpa", "matmul", "einsum"])
def test_exchanges_add_two_copies_for_each_value(attention: str) -> None:
    """Four values travel: q, k, v and the output. Copies that the model makes itself stay."""
    assert copies(2, attention) == copies(1, attention) + 2 * 4


class Layer(nn.Module):
    """Project, attend, project: nothing here has a reason of its own to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(24, 24, bias=False, dtype=torch.float64) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (4, 6)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def copies_of_a_layer(n: int, batch: int) -> tuple[int, int]:
    """Of one rank, in forward and in backward."""
    whole = torch.randn(batch, 16, 24, dtype=torch.float64)
    split = Shard(1, (16 // n,) * n)
    own = [Layer() for _ in range(n)]
    programs = [lowered(each, (whole,), n, sharded={0: split}) for each in own]

    def body(group: Any, rank: int) -> tuple[int, int]:
        run = bound(programs[rank], own[rank], group, rank)
        x = cut(whole, split, n)[rank].requires_grad_()
        with Copies(1) as forward:
            (out,) = run(0, x)
        with Copies(1) as backward:
            torch.autograd.grad(out, [x, *own[rank].parameters()], torch.ones_like(out))
        return forward.count, backward.count

    counts, calls = on_ranks(n, body)
    assert calls.count("all_to_all") == (4 if n > 1 else 0)
    assert len(set(counts)) == 1
    return counts[0]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("batch", "each_way"), [(1, 7), (2, 8)])
def test_a_layer_packs_and_unpacks_four_values_and_copies_nothing_else(
    n: int, batch: int, each_way: int
) -> None:
    """q, k, v and the result are packed and unpacked: 8 copies in forward, and 8 in backward of
    their gradients. Of one row one less each way: the result is sent from where it lies, since what
    goes to a rank is one piece of memory there, and its gradient is used where it comes in. The
    projections and the kernel read what they find: on one device nothing is copied.
    """
    assert copies_of_a_layer(1, batch) == (0, 0)
    assert copies_of_a_layer(n, batch) == (each_way, each_way)
