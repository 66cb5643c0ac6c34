"""The rule under attention is a general one: sp moves to a dim in which the operation is local.

FIELD-CASES.md, class sequence-state: what carries something from token to token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import facts
from autosp_dtensor.placement import Shard
from tests.simulate import Lowered, assert_program_equals_whole

CHANNELS = 6  # not divided by 4
LENGTHS = [(2, 16), (2, 13), (4, 16), (4, 13), (4, 8)]  # ranks and tokens; 2 each are fewer than k


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Pooled(nn.Module):
    """A causal depthwise convolution, a cumulative sum, and the mean over the tokens there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, CHANNELS)
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS, padding=3)
        self.mix, self.head = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 5)
        self.double()

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        x = x + F.silu(self.conv(x.mT)[..., : ids.shape[1]].mT)
        x = x + torch.tanh(self.mix(x).cumsum(1) * 0.3)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"loss": F.cross_entropy(self.head(pooled), labels), "x": x}


def pooled_batch(length: int) -> dict[str, Any]:
    """Two rows that differ, padded on the left and on the right."""
    ids = torch.randint(16, (2, length), generator=torch.Generator().manual_seed(1))
    at = torch.arange(length)
    mask = torch.stack([at >= 3, at < length - 2])
    return {"ids": ids, "mask": mask.double(), "labels": torch.tensor([1, 4])}


@pytest.mark.parametrize(("n", "length"), LENGTHS)
def test_convolution_sum_and_mean_are_those_of_one_device(n: int, length: int) -> None:
    """By channels or rows, as attention goes by heads: nothing is gathered, and the mean is one sum
    over ranks."""
    program = assert_program_equals_whole(Pooled(), (), n, **pooled_batch(length))
    assert program.kinds().count("all_to_all") >= 2
    assert set(program.kinds()) == {"all_to_all", "all_reduce"}
    assert_whole_along(program, "conv1d", 2)
    assert_whole_along(program, "cumsum", 1)


def assert_whole_along(program: Lowered, name: str, tokens: int) -> None:
    """Each rank has all tokens of some rows, or of some channels: of these where rows are few."""
    (node,) = program.named(name)
    placement = facts(node).placements[0]
    assert isinstance(placement, Shard) and placement.dim != tokens
    assert program.n == 2 or placement.block == CHANNELS


def by_a_loop(x: Tensor, decay: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for at in range(x.shape[1]):
        state = decay[:, at] * state + x[:, at]
        states.append(state)
    return torch.stack(states, 1)


def by_sums(x: Tensor, decay: Tensor) -> Tensor:
    """The same in closed form."""
    product = decay.cumprod(1)
    return product * (x / product).cumsum(1)


@pytest.mark.parametrize("way", [by_a_loop, by_sums], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("n", "length"), LENGTHS)
def test_fc_017_state_is_carried_over_the_cuts(
    way: Callable[[Tensor, Tensor], Tensor], n: int, length: int
) -> None:
    """Forward to later ranks, its gradient back to earlier ones: of both rows, at each position."""
    x = drawn(1, 2, length, CHANNELS).requires_grad_()
    decay = (drawn(2, 2, length, CHANNELS).sigmoid() * 0.9 + 0.05).requires_grad_()
    torch.testing.assert_close(by_a_loop(x, decay), by_sums(x, decay))
    assert_program_equals_whole(way, (x, decay), n)


class Convolved(nn.Module):
    """k=4 over tokens, its left neighbours padded in as models do: by the layer, or before it."""

    def __init__(self, by_layer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_layer = by_layer
        padding = 3 if by_layer else 0
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS, padding=padding).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.by_layer:
            return self.conv(x.mT)[..., : x.shape[1]].mT
        return self.conv(F.pad(x.mT, (3, 0))).mT


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize(("n", "length"), LENGTHS)
def test_fc_018_convolution_reads_its_left_neighbours(n: int, length: int, by_layer: bool) -> None:
    """With 8 tokens on 4 ranks, of the two ranks before."""
    model, x = Convolved(by_layer), drawn(1, 2, length, CHANNELS).requires_grad_()
    program = assert_program_equals_whole(model, (x,), n)
    assert_whole_along(program, "conv1d", 2)
