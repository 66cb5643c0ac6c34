"""An exchange copies each value twice, to pack it and to unpack it; layouts need no other copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.lower import wire
from tests.lower.wire import on_ranks
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.run.test_codegen import bound
from tests.simulate import lowered

_COPIES = {"copy_", "clone", "cat", "_to_copy", "constant_pad_nd"}
IDS = ids_of_t(2, 16)


class Copies(TorchDispatchMode):
    """Counts operations that copy a tensor [B, S, ..] as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _COPIES and out.is_floating_point() and out.dim() > 2:
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
