"""What is not kept is computed again: the same gradients, fewer bytes, no operation in vain."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autosp_dtensor.checkpoint import Checkpoint, Frame, Policy, policy_of, record
from autosp_dtensor.checkpoint import choose as choosing
from autosp_dtensor.cost import DEVICES
from autosp_dtensor.graph import short_name
from autosp_dtensor.lower import Region
from tests.checkpoint.layers import layer_region
from tests.lower.wire import on_ranks
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.run.test_codegen import Ran, assert_ranks_give_the_whole, bound
from tests.simulate import Lowered, lowered

CPU = DEVICES["cpu"]
IDS = ids_of_t(2, 13)


def regions(program: Lowered) -> dict[Region, int]:
    return Counter(region for _, region in program.root.walk() if region is not program.root)


def asked(mode: str | Checkpoint, budget: int | None = None) -> Callable[[Lowered], Policy]:
    return lambda program: policy_of(regions(program), mode, CPU, budget)


def model_t(**config: Any) -> ModelT:
    return ModelT(TConfig(**{"layers": 2, "qk_norm": "hidden", **config}))


MODES: dict[str, str | Checkpoint] = {
    "none": "none",
    "full": "full",
    "sequence": "sequence",
    "products": Checkpoint(("products",)),
    "exchanges and attention": Checkpoint(("exchanges", "attention")),
    "by name": Checkpoint(("silu", "linear")),
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("attention", ["sdpa", "matmul", "einsum"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_one_device(mode: str, attention: str, n: int) -> None:
    model = model_t(attention=(attention,))
    assert_ranks_give_the_whole(model, (IDS, IDS), n, asked(MODES[mode]))


@pytest.mark.parametrize("budget", [0, 2_000, 20_000, 60_000, 10**9])
def test_gradients_under_any_budget_are_those_of_one_device(budget: int) -> None:
    assert_ranks_give_the_whole(model_t(), (IDS, IDS), 2, asked("auto", budget))


class Wide(nn.Module):
    """Blocks of all that saves in its own way: a convolution, softmax, dropout, views, cumsum."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))
        self.blocks = nn.ModuleList(WideBlock(rate) for _ in range(2))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        for block in self.blocks:
            x = block(x)
        return x


class WideBlock(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(8, 8, 3, groups=8)
        self.gate, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed = self.conv(F.pad(y.transpose(1, 2), (2, 0))).transpose(1, 2)
        a, b = self.gate(mixed).chunk(2, -1)
        z = F.dropout(a.sigmoid() * b.tanh(), self.rate)
        weights = z.softmax(-1)
        return x + self.out(weights * z.cumsum(1)) + weights.amax(-1, keepdim=True)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("mode", ["full", "sequence", "products"])
def test_whatever_an_operation_saves_comes_back(mode: str, n: int) -> None:
    """Dropout draws the same again: bit-equal to the run that keeps all. (Ranks that are threads
    share one generator, so that two of them cannot draw at the same time.)
    """
    torch.manual_seed(0)
    model, ids = Wide(0.3 if n == 1 else 0.0), torch.randint(16, (2, 12))
    plain, again = (
        Ran(copy.deepcopy(model), (ids,), n, seed=3, policy=p) for p in (None, asked(MODES[mode]))
    )
    for a, b in zip([*plain.results, *plain.grads], [*again.results, *again.grads], strict=True):
        assert torch.equal(a, b)


def choices(model: nn.Module, mode: str | Checkpoint, n: int = 2, budget: int | None = None) -> Any:
    program = lowered(model, (IDS, IDS), n)
    policy = policy_of(regions(program), mode, CPU, budget)
    return program, policy


def again_names(policy: Policy) -> Counter[str]:
    found: Counter[str] = Counter()
    for region, choice in policy.choices.items():
        nodes = list(region.graph.nodes)
        found.update(
            getattr(nodes[k].target, "kind", None) or short_name(nodes[k].target)
            for k in choice.again
        )
    return found


def test_attention_is_not_run_again_under_the_papers_rule() -> None:
    _, sequence = choices(model_t(attention=("sdpa",)), "sequence")
    _, full = choices(model_t(attention=("sdpa",)), "full")
    assert not again_names(sequence)["scaled_dot_product_attention"]
    assert again_names(full)["scaled_dot_product_attention"]


def test_what_backward_does_not_need_is_not_run_again() -> None:
    """The last projection of a block has nothing behind it that asks for its result."""
    _, full = choices(model_t(attention=("sdpa",)), "full")
    for region, choice in full.choices.items():
        nodes = list(region.graph.nodes)
        linears = [k for k, n in enumerate(nodes) if short_name(n.target) == "linear"]
        assert linears[-1] not in choice.again and linears[0] in choice.again


def test_more_bytes_save_more_time_and_all_fit() -> None:
    model = model_t(attention=("sdpa",), layers=3)
    program, _ = choices(model, "none")
    counts = regions(program)
    whole = sum(choosing.whole_bytes(record(r)) * count for r, count in counts.items())
    nothing = {r: choosing.choice_of(record(r), (), CPU) for r in counts}
    least = sum(nothing[r].bytes * count for r, count in counts.items())
    last = float("inf")
    for budget in range(0, whole, whole // 12):
        policy = policy_of(counts, "auto", CPU, budget)
        each = [pair for r, count in counts.items() for pair in policy.of(r, count)]
        used = sum(n * choice.bytes for n, choice in each)
        seconds = sum(n * choice.seconds for n, choice in each)
        assert used <= max(budget, least)
        assert seconds <= last
        last = seconds
    assert not policy_of(counts, "auto", CPU, whole).choices


def test_attention_is_kept_before_products_at_long_lengths() -> None:
    """The crossover: a layer's products are worth their bytes when short, attention when long."""
    a100 = DEVICES["a100-80gb"]

    def per_byte(length: int) -> dict[str, float]:
        """Seconds that one more byte saves, of the best operation of each name."""
        found = record(layer_region(length))
        start = choosing.choice_of(found, (), a100)
        best: dict[str, float] = {}
        for k in start.again:
            tried = choosing.choice_of(found, {k}, a100)
            more = tried.bytes - start.bytes
            name = short_name(found.nodes[k].target)
            if more > 0:
                best[name] = max(best.get(name, 0.0), (start.seconds - tried.seconds) / more)
        return best

    short, long = per_byte(2_048), per_byte(131_072)
    assert short["linear"] > short["scaled_dot_product_attention"]
    assert max(long, key=lambda name: long[name]) == "scaled_dot_product_attention"
    assert long["linear"] == pytest.approx(short["linear"], rel=0.2)


@pytest.mark.parametrize("mode", ["full", "sequence", "products", "by name"])
def test_bytes_kept_are_those_predicted(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a region's results that is still alive after forward; its own result lives on."""
    alive: dict[int, tuple[StorageWeakRef, int]] = {}
    made = Frame.made

    def noted(self: Frame, at: int, result: Any) -> None:
        made(self, at, result)
        for each in result if isinstance(result, (tuple, list)) else (result,):
            storage = each.untyped_storage()
            if storage._cdata not in self._given:
                alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    monkeypatch.setattr(Frame, "made", noted)
    program, policy = choices(model_t(attention=("sdpa",), layers=1), MODES[mode], n=1)
    (choice,) = policy.choices.values()
    assert program.live is not None

    def body(group: Any, rank: int) -> int:
        assert program.live is not None
        results = bound(program, program.live, group, rank, policy)(0, IDS, IDS)
        assert results[0].requires_grad
        return sum(size for storage, size in alive.values() if not storage.expired())

    (kept,), _ = on_ranks(1, body)
    result = 2 * 13 * 32 * 8
    inside = sum(s.bytes for s in record(next(iter(policy.choices))).saved if s.own)  # statistics
    assert choice.bytes - inside <= kept <= choice.bytes + result
