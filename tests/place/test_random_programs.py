"""Programs that nobody wrote: operations drawn by a seed, as functions and as blocks of a model."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.simulate import assert_program_equals_whole

Step = Callable[[list[Tensor]], Tensor]  # of all values so far
_MOST = 8000


@functools.cache
def _weight(*shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.double() * 0.4


def _set_last(x: Tensor) -> Tensor:
    y = x * 1
    y[..., 0] = 0
    return y


def _along(k: int, x: Tensor, draw: random.Random) -> Iterator[Callable[[Tensor], Tensor]]:
    """Operations on one dim of more than one element."""
    size, rank = x.shape[k], x.dim()
    before = (slice(None),) * k
    first = draw.randrange(0, size - 1)
    last, step = draw.randrange(first + 1, size + 1), draw.choice([1, 1, 2])
    rows = torch.tensor([draw.randrange(size) for _ in range(size)])
    at = draw.randrange(-size, size)
    yield lambda x: x.softmax(k)
    yield lambda x: x.cumsum(k) * 0.3
    yield lambda x: x.sum(k, keepdim=True) * 0.1
    yield lambda x: x.flip(k)
    yield lambda x: x.roll(1, k)
    yield lambda x: x[(*before, slice(first, last, step))]
    yield lambda x: x[(*before, rows)]
    yield lambda x: torch.cat([x.narrow(k, 1, size - 1), x.narrow(k, 0, 1)], k)
    yield lambda x: F.pad(x, (0, 0) * (rank - 1 - k) + (1, 0))
    yield lambda x: torch.stack(x.unbind(k), 0)
    yield lambda x: x.chunk(2, k)[0]
    if size % 2 == 0:
        yield lambda x: x.unflatten(k, (2, size // 2))
        yield lambda x: x.unflatten(k, (size // 2, 2))
    if rank > 1:
        yield lambda x: x.mean(k)
        yield lambda x: x.amax(k)
        yield lambda x: x.select(k, at)


def _anywhere(x: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    rank, width = x.dim(), x.shape[-1]
    wide, narrow, bias, taps = (
        _weight(6, width), _weight(5, width), _weight(6), _weight(width, 1, 2))  # fmt: skip
    yield lambda x: x.tanh()
    yield lambda x: x * 0.5 + 1
    yield lambda x: torch.where(x > 0, x, x.mean())
    yield lambda x: x.unsqueeze(0)
    yield _set_last
    if rank > 1:
        yield lambda x: F.linear(x, wide, bias)
        yield lambda x: F.linear(x, narrow)
        yield lambda x: F.rms_norm(x, (width,))
        yield lambda x: x @ x.mT * 0.2
        yield lambda x: x.permute(*range(1, rank), 0)
        yield lambda x: x.flatten(0, 1)
        yield lambda x: x.flatten(-2, -1)
        yield lambda x: x.transpose(0, 1)
        yield lambda x: x.transpose(-1, -2)
        yield lambda x: x.reshape(-1)
    if rank in (3, 4):
        yield lambda x: F.scaled_dot_product_attention(x, x * 2, x)
        yield lambda x: F.scaled_dot_product_attention(x, x * 2, x, is_causal=True)
    if rank == 3:
        yield lambda x: torch.einsum("abc,adc->abd", x, x) * 0.2
        yield lambda x: F.conv1d(F.pad(x.mT, (1, 0)), taps, groups=width).mT


def _candidates(values: list[Tensor], draw: random.Random) -> list[Step]:
    x = values[-1]
    plain = list(_anywhere(x))
    for k in range(x.dim()):
        if x.shape[k] > 1:
            plain.extend(_along(k, x, draw))
    steps: list[Step] = [lambda values, f=f: f(values[-1]) for f in plain]
    for j, other in enumerate(values):
        if other.shape == x.shape:
            steps.append(lambda values, j=j: values[-1] + values[j])
            steps.append(lambda values, j=j: torch.cat([values[-1], values[j]], -1))
    return steps


def _grow(values: list[Tensor], count: int, draw: random.Random) -> list[Step]:
    """Steps that can follow each other, with their values appended to `values`."""
    steps: list[Step] = []
    while len(steps) < count:
        step = draw.choice(_candidates(values, draw))
        y = step(values)
        if 0 < y.numel() < _MOST and 0 < y.dim() < 6 and bool(y.isfinite().all()):
            steps.append(step)
            values.append(y)
    return steps


class Drawn(nn.Module):
    """Embedded ids, then blocks of drawn steps, each given all values before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        width = self.draw.choice([4, 6, 8])
        self.ids = torch.randint(
            10,
            (self.draw.choice([1, 2, 2, 3]), self.draw.choice([5, 6, 7, 8, 12, 13])),
            generator=torch.Generator().manual_seed(seed),
        )
        self.table = nn.Parameter(_weight(10, width) * 2)
        values = [F.embedding(self.ids, self.table)]
        self.blocks = nn.ModuleList()
        for _ in range(self.draw.randint(1, 3)):
            given = len(values)
            inner = [*values[:-1], values[-1] * 1.1]
            block = Block(_grow(inner, self.draw.randint(1, 4), self.draw))
            self.blocks.append(block)
            values.extend(inner[given:])
        self.checkpointed = self.draw.random() < 0.3
        self.middle = self.draw.random() < 0.3
        del self.draw

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        values = [F.embedding(ids, self.table)]
        for block in self.blocks:
            if self.checkpointed:
                values.extend(checkpoint(block, *values, use_reentrant=False))
            else:
                values.extend(block(*values))
        return (values[-1], values[len(values) // 2]) if self.middle else (values[-1],)


class Block(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
        self.steps = steps

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        values = [*given[:-1], given[-1] * self.scale]
        for step in self.steps:
            values.append(step(values))
        return tuple(values[len(given) :])


@pytest.mark.parametrize("seed", range(60))
def test_drawn_program_is_that_of_one_device(seed: int) -> None:
    model = Drawn(seed)
    assert_program_equals_whole(model, (model.ids,), n=2 + seed % 3)
