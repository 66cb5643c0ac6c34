"""tile="auto": what costs time runs by tiles only where the step does not fit without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autosp_dtensor as autosp
from autosp_dtensor.api import forward_of
from autosp_dtensor.checkpoint import Policy, Tile, defer, tile, tiling
from autosp_dtensor.errors import UsageError
from autosp_dtensor.run.budget import step_fits
from autosp_dtensor.run.compile import Options
from tests.run.fake_group import fake_mesh

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(2))
LARGE = 1 << 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a few KiB are large."""
    for module in (tiling, defer):
        monkeypatch.setattr(module, "LEAST_BYTES", 1)
    monkeypatch.setattr(tile, "LEAST_TOKENS", 4)
    monkeypatch.setattr(tile, "TILE_BYTES", 1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(1) as made:
        yield made


def flat(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return x.flatten(0, 1), target.flatten()


def z_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(*flat(x, target)) + 0.1 * x.logsumexp(-1).square().mean()


def preference(x: Tensor, target: Tensor) -> Tensor:
    """One number for each row, as DPO has it."""
    each = x.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1).sum(1)
    return -F.logsigmoid(each[0] - each[1])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "z": z_loss,
    "preference": preference,
    "each token": lambda x, t: F.cross_entropy(*flat(x, t), reduction="none").square().sum(),
    "plain": lambda x, t: F.cross_entropy(*flat(x, t)),
}
ONE_SUM = ("plain", "each token")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Two layers with MLPs of 64, and logits of 200 classes."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.loss = nn.Embedding(16, 8), nn.Linear(8, 200), loss
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x), target)


def tiles_of(loss: str, mesh: DeviceMesh, **options: Any) -> tuple[int, int]:
    """(losses, MLPs) that run by tiles; gradients are those of the model as it is."""
    model = Model(LOSSES[loss]).double()
    plain = copy.deepcopy(model)
    autosp.parallelize(model, mesh, **options)
    model(IDS, TARGET).backward()
    plain(IDS, TARGET).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    return counted(model)


def counted(model: Any) -> tuple[int, int]:
    program = forward_of(model).last  # type: ignore[union-attr]
    found = [
        (region is program.root)
        for _, region in program.root.walk()
        for node in region.graph.nodes
        if isinstance(node.target, Tile)
    ]
    return found.count(True), found.count(False)


@pytest.mark.parametrize("checkpoint", ["none", "auto"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_runs_its_projection_twice_is_tiled_where_the_step_does_not_fit(
    loss: str, checkpoint: str, mesh: DeviceMesh
) -> None:
    free = int(loss in ONE_SUM)
    fits = tiles_of(loss, mesh, checkpoint=checkpoint, memory_budget=LARGE)
    assert fits == (free, 0)
    losses, mlps = tiles_of(loss, mesh, checkpoint=checkpoint, memory_budget=1)
    assert (losses, mlps) == (1, 2 if checkpoint == "auto" else 0)


@pytest.mark.parametrize("loss", ["z", "plain"])
def test_where_no_memory_is_known_large_losses_are_tiled(loss: str, mesh: DeviceMesh) -> None:
    assert tiles_of(loss, mesh) == (1, 0)


def test_the_border_is_where_the_untiled_step_fits(mesh: DeviceMesh) -> None:
    """State and what is kept: 2,136 + 2 x 1,096 parameters with gradients and moments, in fp64,
    and at the end of forward at least logits, twice, of 24 tokens.
    """
    least = (16 * 8 + 9 * 200 + 2 * (9 * 64 + 65 * 8)) * 24 + 2 * 24 * 200 * 8
    low, high = 0, 16 * least
    while high - low > least // 100:
        middle = (low + high) // 2
        budget = middle or 1
        if tiles_of("z", mesh, checkpoint="none", memory_budget=budget)[0]:
            low = middle
        else:
            high = middle
    assert least <= high <= 3 * least


def test_mlps_are_tiled_where_all_of_them_runs_again(mesh: DeviceMesh) -> None:
    assert tiles_of("plain", mesh, checkpoint="full") == (1, 2)
    assert tiles_of("plain", mesh, checkpoint="none") == (1, 0)


def test_fp16_is_scaled_so_that_its_losses_run_twice(mesh: DeviceMesh) -> None:
    with torch.autocast("cpu", torch.float16):
        for budget, want in ((LARGE, 0), (1, 1)):
            model = Model(LOSSES["plain"])
            autosp.parallelize(model, mesh, checkpoint="none", memory_budget=budget)
            model(IDS, TARGET)
            assert counted(model)[0] == want


def test_a_loss_function_knows_what_fits_if_it_is_told(mesh: DeviceMesh) -> None:
    """What else is on the device is not known to it."""
    for options, want in (({}, 1), ({"memory_budget": LARGE}, 0), ({"memory_budget": 1}, 1)):
        model = autosp.parallelize(Model(lambda x, _: x), mesh)
        loss = autosp.parallelize(z_loss, mesh, **options)
        loss(model(IDS, TARGET), TARGET).backward()
        assert counted(loss)[0] == want


def test_a_function_does_not_know_what_else_is_on_a_gpu(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model does: it counts its own state and what its layers keep."""
    properties = SimpleNamespace(total_memory=LARGE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    model = autosp.parallelize(Model(z_loss), mesh, tile="none")
    model(IDS, TARGET)
    program, gpu = forward_of(model).last, SimpleNamespace(device_type="cuda")
    for live, want in ((model, True), (None, None)):
        given = program.root, program.captured, live, gpu, Options(), Policy()
        assert step_fits(*given) is want


def test_a_budget_that_nothing_asks_for_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UsageError, match='memory_budget goes with checkpoint="auto", tile="auto"'):
        autosp.parallelize(Model(z_loss), mesh, checkpoint="none", tile="none", memory_budget=LARGE)
