"""The final projection is an FSDP2 unit of its own, as torchtitan has it: its weights are there in
its call alone, and logits still exist for one tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autosp_dtensor.checkpoint import tiling
from tests import models
from tests.losses import dpo, label_smoothing, mean, none_times_weights, z_loss
from tests.model_t import IGNORED, VOCABULARY, WIDTH, ModelT
from tests.pool import Rank, run_on_ranks
from tests.ranks.test_losses import targets_of

LOSSES = [mean, none_times_weights, label_smoothing, z_loss, dpo]


class Titan(nn.Module):
    """A norm and a projection after the blocks, and a loss where one is given."""

    def __init__(self, loss: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.model = ModelT()
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.float64)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        self.output.weight = nn.Parameter(self.model.head.weight.detach().flip(0))
        del self.model.head
        self.loss = loss

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.output(self.norm(self.model.hidden(self.model.embedding(ids), None, None)))
        if self.loss is None:
            return logits
        return self.loss(logits, targets), logits


UNITS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "projection": lambda m: [m.output],
    "both": lambda m: [m.norm, m.output],
    "both in one": lambda m: [[m.norm, m.output]],
    "and blocks": lambda m: [*m.model.blocks, m.output],
}


def sharded(model: nn.Module, mesh: Any, units: str, tile: Any = 3, **options: Any) -> Any:
    import autosp_dtensor as autosp

    over = autosp.fsdp_mesh(mesh)
    model = autosp.parallelize(model, mesh, tile=tile)
    for unit in UNITS[units](model):
        fully_shard(unit, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def same_gradients(split: nn.Module, whole: nn.Module, note: Any = "") -> None:
    held = dict(whole.named_parameters())
    for name, p in split.named_parameters():
        torch.testing.assert_close(
            p.grad.full_tensor(), held[name].grad, rtol=1e-10, atol=1e-10, msg=f"{note} {name}"
        )


def stepped(optimizers: list[torch.optim.SGD]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def tiles_of(model: nn.Module) -> list[str]:
    """Where the tiles of a model's program stand."""
    import autosp_dtensor as autosp

    found = []
    for line in str(autosp.explain(model)).splitlines():
        if "tiles x" in line or "on demand" in line:
            found.append(line.strip())
    return found


def outside(rank: Rank, units: str, reshard: bool, make: Callable[..., Any]) -> list[bool]:
    import autosp_dtensor as autosp
    from autosp_dtensor.errors import UsageError

    mesh = rank.mesh(dp=1, sp=2)
    ids = models.random_ids()
    targets = targets_of("uneven", ids)
    whole = Titan()
    split = sharded(Titan(), mesh, units, reshard_after_forward=reshard)
    loss = autosp.parallelize(make, mesh, tile=3)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in (whole, split)]
    pending = []
    for step in range(4):
        want, got = whole(ids), split(ids)
        pending.append(got.pending)
        if step == 2:  # read before, with the projection's weights gathered for it
            torch.testing.assert_close(got.full_tensor(), want)
        if step == 3:  # no function of ours: the gradient comes by the logits
            F.cross_entropy(
                got.full_tensor().flatten(0, 1), targets.flatten(), ignore_index=IGNORED
            ).backward()
            mean(want, targets).backward()
        else:
            make(want, targets).backward()
            total = loss(got, targets)
            pending.append(got.pending)
            total.backward()
        torch.testing.assert_close(got.full_tensor(), want)
        same_gradients(split, whole, step)
        stepped(steps)
    late = split(ids)
    loss(split(ids), targets).backward()
    steps[1].step()
    for read in (lambda: loss(late, targets), late.detach):
        with pytest.raises(UsageError, match="has changed"):
            read()
    return pending


@pytest.mark.parametrize(
    ("units", "reshard", "make"),
    [
        ("projection", True, mean),
        ("projection", False, dpo),
        ("both", True, dpo),
        ("both in one", True, dpo),
        ("both in one", False, mean),
        ("and blocks", True, mean),
    ],
)
def test_loss_outside_of_the_model(units: str, reshard: bool, make: Callable[..., Tensor]) -> None:
    for pending in run_on_ranks(outside, units, reshard, make, n=2):
        assert pending == [True, True, True, True, True, False, True]


def inside(rank: Rank, units: str, make: Callable[..., Any]) -> list[str]:
    mesh = rank.mesh(dp=1, sp=rank.world_size)
    ids = models.random_ids()
    targets = targets_of("uneven", ids)
    whole, split = Titan(make), sharded(Titan(make), mesh, units)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, split)]
    for step in range(2):
        want, wanted = whole(ids, targets)
        got, logits = split(ids, targets)
        assert logits.pending
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        if step:  # logits that are read give a gradient as well
            want = want + wanted.square().mean()
            got = got + logits.full_tensor().square().mean()
        want.backward()
        got.backward()
        torch.testing.assert_close(logits.full_tensor(), wanted)
        same_gradients(split, whole, step)
        stepped(optimizers)
    with torch.no_grad():
        torch.testing.assert_close(split(ids, targets)[0], whole(ids, targets)[0])
    return tiles_of(split)


CASES = [
    *(("both in one", make, 2) for make in LOSSES),
    ("projection", none_times_weights, 4),
    ("both", label_smoothing, 4),
    ("and blocks", z_loss, 4),
    ("and blocks", mean, 2),
]


@pytest.mark.parametrize(("units", "make", "n"), CASES)
def test_loss_inside_of_the_model(units: str, make: Callable[..., Tensor], n: int) -> None:
    for tiles in run_on_ranks(inside, units, make, n=n):
        assert any("on demand" in line for line in tiles), tiles
        assert make is dpo or any("tiles x" in line for line in tiles), tiles


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    """In fp32, with weights that bf16 would round."""
    scale = 1 + torch.arange(targets.numel(), device=targets.device).view_as(targets) * 1e-3
    each = F.cross_entropy(
        logits.float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    return (each * scale).sum()


def in_bf16(rank: Rank, units: str, output: Any) -> None:
    """What moves into the projection's call is not cast by FSDP2, neither way."""
    mesh = rank.mesh(dp=1, sp=2)
    ids = models.random_ids()
    targets = targets_of("uneven", ids)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=output
    )
    got = []
    for tile in (3, "none"):
        split = sharded(Titan(weighted).float(), mesh, units, tile=tile, mp_policy=policy)
        with pytest.MonkeyPatch.context() as patch:  # heads one by one round otherwise in bf16
            patch.setattr(tiling, "attend_by_heads", lambda *_: None)
            loss, logits = split(ids, targets)
        loss.backward()
        grads = {name: p.grad.full_tensor() for name, p in split.named_parameters()}
        got.append((loss, logits.full_tensor(), grads))
    (loss, logits, grads), (want, wanted, wanted_grads) = got
    assert logits.dtype == wanted.dtype == (output or torch.bfloat16)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=0)
    for name, grad in grads.items():
        off = (grad - wanted_grads[name]).norm() / wanted_grads[name].norm()
        assert off < 5e-3, f"{name}: {off}"


@pytest.mark.parametrize("output", [None, torch.float32], ids=["as it is", "fp32"])
@pytest.mark.parametrize("units", ["projection", "both in one"])
def test_mixed_precision(units: str, output: Any) -> None:
    run_on_ranks(in_bf16, units, output, n=2)


class ReadsWeights(Titan):
    """Another module's weights are in the loss; `at` tells whose."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        weight = self.get_submodule(self.at).weight
        return mean(logits / weight.square().mean(), targets), logits


def read_elsewhere(rank: Rank, units: str, at: str) -> str:
    from autosp_dtensor.errors import UsageError

    ids = models.random_ids()
    split = sharded(ReadsWeights(at), rank.mesh(dp=1, sp=2), units)
    with pytest.raises(UsageError, match="where FSDP2 has not gathered it") as error:
        split(ids, targets_of("uneven", ids))
    return str(error.value)


@pytest.mark.parametrize(
    ("units", "at"), [("projection", "output"), ("both in one", "norm"), ("both", "norm")]
)
def test_weights_of_a_unit_read_outside_of_its_call_are_refused(units: str, at: str) -> None:
    for text in run_on_ranks(read_elsewhere, units, at, n=2):
        assert f"{at}.weight" in text
