"""Cross entropy tile by tile: the loss and gradients of all logits at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.place import tiled_loss
from tests.simulate import assert_program_equals_whole, lowered

IDS = torch.randint(16, (2, 13), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(11, (2, 13), generator=torch.Generator().manual_seed(2))
TARGET[0, :7] = -100
TARGET[1, 9:] = 3
WEIGHT = torch.linspace(0.5, 2.0, 11, dtype=torch.float64)
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True, params=[1, 5, 100])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one token, of five, of all."""
    monkeypatch.setattr(tiled_loss, "LEAST_BYTES", 0)
    monkeypatch.setattr(tiled_loss, "TILE_BYTES", 4 * 11 * request.param)


def flat(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return x.flatten(0, 1), t.flatten()


LOSSES: dict[str, Loss] = {
    "plain": lambda x, t: F.cross_entropy(*flat(x, t)),
    "after view": lambda x, t: F.cross_entropy(x.view(-1, 11), t.reshape(-1)),
    "sum": lambda x, t: F.cross_entropy(*flat(x, t), reduction="sum"),
    "soft cap": lambda x, t: F.cross_entropy(*flat(3 * torch.tanh(x / 3), t)),
    "cast, scale, view": lambda x, t: F.cross_entropy((x.double() * 0.7).view(-1, 11), t.view(-1)),
    "other index ignored": lambda x, t: F.cross_entropy(*flat(x, t.clamp(min=0)), ignore_index=3),
    "smoothing": lambda x, t: F.cross_entropy(*flat(x, t), label_smoothing=0.1),
    "weights": lambda x, t: F.cross_entropy(*flat(x, t), WEIGHT, label_smoothing=0.2),
    "shifted inside": lambda x, t: F.cross_entropy(
        x[:, :-1].reshape(-1, 11).double(), t[:, 1:].reshape(-1)
    ),
    "with z-loss": lambda x, t: (
        F.cross_entropy(*flat(x, t)) + 0.1 * x.logsumexp(-1).square().mean()
    ),
    "divided by a count": lambda x, t: F.cross_entropy(*flat(x, t), reduction="sum") / 5,
    "logits are used again": lambda x, t: F.cross_entropy(*flat(x, t)) + x.double().mean(),
}


def model(loss: Loss) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(16, 8, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(11, 8, generator=generator, dtype=torch.float64).requires_grad_()

    def call(ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(F.embedding(ids, table), head)
        return loss(logits, target), logits

    return call


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_by_tiles_is_that_of_one_device(name: str, n: int) -> None:
    program = assert_program_equals_whole(model(LOSSES[name]), (IDS, TARGET), n)
    assert len(program.named("tiled_cross_entropy")) == 1 and not program.named("cross_entropy")


def test_what_is_done_to_logits_is_done_in_the_tiles() -> None:
    program = lowered(model(LOSSES["soft cap"]), (IDS, TARGET), 2)
    assert not program.named("tanh")
    (node,) = program.named("tiled_cross_entropy")
    assert len(node.kwargs["steps"]) == 3
    kept = lowered(model(lambda x, t: F.cross_entropy(*flat(x.tanh(), t)) + x.tanh().sum()),
                   (IDS, TARGET), 2)  # fmt: skip
    assert kept.named("tanh")  # what is used elsewhere stays


def test_probabilities_and_small_logits_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = lambda x, t: F.cross_entropy(x.flatten(0, 1), x.detach().flatten(0, 1).softmax(-1))  # noqa: E731
    assert not lowered(model(soft), (IDS, TARGET), 2).named("tiled_cross_entropy")
    monkeypatch.setattr(tiled_loss, "LEAST_BYTES", 2 * 13 * 11 * 4)
    assert lowered(model(LOSSES["plain"]), (IDS, TARGET), 1).named("tiled_cross_entropy")
    assert not lowered(model(LOSSES["plain"]), (IDS, TARGET), 2).named("tiled_cross_entropy")


def test_half_precision_logits_are_all_that_is_kept() -> None:
    """fp32 copies and log-probabilities exist for a tile alone."""
    logits = torch.randn(40, 11, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(11, (40,))
    saved: list[Tensor] = []
    step = tiled_loss.Step(torch.Tensor.float, (), (), ())
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks:
        loss = tiled_loss.tiled_cross_entropy(logits, target, steps=(step,), reduction="sum")
    assert loss.dtype == torch.float32
    assert {t.dtype for t in saved} == {torch.bfloat16, torch.int64}
    loss.backward()
    (want,) = torch.autograd.grad(F.cross_entropy(logits.float(), target, reduction="sum"), logits)
    torch.testing.assert_close(logits.grad, want)


def test_a_model_without_data_is_traced_and_placed() -> None:
    """The meta device has no autocast to restore."""
    head = torch.randn(11, 8, device="meta")

    def call(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(*flat(F.linear(x, head), target))

    x, target = torch.randn(2, 13, 8, device="meta"), TARGET.to("meta")
    assert lowered(call, (x, target), 2).named("tiled_cross_entropy")
