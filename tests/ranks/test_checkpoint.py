"""Activation checkpointing by the library, under FSDP2 and on transformers: values stay equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import short_name
from autosp_dtensor.lower import Drawn
from tests import models
from tests.compare import assert_same_as_one_device, collectives
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import batches_of_llama, batches_of_t, shard
from tests.upcasts import upcasts_stay_in_fp64

MODES: dict[str, dict[str, Any]] = {
    "full": {"checkpoint": "full"},
    "sequence": {"checkpoint": "sequence"},
    "auto": {"checkpoint": "auto", "memory_budget": 150_000},
    "tiles": {"checkpoint": "full", "tile": 3},
    "tiles alone": {"tile": 2},
    "full, offloaded": {"checkpoint": "full", "offload": 1 << 30},
    "sequence, in part offloaded": {"checkpoint": "sequence", "offload": 10_000},
    "auto, offloaded": {"memory_budget": 150_000, "offload": "auto"},
}


def under_fsdp(rank: Rank, options: dict[str, Any], first: str, reshard: bool | int) -> None:
    import autosp_dtensor as autosp

    def set_up(model: nn.Module, mesh: Any) -> nn.Module:
        if first == "shard":
            model = shard(model, mesh, reshard_after_forward=reshard)
            return autosp.parallelize(model, mesh, **options)
        model = autosp.parallelize(model, mesh, **options)
        return shard(model, mesh, reshard_after_forward=reshard)

    build = partial(models.build_t, TConfig(layers=3, qk_norm="hidden"))
    assert_same_as_one_device(rank, build, batches_of_t(), rank.mesh(dp=2, sp=2), set_up=set_up)


@pytest.mark.parametrize("first", ["shard", "parallelize"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_under_fsdp2_equal_one_device(mode: str, reshard: bool, first: str) -> None:
    run_on_ranks(under_fsdp, MODES[mode], first, reshard)


def families(rank: Rank, family: str, options: dict[str, Any]) -> None:
    build = partial(models.build_transformers, family)
    build()
    with upcasts_stay_in_fp64():
        assert_same_as_one_device(rank, build, batches_of_llama()[0], rank.mesh(sp=2), **options)


@pytest.mark.parametrize("mode", ["full", "sequence", "tiles", "tiles alone"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_transformers_equal_one_device(family: str, mode: str) -> None:
    run_on_ranks(families, family, MODES[mode], n=2)


def by_heads(rank: Rank, options: dict[str, Any]) -> str:
    import autosp_dtensor as autosp

    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(models.build_transformers("llama"))
        return made[-1]

    build()
    with upcasts_stay_in_fp64():
        batch = batches_of_llama()[0]
        assert_same_as_one_device(rank, build, batch, rank.mesh(sp=2), tile=4096, **options)
    return str(autosp.explain(made[-1]))


@pytest.mark.parametrize("mode", ["full", "sequence, in part offloaded"])
def test_attention_by_heads_equals_one_device(mode: str) -> None:
    """Tiles of more tokens than there are: attention alone is cut."""
    texts = run_on_ranks(by_heads, MODES[mode], n=2)
    assert all("groups of heads" in text and "tiles x1" in text for text in texts)


def user_checkpoints(rank: Rank) -> None:
    """What the model wraps itself stays so; other blocks follow the option."""
    build = partial(models.build_t, TConfig(layers=3, checkpointed=(1,)))
    assert_same_as_one_device(
        rank, build, batches_of_t()[0], rank.mesh(sp=2), checkpoint="sequence"
    )


def test_the_models_own_checkpoints_stay() -> None:
    run_on_ranks(user_checkpoints, n=2)


def counted(rank: Rank) -> None:
    """FC-106: exchanges of a step. Kept q, k, v are not exchanged again; else they are, once."""
    import autosp_dtensor as autosp

    found = {}
    for name, mode in {
        "none": "none",
        "full": "full",
        "sequence": "sequence",
        "exchanges": autosp.Checkpoint(("attention", "exchanges")),
    }.items():
        model = autosp.parallelize(
            ModelT(TConfig(layers=2)), rank.mesh(sp=2), checkpoint=mode, check_ranks=False
        )
        ids = ids_of_t(2, 16)
        model(ids, ids)
        with collectives() as counts:
            model(ids, ids).loss.backward()
        found[name] = counts.exchanges()
    layers = 2
    assert found["none"] == found["exchanges"] == 4 * layers  # two forward, two backward
    assert found["sequence"] == 6 * layers  # q, k, v and the output once more
    assert found["full"] == 7 * layers  # q, k, v for the result, and for attention's own backward


def test_exchanges_are_run_again_only_where_they_are_not_kept() -> None:
    run_on_ranks(counted, n=2)


class Dropping(nn.Module):
    """Drops in attention, behind it, and inside of its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.2)
        return x + self.down(F.dropout(F.gelu(self.up(self.norm2(x))), 0.4))


class DroppingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Dropping() for _ in range(2))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def dropped(rank: Rank, mode: str) -> tuple[int, int]:
    """How many operations that draw run again in a layer: all, and attention alone."""
    import autosp_dtensor as autosp
    from autosp_dtensor.api import forward_of

    def gradients(checkpoint: str, seed: int) -> list[Tensor]:
        model = autosp.parallelize(DroppingStack(), rank.mesh(sp=2), checkpoint=checkpoint)
        torch.manual_seed(seed)
        model(ids_of_t(2, 13)).backward()
        programs.append(forward_of(model).last)
        return [p.grad for p in model.parameters()]

    programs: list[Any] = []
    kept, other, again = gradients("none", 7), gradients("none", 8), gradients(mode, 7)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(kept, other, strict=True))
    ((region, choice),) = programs[-1].policy.choices.items()
    nodes = [node for k, node in enumerate(region.graph.nodes) if k in choice.again]
    drawn = [short_name(node.target.target) for node in nodes if isinstance(node.target, Drawn)]
    return len(drawn), drawn.count("scaled_dot_product_attention")


@pytest.mark.parametrize(("mode", "drawn"), [("full", (3, 1)), ("sequence", (2, 0))])
def test_dropout_in_attention_and_mlp_is_the_same_when_it_runs_again(
    mode: str, drawn: tuple[int, int]
) -> None:
    assert run_on_ranks(dropped, mode, n=2) == [drawn] * 2


def backward_twice(rank: Rank) -> None:
    import autosp_dtensor as autosp

    model = autosp.parallelize(ModelT(TConfig(layers=2)), rank.mesh(sp=2), checkpoint="full")
    ids = ids_of_t(2, 16)
    loss = model(ids, ids).loss
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    for a, p in zip(once, (p for p in model.parameters() if p.grad is not None), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, 2 * a)


def test_backward_may_go_twice_through_a_retained_graph() -> None:
    run_on_ranks(backward_twice, n=2)


def budgets_differ(rank: Rank) -> str:
    import autosp_dtensor as autosp

    model = autosp.parallelize(
        ModelT(TConfig(layers=2)), rank.mesh(sp=2), memory_budget=150_000 * (1 + 10 * rank.rank)
    )
    ids = ids_of_t(2, 16)
    try:
        model(ids, ids)
    except autosp.RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_would_run_other_exchanges_again_are_told() -> None:
    """Not all of them would meet in backward."""
    assert all("program" in text for text in run_on_ranks(budgets_differ, n=2))
