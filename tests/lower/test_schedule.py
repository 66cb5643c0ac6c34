"""Exchanges start as soon as their input exists and are awaited when nothing else is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import short_name
from autosp_dtensor.lower import Step, exchange, schedule
from autosp_dtensor.lower.schedule import is_exchange
from autosp_dtensor.placement import Shard
from tests.lower.wire import on_ranks
from tests.pieces import cut, glue, shardings
from tests.simulate import lowered

IDS = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(1))


class Parallel(nn.Module):
    """Attention and MLP side by side, as GPT-J, NeoX and Cohere have them."""

    def __init__(self, side_by_side: bool) -> None:
        super().__init__()
        self.side_by_side = side_by_side
        self.table = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
        self.qkv, self.o = (nn.Linear(8, width, dtype=torch.float64) for width in (24, 8))
        self.up, self.down = (nn.Linear(a, b).double() for a, b in ((8, 16), (16, 8)))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.o(y.transpose(1, 2).flatten(2))
        mlp = self.down(F.gelu(self.up(x if self.side_by_side else x + y)))
        return x + y + mlp


def steps(side_by_side: bool) -> list[Step]:
    return schedule(lowered(Parallel(side_by_side), (IDS,), 2).root.graph)


def between(order: list[Step], number: int) -> list[str]:
    """What runs while the exchange of this number is on its way."""
    starts = [k for k, (kind, _) in enumerate(order) if kind == "start"]
    ends = [k for k, (kind, _) in enumerate(order) if kind == "finish"]
    return [short_name(n.target) for _, n in order[starts[number] + 1 : ends[number]]]


def test_mlp_runs_while_queries_keys_and_values_travel() -> None:
    order = steps(side_by_side=True)
    assert between(order, 0).count("linear") == 2 and "gelu" in between(order, 0)


def test_what_has_nothing_beside_it_is_one_call() -> None:
    order = steps(side_by_side=False)
    assert {kind for kind, _ in order} == {"run"}
    assert sum(is_exchange(node) for _, node in order) == 2


@pytest.mark.parametrize("side_by_side", [True, False])
def test_every_operation_runs_once_after_what_it_takes(side_by_side: bool) -> None:
    graph = lowered(Parallel(side_by_side), (IDS,), 2).root.graph
    order = schedule(graph)
    done = {node for node in graph.nodes if node.op == "placeholder"}
    for kind, node in order:
        if kind != "finish":
            assert set(node.all_input_nodes) <= done
        if kind != "start":
            done.add(node)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert sorted(node for kind, node in order if kind != "start") == calls
    sent = [node for node in calls if is_exchange(node)]
    assert [n for kind, n in order if kind != "finish" and is_exchange(n)] == sent


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("even", [True, False])
def test_work_between_start_and_finish_changes_nothing(n: int, even: bool) -> None:
    """Values and gradients, twice through the same graph."""
    length = 2 * n if even else 2 * n + 1
    first, second = shardings(length, n)[0][0], shardings(length, n)[0 if even else 2][0]

    source, target = Shard(0, first), Shard(1, second)
    whole = torch.randn(length, length, dtype=torch.float64)
    parts = [p.clone().requires_grad_() for p in cut(whole, source, n)]

    def run(group, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        flying = exchange.Exchange(group, rank, ((source, target),), [parts[rank]])
        beside = parts[rank].sin()
        (out,) = flying.finish()
        total = (out * out).sum() + beside.sum()
        (once,) = torch.autograd.grad(total, parts[rank], retain_graph=True)
        (again,) = torch.autograd.grad(total, parts[rank])
        return out.detach(), once, again

    results, calls = on_ranks(n, run)
    torch.testing.assert_close(glue([out for out, _, _ in results], target), whole)
    for rank, (_, once, again) in enumerate(results):
        mine = parts[rank].detach()
        torch.testing.assert_close(once, 2 * mine + mine.cos())
        assert torch.equal(once, again)
    assert calls == ["all_to_all"] * 3


def test_exchange_is_finished_once() -> None:

    move = (Shard(0, (2, 2)), Shard(1, (2, 2)))

    def run(group, rank: int) -> None:
        flying = exchange.Exchange(group, rank, (move,), [torch.ones(2, 4)])
        flying.finish()
        with pytest.raises(AssertionError, match="once"):
            flying.finish()

    on_ranks(2, run)
