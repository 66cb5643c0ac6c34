"""A way to split attention is one class: one that is not the library's, put in beside its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.place.attention import rule
from autosp_dtensor.place.attention.form import Form
from autosp_dtensor.place.attention.heads import Heads
from autosp_dtensor.place.attention.strategy import AttentionOption, Strategy
from autosp_dtensor.place.rule import Local, Op
from autosp_dtensor.placement import PerRank, Replicate, Shard
from tests.model_t import ModelT, TConfig
from tests.place.field_cases import batch_with
from tests.simulate import Lowered, assert_program_equals_whole

TWO_ROWS = batch_with([range(15), (2, 9, 11)], rows=2)


class GatheredKeys(Strategy):
    """Keys and values are gathered, queries stay where they are: is_causal counts from each rank's
    first query."""

    def from_input(self, op: Op, form: Form, i: int, shard: Shard) -> AttentionOption | None:
        if i != 0 or op.name != "scaled_dot_product_attention" or shard.dim != form.dim_of(0, "m"):
            return None
        ins = (shard, *(Replicate() for _ in op.ins[1:]))
        return AttentionOption(ins, (shard,), self)

    def localize(self, op: Op, form: Form, option: AttentionOption) -> Local:
        shard = option.outs[0]
        assert isinstance(shard, Shard)
        return Local(causal_from, (PerRank(shard.offsets), *op.args), op.kwargs)


def causal_from(first: int, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    assert given.pop("is_causal") and given.pop("attn_mask", None) is None
    at = torch.arange(q.shape[-2]) + first
    allowed = torch.arange(k.shape[-2]) <= at[:, None]
    return F.scaled_dot_product_attention(q, k, v, allowed, **given)


def run(monkeypatch: pytest.MonkeyPatch, n: int, config: TConfig, *strategies: Strategy) -> Lowered:
    monkeypatch.setattr(rule, "STRATEGIES", strategies)
    return assert_program_equals_whole(ModelT(config), (), n, **TWO_ROWS)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("heads", [(4, 1), (7, 1)])
def test_strategy_alone_runs_every_layer(
    heads: tuple[int, int], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, logits and gradients; keys and values of each layer are gathered, and nothing else.
    (Of more key heads it would be less to exchange the two rows, on 2 ranks.)"""
    config = TConfig(heads=heads[0], kv_heads=heads[1])
    program = run(monkeypatch, n, config, GatheredKeys())
    assert len(program.named("causal_from")) == 2
    assert not program.named("scaled_dot_product_attention")
    gathered = [moves for kind, moves in program.collectives() if kind == "all_gather"]
    assert sum(map(len, gathered)) == 4 and "all_to_all" not in program.kinds()


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize(("heads", "own"), [((8, 1), False), ((8, 8), True)])
def test_of_two_strategies_the_one_that_sends_less_runs(
    heads: tuple[int, int], own: bool, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key head of eight is less than the queries; eight are more. Either may stand first."""
    config = TConfig(heads=heads[0], kv_heads=heads[1], head_size=4)
    program = run(monkeypatch, 4, config, *(GatheredKeys(), Heads())[::order])
    ran = program.named("scaled_dot_product_attention"), program.named("causal_from")
    assert [len(nodes) for nodes in ran] == ([2, 0] if own else [0, 2])
