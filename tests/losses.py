"""Losses over tokens as people write them; each takes logits [B, S, V] and targets [B, S]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model_t import IGNORED, VOCABULARY

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


def token_sum(logits: Tensor, targets: Tensor, num_items: Tensor | float) -> Tensor:
    """Divided by a count that the caller gives: that of all micro-batches of a step."""
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return summed / num_items
