"""Operations that mix tokens and have no rule are refused; a name does not stand for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.errors import PlacementError
from tests.simulate import assert_program_equals_whole, lowered

IDS = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TABLE.requires_grad_()


def embedded(call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda ids: call(F.embedding(ids, TABLE))


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "renorm": lambda x: x.renorm(2, 1, 1.0),
    "histc": lambda x: x.detach().histc(4),
    "quantile": lambda x: x.quantile(0.5, 1),
    "mode": lambda x: x.mode(1).values,
    "cdist": lambda x: torch.cdist(x, x),
    "take": lambda x: x.take(torch.tensor([1, 50])),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x[1]),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1)[:, 0], 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "batch_norm": lambda x: F.batch_norm(x.mT, None, None, training=True),
    "rot90": lambda x: torch.rot90(x, 1, (1, 2)),
    "fill_diagonal_": lambda x: (x[0] * 1).fill_diagonal_(0),
    "put_": lambda x: (x * 1).put_(torch.tensor([9]), x[0, 0, :1]),
    "masked_scatter_": lambda x: (x * 1).masked_scatter_(x > 0, x * 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operation_without_a_rule_is_refused(name: str) -> None:
    with pytest.raises(PlacementError, match=name.rstrip("_")) as found:
        lowered(embedded(REFUSED[name]), (IDS,), 2)
    assert "has no rule" in str(found.value) and "register_rule" in str(found.value)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_windows_of_images_are_not_windows_of_one_dim(n: int) -> None:
    """F.unfold and Tensor.unfold have one name."""
    assert_program_equals_whole(embedded(lambda x: F.unfold(x[:, None], (2, 3))), (IDS,), n)
    assert_program_equals_whole(embedded(lambda x: x.unfold(1, 2, 2)), (IDS,), n)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("dim", [-1, 1])
def test_transform_of_tokens_mixes_them_as_on_one_device(dim: int, n: int) -> None:
    """As FNet and long convolutions do: complex numbers travel, too."""

    def mixed(x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x, dim=dim)
        filtered = spectrum * spectrum.conj()
        return torch.fft.ifft(filtered.conj(), dim=1).real + torch.fft.fftn(x, dim=(1, 2)).imag

    assert_program_equals_whole(embedded(mixed), (IDS,), n)
