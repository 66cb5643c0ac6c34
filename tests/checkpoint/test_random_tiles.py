"""Token-wise programs that nobody wrote, by tiles: operations drawn by a seed, on values as wide as
an MLP's and narrow ones between."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.simulate import assert_program_equals_whole

C, WIDE, CLASSES = 4, 12, 9


def whole(x: Tensor) -> Tensor:
    """Near ties become ties, so that rounding does not choose another maximum."""
    return (x * 8 + 0.1).round()


class Block(nn.Module):
    """Drawn steps. Each takes some of all values so far and appends its own."""

    def __init__(self, seed: int, channels: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        scale = 0.5
        self.up = nn.Parameter(torch.randn(WIDE, channels) * scale)
        self.other = nn.Parameter(torch.randn(WIDE, channels) * scale)
        self.square = nn.Parameter(torch.randn(WIDE, WIDE) * scale)
        self.down = nn.Parameter(torch.randn(channels, WIDE) * scale)
        self.bias = nn.Parameter(torch.randn(WIDE))
        self.gain = nn.Parameter(torch.rand(channels) + 0.5)
        self.register_buffer("by", torch.linspace(0.5, 1.5, WIDE))
        if draw.random() < 0.3:
            self.other.requires_grad_(False)
        if draw.random() < 0.2:
            self.up.requires_grad_(False)
        self.steps = [draw.randrange(10**9) for _ in range(draw.randint(3, 9))]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        narrow, wide, given = [x * 1.1], [], []
        for seed in self.steps:
            self.step(random.Random(seed), narrow, wide, given)
        for each in wide[-2:]:
            narrow.append(F.linear(each, self.down))
        return x + sum(narrow[-2:]), given

    def step(self, draw: random.Random, narrow: list, wide: list, given: list) -> None:
        x = draw.choice(narrow[-3:])
        kinds = [
            lambda: wide.append(F.linear(x, self.up, self.bias)),
            lambda: wide.append(F.linear(x, self.other)),
            lambda: narrow.append(F.rms_norm(x, x.shape[-1:], self.gain)),
            lambda: narrow.append(F.layer_norm(x, x.shape[-1:], self.gain)),
            lambda: narrow.append(x * (x > 0)),
            lambda: narrow.append(x * torch.rsqrt(
                x.pow(2).mean(-1, keepdim=True) + 1)),
        ]  # fmt: skip
        if wide:
            w, v = draw.choice(wide[-3:]), draw.choice(wide)
            kinds += [
                lambda: wide.append(w * v.sigmoid()),
                lambda: wide.append(torch.where(w > v, w, self.by)),
                lambda: wide.append(F.silu(w) + w),
                lambda: wide.append(w * self.by + self.bias),
                lambda: wide.append(F.linear(w, self.square, self.bias)),
                lambda: wide.append(torch.cat(w.chunk(3, -1)[::-1], -1)),
                lambda: wide.append(torch.cat([w[..., :6], v[..., 6:]], -1)),
                lambda: wide.append((w - w.amax(-1, keepdim=True)).exp()),
                lambda: wide.append(w.softmax(-1) - v),
                lambda: wide.append(w.unflatten(-1, (3, 4)).mT.flatten(-2)),
                lambda: wide.append(w.flatten(0, 1).tanh().view(w.shape)),
                lambda: wide.append(w.transpose(0, 1).contiguous().tanh().transpose(0, 1)),
                lambda: wide.append(w.mT.tanh().mT),
                lambda: wide.append(w.detach() * v),
                lambda: wide.append(w.clone().mul_(2).add_(v)),
                lambda: wide.append(w * (whole(w).argmax(-1, keepdim=True) + 1)),
                lambda: wide.append(w.masked_fill(v < -0.5, 0.3)),
                lambda: narrow.append(F.linear(w, self.down)),
                lambda: narrow.append(F.linear(w, self.down) + x),
                lambda: narrow.append(x * w.mean(-1, keepdim=True)),
                lambda: narrow.append(w[..., : x.shape[-1]] * x),
                lambda: narrow.append(w.unflatten(-1, (3, 4)).sum(-2)),
                lambda: narrow.append(w.logsumexp(-1, keepdim=True) * x),
                lambda: narrow.append(w.topk(4, -1).values * x),
                lambda: given.append(w.sum((0, 1))),
                lambda: given.append(w.square().mean()),
                lambda: given.append((w > v).sum()),
                lambda: given.append(whole(w).argmax(-1)),
                lambda: given.append(w.sum(-1)),
                lambda: given.append((w > 0).double().mean((0, 1))),
                lambda: given.append(w * 2),
                lambda: given.append(w[..., 0] > 0),
            ]
        draw.choice(kinds)()


class Drawn(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.seq_dim = draw.choice([1, 1, 1, 0])
        shape = [draw.choice([1, 2, 3]), draw.choice([5, 6, 7, 8, 12, 13])]
        shape = shape if self.seq_dim == 1 else shape[::-1]
        self.ids = torch.randint(CLASSES, shape)
        self.target = torch.randint(CLASSES, shape)
        self.target[self.ids > 6] = -100
        self.target[0, 0] = 1
        self.table = nn.Embedding(CLASSES, C)
        self.layers = nn.ModuleList([Block(seed, C)] * draw.choice([1, 1, 2]))
        if draw.random() < 0.3:
            self.layers.append(Block(seed + 1, C))
        self.head = nn.Linear(C, CLASSES, bias=draw.random() < 0.5)
        self.head.weight.data.mul_(3)
        if draw.random() < 0.4:
            self.head.weight = self.table.weight
        self.ends = draw.choice(["x", "loss", "both", "each", "sums"])
        if draw.random() < 0.2:
            self.table.weight.requires_grad_(False)
        self.double()

    def forward(self, ids: Tensor, target: Tensor) -> Any:
        x, more = self.table(ids), []
        for layer in self.layers:
            x, given = layer(x)
            more += given
        if self.ends == "x":
            return x.cos(), more
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        if self.ends == "loss":
            return loss, more
        if self.ends == "both":
            return loss, more, logits
        if self.ends == "each":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none"), more
        return loss + logits.logsumexp(-1).square().mean(), whole(logits).argmax(-1), more, logits


@pytest.mark.parametrize("seed", range(24))
def test_drawn_program_by_tiles_is_that_of_one_device(seed: int) -> None:
    model = Drawn(seed)
    height = random.Random(seed).choice([1, 2, 3, 5, 100])
    assert_program_equals_whole(
        model, (model.ids, model.target), 1 + seed % 4, model.seq_dim, tile=height
    )
