"""Attention by groups of heads under FSDP2: gradients are one device's, and a projection that is
gathered for its own call stays whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from tests import models
from tests.compare import assert_same_as_one_device, collectives
from tests.model_t import ModelT, TConfig
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import batches_of_t, shard

CONFIG = TConfig(heads=8, kv_heads=8, qk_norm="head")
OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {"checkpoint": "none"},
    "full": {"checkpoint": "full"},
    "offloaded": {"checkpoint": "sequence", "offload": 1 << 30},
}
CONFIGS = {
    "heads": CONFIG,
    "key heads": replace(CONFIG, kv_heads=4, qk_norm="hidden"),
    "adapted": replace(CONFIG, lora_rank=2),
}
RUNS = [("heads", "offloaded"), ("key heads", "full"), ("adapted", "kept")]


def products_by_groups(model: nn.Module) -> tuple[int, set[int]]:
    """Calls of attention in a layer, and how many products each of those groups has of its own."""
    from collections import Counter

    from autosp_dtensor.api import forward_of
    from autosp_dtensor.checkpoint.kinds import is_attention, is_product
    from autosp_dtensor.graph import facts

    forward = forward_of(model)
    assert forward is not None and forward.last is not None
    found: Counter[Any] = Counter()
    calls = 0
    for path, region in forward.last.root.walk():
        if path.startswith("blocks.0"):
            for node in region.graph.nodes:
                turn = facts(node).turn
                calls += is_attention(node)
                found[turn] += turn is not None and is_product(node)
    del found[None]
    return calls, {*found.values()}


def trained(
    rank: Rank, config: TConfig, sizes: dict[str, int], units: tuple[str, ...], options: Any
) -> tuple[int, set[int]]:
    import autosp_dtensor as autosp

    made: list[nn.Module] = []

    def set_up(model: Any, mesh: Any) -> nn.Module:
        over = autosp.fsdp_mesh(mesh)
        model = autosp.parallelize(model, mesh, tile=4, **options)
        for block in model.blocks:
            for name in units:
                fully_shard(block.get_submodule(name), mesh=over)
        made.append(shard(model, mesh))
        return made[-1]

    build = partial(models.build_t, config)
    batches = batches_of_t(sizes.get("dp", 1), length=15)
    assert_same_as_one_device(rank, build, batches, rank.mesh(**sizes), set_up=set_up)
    return products_by_groups(made[-1])


def on_four(rank: Rank) -> dict[str, tuple[int, set[int]]]:
    found = {
        name: trained(rank, CONFIGS[name], {"dp": 2, "sp": 2}, (), OPTIONS[mode])
        for name, mode in RUNS
    }
    return {**found, "all": trained(rank, CONFIG, {"sp": 4}, (), OPTIONS["full"])}


def test_gradients_on_four_ranks_are_those_of_one_device() -> None:
    for found in run_on_ranks(on_four):
        assert found == {
            "heads": (4, {3}), "key heads": (2, {1}), "adapted": (4, {5}), "all": (2, {3})
        }  # fmt: skip


def on_two(rank: Rank) -> list[tuple[int, set[int]]]:
    projections = "attention.q", "attention.k", "attention.v"
    return [
        trained(rank, CONFIG, {"sp": 2}, units, OPTIONS[mode])
        for units in (projections[:1], projections, ("attention",))
        for mode in ("kept", "full")
    ]


def test_a_projection_that_is_a_unit_of_its_own_stays_whole() -> None:
    """Its weights are there in its call alone. Attention, behind it, goes by groups still."""
    for found in run_on_ranks(on_two, n=2):
        assert found == [
            *[(4, {2})] * 2,
            *[(4, {0})] * 2,
            *[(4, {3})] * 2,
        ]


def counted(rank: Rank) -> list[int]:
    """Exchanges of a step: two of each group forward, two backward."""
    import autosp_dtensor as autosp

    found = []
    for tile in ("none", 64):
        model = autosp.parallelize(
            ModelT(TConfig(heads=8, kv_heads=8)), rank.mesh(sp=2), tile=tile, checkpoint="none"
        )
        (batch,) = batches_of_t(1)
        model(**batch)
        with collectives() as counts:
            model(**batch).loss.backward()
        found.append(counts.exchanges())
    return found


def test_exchanges_are_those_of_each_group() -> None:
    layers, groups = 2, 4
    assert run_on_ranks(counted, n=2) == [[4 * layers, 4 * layers * groups]] * 2
