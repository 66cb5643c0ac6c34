"""Attention by groups of heads where a step needs room: what it takes then, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.checkpoint.kinds import is_attention
from autosp_dtensor.graph import facts
from autosp_dtensor.plan.measure import Setting, fake_group, measure
from autosp_dtensor.run import build, compile
from autosp_dtensor.run.budget import step_bytes

outputs = pytest.importorskip("transformers.modeling_outputs")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
RANKS, TOKENS, WIDTH, HEADS = 4, 16384, 256, 16
GROUPS = HEADS // RANKS
HIDDEN = TOKENS // RANKS * WIDTH * 2  # a rank's part in bf16
NEVER = 1 << 60


class Layer(nn.Module):
    """Attention is most of it; norms are one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            p(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return outputs.CausalLMOutput(loss=loss)


@dataclass
class Seen:
    """What was compiled. tried: how many programs."""

    tried: int = 0
    groups: int = 0
    counted: int = 0
    peak: int = 0
    fits: bool = True


_found: dict[tuple[Any, ...], Seen] = {}


def step(checkpoint: str, *, least: int = 1, budget: int | None = None) -> Seen:
    """Of a model whose groups take `least` bytes at least. Each is measured once."""
    key = checkpoint, least, budget
    if key in _found:
        return _found[key]
    seen = _found[key] = Seen()
    best, one = build.compile_best, compile._compile

    def compiled(*given: Any) -> compile.Compiled:
        seen.tried += 1
        return one(*given)

    def taken(source: compile.Source, graph: Any) -> compile.Compiled:
        made = best(source, graph)
        seen.counted = step_bytes(made.root, source.captured, source.live, made.policy)
        seen.fits = made.policy.fits
        regions = [region for _, region in made.root.walk()]
        turns = {facts(n).turn for r in regions for n in r.graph.nodes if is_attention(n)}
        seen.groups = len(turns - {None})
        return made

    with pytest.MonkeyPatch.context() as patch, fake_group(RANKS):
        patch.setattr(compile, "LEAST_GROUP", least)
        patch.setattr(compile, "_compile", compiled)
        patch.setattr(build, "compile_best", taken)
        setting = Setting(Model, 1, RANKS, checkpoint, budget=budget, accumulated=True)
        seen.peak = measure(setting, TOKENS).peak
    return seen


def test_what_runs_again_goes_by_groups_where_that_takes_less() -> None:
    """Of queries, keys, values and their gradients, one group's in two is there, not all."""
    whole, grouped = step("full", least=NEVER), step("full")
    assert (whole.groups, whole.tried) == (0, 1)
    assert (grouped.groups, grouped.tried) == (GROUPS, 2)
    assert grouped.peak <= whole.peak - 4 * HIDDEN


@pytest.mark.parametrize("checkpoint", ["full", "sequence"])
def test_what_is_counted_is_close_to_the_peak_and_never_below(checkpoint: str) -> None:
    """Other groups' exchanges are on their way meanwhile, and a sum over groups is a third value
    beside its terms."""
    grouped = step(checkpoint)
    assert grouped.groups == GROUPS
    assert grouped.peak <= grouped.counted <= 1.12 * grouped.peak


def test_a_step_that_fits_is_left_alone() -> None:
    kept = step("auto", budget=1 << 40)
    assert (kept.groups, kept.tried) == (0, 1)


def test_a_step_that_fits_by_groups_alone_takes_them() -> None:
    budget = (step("full").counted + step("full", least=NEVER).counted) // 2
    whole, grouped = (step("auto", least=each, budget=budget) for each in (NEVER, 1))
    assert not whole.fits
    assert whole.peak > budget
    assert (grouped.groups, grouped.tried) == (GROUPS, 2)
    assert grouped.fits
    assert grouped.peak <= budget
