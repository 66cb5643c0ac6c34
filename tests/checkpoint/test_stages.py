"""Backward has a region's values again in stages: the same gradients, attention run once, and what
attention needs is not there while what comes after it is used."""

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
from autosp_dtensor.checkpoint.cuts import forward_seconds, lower_cuts, seconds_again
from autosp_dtensor.checkpoint.kinds import is_attention
from autosp_dtensor.checkpoint.peak import backward_peak
from autosp_dtensor.checkpoint.stages import Cut, Stages, cut_places, staged
from autosp_dtensor.cost import DEVICES
from autosp_dtensor.graph import short_name
from autosp_dtensor.lower import Collective, Region
from tests.checkpoint import layers
from tests.checkpoint.layers import layer_region
from tests.checkpoint.stacked import Stacked
from tests.lower.wire import on_ranks
from tests.model_t import ModelT, TConfig
from tests.run.test_codegen import Ran, bound
from tests.simulate import Lowered, lowered

CPU, A100 = DEVICES["cpu"], DEVICES["a100-80gb"]
WIDTH, HEADS = 8, 4
IDS = torch.stack([torch.arange(13) % 16, (torch.arange(13) * 5 + 3) % 16])


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=causal)
    return y.transpose(1, 2).flatten(2)


def plain(b: Block, x: Tensor) -> Tensor:
    y = b.norm(x)
    x = x + b.o(attend(b.q(y), b.k(y), b.v(y)))
    return x + b.mlp(b.norm2(x))


def normed_heads(b: Block, x: Tensor) -> Tensor:
    y = b.norm(x)
    q, k = (F.rms_norm(p(y), (WIDTH,)) for p in (b.q, b.k))
    x = x + b.o(attend(q, k, b.v(y)))
    return x + b.mlp(b.norm2(x))


def gated(b: Block, x: Tensor) -> Tensor:
    """What stands before attention is used after it, and attention's result twice."""
    y = b.norm(x)
    gate = b.gate(y).sigmoid()
    out = attend(b.q(y), b.k(y), b.v(y))
    x = x + b.o(out * gate) + out.tanh()
    return x + b.mlp(b.norm2(x)) * gate


def parallel(b: Block, x: Tensor) -> Tensor:
    """Nothing behind attention needs its result."""
    y = b.norm(x)
    wide = b.mlp(y)
    return x + wide + b.o(attend(b.q(y), b.k(y), b.v(y)))


def twice(b: Block, x: Tensor) -> Tensor:
    """One attention after another, which share their keys."""
    y = b.norm(x)
    k = b.k(y)
    x = x + b.o(attend(b.q(y), k, b.v(y)))
    y = b.norm2(x)
    x = x + b.o(attend(b.q(y), k, b.gate(y), causal=False))
    return x + b.mlp(x.tanh())


def difference(b: Block, x: Tensor) -> Tensor:
    """Two attentions side by side, of one value."""
    y = b.norm(x)
    v = b.v(y)
    x = x + b.o(attend(b.q(y), b.k(y), v) - attend(b.k(y), b.gate(y), v))
    return x + b.mlp(b.norm2(x))


def dropped(b: Block, x: Tensor) -> Tensor:
    """Draws before, and behind attention."""
    y = F.dropout(b.norm(x), 0.3)
    x = x + F.dropout(b.o(attend(b.q(y), b.k(y), b.v(y))), 0.3)
    return x + F.dropout(b.mlp(b.norm2(x)), 0.3)


def nothing_after(b: Block, x: Tensor) -> Tensor:
    y = b.norm(x)
    return attend(b.q(y), b.k(y), b.v(y)) + x


BODIES: dict[str, Callable[[Block, Tensor], Tensor]] = {
    each.__name__: each
    for each in (plain, normed_heads, gated, parallel, twice, difference, nothing_after)
}


class Block(nn.Module):
    def __init__(self, body: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Model(Stacked):
    def __init__(self, body: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__(lambda: Block(body), WIDTH)


def regions(program: Lowered) -> dict[Region, int]:
    return Counter(region for _, region in program.root.walk() if region is not program.root)


@pytest.fixture
def all_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a cut may be, whether it pays or not."""

    def everywhere(found: Any, keep: Any, *_: Any) -> tuple[Cut, ...]:
        return staged(found, keep, cut_places(found)).cuts

    monkeypatch.setattr(choosing, "lower_cuts", everywhere)


def asked(mode: str | Checkpoint) -> Callable[[Lowered], Policy]:
    return lambda program: policy_of(regions(program), mode, CPU)


MODES: dict[str, str | Checkpoint] = {
    "full": "full",
    "sequence": "sequence",
    "products": Checkpoint(("products",)),
    "exchanges": Checkpoint(("exchanges",)),
}


@pytest.mark.parametrize(
    ("mode", "n"), [("full", 1), ("full", 3), ("sequence", 2), ("products", 2), ("exchanges", 2)]
)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.usefixtures("all_cuts")
def test_gradients_are_those_of_a_run_that_keeps_all(name: str, mode: str, n: int) -> None:
    model = Model(BODIES[name])
    kept, again = (Ran(model, (IDS,), n, policy=p) for p in (None, asked(MODES[mode])))
    for a, b in zip([*kept.results, *kept.grads], [*again.results, *again.grads], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["full", "products"])
@pytest.mark.parametrize("name", ["twice", "difference", "gated"])
def test_any_cuts_may_be_missing(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays differs by sizes: behind one attention alone, before the other, ..."""
    model = Model(BODIES[name])
    del model.blocks[1]
    kept = Ran(model, (IDS,), 2)
    made = set()
    for chosen in range(16):

        def some(found: Any, keep: Any, *_: Any, chosen: int = chosen) -> tuple[Cut, ...]:
            places = [c for k, c in enumerate(cut_places(found)) if chosen >> k & 1]
            made.add(cuts := staged(found, keep, places).cuts)
            return cuts

        monkeypatch.setattr(choosing, "lower_cuts", some)
        again = Ran(model, (IDS,), 2, policy=asked(MODES[mode]))
        for a, b in zip([*kept.results, *kept.grads], [*again.results, *again.grads], strict=True):
            assert torch.equal(a, b), chosen
    assert len(made) >= (4 if name == "gated" else 8)


@pytest.mark.usefixtures("all_cuts")
@pytest.mark.parametrize("mode", ["full", "sequence"])
def test_what_was_drawn_is_drawn_again_in_every_stage(mode: str) -> None:
    model = Model(dropped)
    kept, again = (Ran(model, (IDS,), 1, seed=3, policy=p) for p in (None, asked(MODES[mode])))
    for a, b in zip([*kept.results, *kept.grads], [*again.results, *again.grads], strict=True):
        assert torch.equal(a, b)


def stages_of(body: Callable[[Block, Tensor], Tensor], mode: str) -> tuple[Region, Stages]:
    program = lowered(Model(body), (IDS,), 2)
    region, choice = next(iter(asked(mode)(program).choices.items()))
    return region, choice.stages


@pytest.mark.usefixtures("all_cuts")
@pytest.mark.parametrize("mode", ["full", "sequence"])
@pytest.mark.parametrize("name", BODIES)
def test_attention_runs_once_again_at_most_and_exchanges_begin_behind_it(
    name: str, mode: str
) -> None:
    region, stages = stages_of(BODIES[name], mode)
    nodes = list(region.graph.nodes)
    runs = Counter(k for stage in stages.each for k in stage.again)
    attention = [k for k, node in enumerate(nodes) if is_attention(node)]
    assert all(runs[k] == (mode == "full") for k in attention)
    assert len(stages.each) >= 2
    for cut, stage in zip(stages.cuts, stages.each[1:], strict=True):
        if not cut.after:
            assert not any(isinstance(nodes[k].target, Collective) and nodes[k].target.sends
                           for k in stage.again)  # fmt: skip


@pytest.mark.usefixtures("all_cuts")
@pytest.mark.parametrize("mode", ["full", "sequence"])
def test_what_attention_needs_comes_after_what_it_gave_was_used(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each run: the stage, and which operations' memory of earlier stages is still there."""
    seen: list[tuple[int, set[str]]] = []
    made: list[tuple[int, str, StorageWeakRef]] = []
    run, names = Frame.run_again, {}

    def watched(self: Frame, stage: int) -> None:
        alive = {name for before, name, ref in made if before < stage and not ref.expired()}
        seen.append((stage, alive))
        run(self, stage)
        for key, tensor in self._found.items():
            at = key.at if not isinstance(key, tuple) else key[1]
            made.append((stage, names[at], StorageWeakRef(tensor.untyped_storage())))

    monkeypatch.setattr(Frame, "run_again", watched)
    model = Model(plain)
    del model.blocks[1]
    program = lowered(model, (IDS,), 2)
    policy = asked(mode)(program)
    (region,) = policy.choices
    names.update({k: short_name(node.target) for k, node in enumerate(region.graph.nodes)})

    def body(group: Any, rank: int) -> None:
        own = copy.deepcopy(model)
        (result,) = bound(program, own, group, rank, policy)(0, IDS)
        result.square().sum().backward()

    on_ranks(2, body)
    assert [stage for stage, _ in seen] == sorted(stage for stage, _ in seen)
    later = [alive for stage, alive in seen if stage]
    assert later
    for alive in later:
        assert not alive & {"gelu", "layer_norm", "linear"}, "of what comes after attention"


def test_cuts_that_pay_are_made_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of an 8B model, with an MLP that is as narrow as tiles make it: in front of that
    stand neither q, k, v nor their norm, in front of attention no norm."""
    monkeypatch.setattr(layers, "INNER", layers.WIDTH)
    found = record(layer_region(131_072))
    always = choosing.always(found)
    attention = next(k for k, node in enumerate(found.nodes) if is_attention(node))
    cuts = lower_cuts(found, always, A100)
    assert set(cuts) == {Cut(attention, True), Cut(attention, False)}
    hidden = 131_072 // 8 * 4096 * 2
    whole, cut = (backward_peak(found, stages=staged(found, always, each)) for each in ((), cuts))
    assert whole - cut >= 2.5 * hidden, "queries, keys and values, and their norm"


@pytest.mark.parametrize("attention_is_kept", [False, True])
@pytest.mark.parametrize("length", [2_048, 131_072])
def test_where_memory_was_not_asked_for_stages_take_no_time(
    length: int, attention_is_kept: bool
) -> None:
    found = record(layer_region(length))
    attention = {k for k, node in enumerate(found.nodes) if is_attention(node)}
    keep = choosing.always(found) | (attention if attention_is_kept else set())
    once = staged(found, keep, ())
    stages = staged(found, keep, lower_cuts(found, keep, A100, 0.01))
    more = seconds_again(found, stages, A100) - seconds_again(found, once, A100)
    assert more <= 0.01 * forward_seconds(found, A100)
    runs = Counter(k for stage in stages.each for k in stage.again)
    assert all(n == 1 or short_name(found.nodes[k].target) == "rms_norm" for k, n in runs.items())


def test_more_than_one_backward_goes_through(all_cuts: None) -> None:
    model = Model(twice)
    program = lowered(model, (IDS,), 1)
    policy = asked("full")(program)

    def body(group: Any, rank: int) -> list[list[Tensor]]:
        (result,) = bound(program, model, group, rank, policy)(0, IDS)
        weights = torch.arange(result.numel()).view(result.shape) / result.numel()
        loss = (result * weights).sum()
        found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                 for _ in range(2)]  # fmt: skip
        return [list(each) for each in found]

    ((first, second),), _ = on_ranks(1, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("heads", "n"), [(3, 2), (1, 2), (2, 3)])
def test_uneven_heads_meet_in_every_stage(all_cuts: None, heads: int, n: int) -> None:
    """The ranks' views and copies differ, and some have no head; their exchanges must not."""
    model = ModelT(TConfig(layers=2, heads=heads, kv_heads=heads, attention=("sdpa",)))
    ids = torch.randint(0, 16, (2, 11), generator=torch.Generator().manual_seed(0))
    kept, again = (Ran(model, (ids, ids), n, policy=p) for p in (None, asked("full")))
    for a, b in zip([*kept.results, *kept.grads], [*again.results, *again.grads], strict=True):
        assert torch.equal(a, b)
