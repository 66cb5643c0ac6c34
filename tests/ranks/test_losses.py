"""Losses: right or refused, never wrong. Inside the model and outside it, whatever ranks the
targets are on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.compare import assert_same_as_one_device
from tests.model_t import IGNORED, VOCABULARY, ModelT
from tests.pool import Rank, run_on_ranks

WEIGHT = torch.linspace(0.5, 9, VOCABULARY, dtype=torch.float64)
NUM_ITEMS = 20


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def mean_over_channels(logits: Tensor, targets: Tensor) -> Tensor:
    """Classes in dimension 1, as torch's own documentation has it."""
    return F.cross_entropy(logits.transpose(1, 2), targets)


def total(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), reduction="sum")


def none_then_mean(logits: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each.sum() / (targets != IGNORED).sum()


def none_times_weights(logits: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    place = torch.linspace(1, 2, targets.shape[1], dtype=logits.dtype)
    return (each.view(targets.shape) * place).sum()


def class_weights(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=WEIGHT)


def label_smoothing(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def smoothing_and_weights(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), weight=WEIGHT, label_smoothing=0.1
    )


def num_items(logits: Tensor, targets: Tensor) -> Tensor:
    """The count of the whole step comes from the trainer."""
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return summed / NUM_ITEMS


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten())


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    valid = targets != IGNORED
    z = logits.logsumexp(-1).pow(2)
    return mean(logits, targets) + 1e-2 * (z * valid).sum() / valid.sum()


def z_loss_of_all(logits: Tensor, targets: Tensor) -> Tensor:
    return total(logits, targets) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def gathered(logits: Tensor, targets: Tensor) -> Tensor:
    valid = targets != IGNORED
    picked = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None]).squeeze(-1)
    return -torch.where(valid, picked, 0).sum() / valid.sum()


def masked_select(logits: Tensor, targets: Tensor) -> Tensor:
    """The number of selected tokens depends on data: it cannot be known before the call."""
    valid = targets != IGNORED
    return F.cross_entropy(logits[valid], targets[valid])


def sequence_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Every row weighs the same, however many targets it has."""
    valid = targets != IGNORED
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each.sum(1) / valid.sum(1)).mean()


def dpo(logits: Tensor, targets: Tensor) -> Tensor:
    """Row 0 was chosen, row 1 rejected."""
    scores = -F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
    return -F.logsigmoid(0.1 * (scores[0] - scores[1]))


def mean_squares(logits: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(logits, F.one_hot(targets.clamp_min(0), VOCABULARY).to(logits.dtype))


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    hot = F.one_hot(targets.clamp_min(0), VOCABULARY).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, hot)


def soft_targets(logits: Tensor, targets: Tensor) -> Tensor:
    hot = F.one_hot(targets.clamp_min(0), VOCABULARY).to(logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), (hot * 0.8 + 0.2 / VOCABULARY).flatten(0, 1))


def entropy_bonus(logits: Tensor, targets: Tensor) -> Tensor:
    probabilities = logits.softmax(-1)
    return mean(logits, targets) + 0.1 * (probabilities * probabilities.log()).sum(-1).mean()


def worst_token(logits: Tensor, targets: Tensor) -> Tensor:
    """The largest token loss: a maximum over all ranks."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").max()


def spread(logits: Tensor, targets: Tensor) -> Tensor:
    """A standard deviation over tokens is not a sum of what ranks have."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").std()


def last_token(logits: Tensor, targets: Tensor) -> Tensor:
    """A reward head reads one token, which one rank holds."""
    return logits[:, -1].logsumexp(-1).sum() + logits[:, 3].pow(2).sum()


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


def loss_outside(rank: Rank, loss: Callable[..., Tensor], pattern: str) -> None:
    ids = models.random_ids()
    assert_same_as_one_device(
        rank,
        ModelT,
        {"ids": ids, "targets": targets_of(pattern, ids)},
        rank.mesh(sp=rank.world_size),
        loss=loss,
        sharded=["logits"],
    )


def loss_inside(rank: Rank, loss: Callable[..., Tensor], pattern: str) -> None:
    ids = models.random_ids()
    assert_same_as_one_device(
        rank,
        partial(WithLoss, loss),
        {"ids": ids, "targets": targets_of(pattern, ids)},
        rank.mesh(sp=rank.world_size),
        sharded=["1"],
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


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("loss", RIGHT_OR_REFUSED, ids=name_of)
def test_loss_that_is_no_sum_over_tokens_is_right_or_refused(
    loss: Callable[..., Tensor], inside: bool
) -> None:
    texts = run_on_ranks(right_or_refused, loss, inside, n=2)
    assert len(set(texts)) == 1, texts
    if texts[0]:
        assert "test_losses.py:" in texts[0]


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
