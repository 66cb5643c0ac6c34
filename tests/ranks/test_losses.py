"""Losses: right or refused, never wrong. Inside the model and outside it, whatever ranks the
targets are on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests import models
from tests.compare import assert_same_as_one_device
from tests.losses import (
    binary,
    class_weights,
    dpo,
    entropy_bonus,
    gathered,
    label_smoothing,
    last_token,
    masked_select,
    mean,
    mean_over_channels,
    mean_squares,
    nll,
    none_then_mean,
    none_times_weights,
    num_items,
    sequence_mean,
    smoothing_and_weights,
    soft_targets,
    spread,
    total,
    worst_token,
    z_loss,
    z_loss_of_all,
)
from tests.model_t import IGNORED, ModelT
from tests.pool import Rank, run_on_ranks

CROSS_ENTROPIES = [
    mean,
    mean_over_channels,
    total,
    none_then_mean,
    none_times_weights,
    class_weights,
    label_smoothing,
    smoothing_and_weights,
    num_items,
    nll,
    gathered,
    z_loss,
]
OTHERS = [
    z_loss_of_all,
    sequence_mean,
    dpo,
    mean_squares,
    binary,
    soft_targets,
    entropy_bonus,
    last_token,
]
RIGHT_OR_REFUSED = [masked_select, worst_token, spread]

# Which slots have a target, for 16 tokens and two rows.
PATTERNS = {
    "uneven": [(0, 7, 8, 9, 10, 11), (2, 9, 11)],
    "prompt_of_9": [range(8, 15), range(8, 15)],
    "one_target": [(14,), ()],
    "no_target": [(), ()],
}


class WithLoss(nn.Module):
    """The loss inside the model."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = ModelT()
        self.loss = loss

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids).logits
        return self.loss(logits, targets), logits


def targets_of(pattern: str, ids: Tensor) -> Tensor:
    targets = torch.full_like(ids, IGNORED)
    for row, slots in enumerate(PATTERNS[pattern]):
        for slot in slots:
            targets[row, slot] = ids[row, slot + 1]
    return targets


def loss_outside(rank: Rank, loss: Callable[..., Tensor], pattern: str, **options: Any) -> None:
    ids = models.random_ids()
    assert_same_as_one_device(
        rank,
        ModelT,
        {"ids": ids, "targets": targets_of(pattern, ids)},
        rank.mesh(sp=rank.world_size),
        loss=loss,
        sharded=["logits"],
        **options,
    )


def loss_inside(rank: Rank, loss: Callable[..., Tensor], pattern: str, **options: Any) -> None:
    ids = models.random_ids()
    assert_same_as_one_device(
        rank,
        partial(WithLoss, loss),
        {"ids": ids, "targets": targets_of(pattern, ids)},
        rank.mesh(sp=rank.world_size),
        sharded=["1"],
        **options,
    )


def right_or_refused(rank: Rank, loss: Callable[..., Tensor], inside: bool) -> str:
    import autosp_dtensor as autosp

    try:
        (loss_inside if inside else loss_outside)(rank, loss, "uneven")
    except (autosp.CaptureError, autosp.PlacementError) as error:
        return str(error)
    return ""


def name_of(loss: Callable[..., Tensor]) -> str:
    return loss.__name__


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("loss", CROSS_ENTROPIES, ids=name_of)
def test_loss_outside_the_model(loss: Callable[..., Tensor], pattern: str) -> None:
    """On four ranks: `prompt_of_9` leaves the first two without a target, `one_target` all but the
    last."""
    run_on_ranks(loss_outside, loss, pattern, n=4)


@pytest.mark.parametrize("loss", OTHERS, ids=name_of)
def test_loss_over_whole_rows_outside_the_model(loss: Callable[..., Tensor]) -> None:
    run_on_ranks(loss_outside, loss, "uneven", n=4)


@pytest.mark.parametrize("loss", [*CROSS_ENTROPIES, *OTHERS], ids=name_of)
def test_loss_inside_the_model(loss: Callable[..., Tensor]) -> None:
    run_on_ranks(loss_inside, loss, "uneven", n=2)


def by_tiles(rank: Rank, loss: Callable[..., Tensor], inside: bool) -> None:
    (loss_inside if inside else loss_outside)(rank, loss, "uneven", tile=3)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("loss", [*CROSS_ENTROPIES, *OTHERS], ids=name_of)
def test_loss_by_tiles(loss: Callable[..., Tensor], inside: bool) -> None:
    """A loss outside is given logits that are not made; read after backward, they are right."""
    run_on_ranks(by_tiles, loss, inside, n=2)


def tiled_loss_under_fsdp(rank: Rank, reshard: bool, blocks: bool, make: Callable[..., Any]) -> Any:
    """Two steps; logits are read before the first backward (or never), after the second."""
    import autosp_dtensor as autosp
    from autosp_dtensor.errors import UsageError

    mesh = rank.mesh(dp=1, sp=2)
    ids = models.random_ids()
    targets = targets_of("uneven", ids)
    whole, split = ModelT(), ModelT()
    over = autosp.fsdp_mesh(mesh)
    for block in split.blocks if blocks else ():
        fully_shard(block, mesh=over, reshard_after_forward=reshard)
    split = fully_shard(autosp.parallelize(split, mesh, tile=3), mesh=over,
                        reshard_after_forward=reshard)  # fmt: skip
    loss = autosp.parallelize(make, mesh, tile=3)
    # Many parameters at a time, as by default on a GPU.
    steps = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in (whole, split)]
    pending = []
    for step in range(2):
        want, got = whole(ids).logits, split(ids).logits
        pending.append(got.pending)
        (make(want, targets)).backward()
        total = loss(got, targets)
        pending.append(got.pending)
        total.backward()
        torch.testing.assert_close(got.full_tensor(), want)
        held = dict(whole.named_parameters())
        for name, p in split.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), held[name].grad, msg=f"{step} {name}")
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    late = split(ids).logits
    loss(split(ids).logits, targets).backward()
    steps[1].step()
    for read in (lambda: loss(late, targets), late.detach):
        with pytest.raises(UsageError, match="has changed"):
            read()
    return pending


@pytest.mark.parametrize("make", [CROSS_ENTROPIES[0], dpo], ids=name_of)
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "root alone"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_loss_outside_of_a_sharded_model_by_tiles(
    reshard: bool, blocks: bool, make: Callable[..., Tensor]
) -> None:
    """Backward reaches the model past its own results; FSDP2 gathers and reduces all the same."""
    for pending in run_on_ranks(tiled_loss_under_fsdp, reshard, blocks, make, n=2):
        assert pending == [True] * 4


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("loss", RIGHT_OR_REFUSED, ids=name_of)
def test_loss_that_is_no_sum_over_tokens_is_right_or_refused(
    loss: Callable[..., Tensor], inside: bool
) -> None:
    texts = run_on_ranks(right_or_refused, loss, inside, n=2)
    assert len(set(texts)) == 1, texts
    if texts[0]:
        assert "  node  losses.py:" in texts[0]


def per_token_losses(rank: Rank, n: int) -> None:
    """`reduction="none"` handed to the user: values in order, and a gradient through what the user
    does with them."""
    import autosp_dtensor as autosp

    ids = models.random_ids()
    targets = targets_of("uneven", ids)
    coefficients = torch.linspace(1, 2, ids.numel(), dtype=torch.float64)

    def each(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

    plain = ModelT()
    want = each(plain(ids).logits, targets)
    (want * coefficients).sum().backward()

    mesh = rank.mesh(sp=n)
    split = autosp.parallelize(ModelT(), mesh)
    got = autosp.parallelize(each, mesh)(split(ids).logits, targets)
    got_whole = got.full_tensor()
    (got_whole * coefficients).sum().backward()
    autosp.sync_gradients(split)
    torch.testing.assert_close(got_whole, want, rtol=1e-12, atol=1e-12)
    for (name, a), b in zip(split.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10, msg=name)


def test_losses_per_token_come_in_order_and_carry_gradients() -> None:
    run_on_ranks(per_token_losses, 2, n=2)


def tokenwise_result(rank: Rank, by_hand: bool) -> None:
    """A loss for each token leaves the program as a DTensor: its factors at the border stay."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(sp=2)
    ids = models.random_ids()
    whole, split = ModelT(), autosp.parallelize(ModelT(), mesh, tile=3)
    each = autosp.parallelize(token_losses, mesh, tile=3)
    logits = split(ids).logits
    if by_hand:
        logits.detach()  # made before: an ordinary DTensor to the function
    each(logits, ids).square().sum().full_tensor().backward()
    autosp.sync_gradients(split)
    token_losses(whole(ids).logits, ids).square().sum().backward()
    for (name, a), b in zip(split.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")


@pytest.mark.parametrize("by_hand", [True, False], ids=["made", "not made"])
def test_loss_for_each_token_of_logits_that_are_not_made(by_hand: bool) -> None:
    run_on_ranks(tokenwise_result, by_hand, n=2)
