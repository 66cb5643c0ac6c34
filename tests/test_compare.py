"""The comparison must be able to fail: every kind of difference is made once and must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests import models
from tests.compare import (
    Collectives,
    Outcome,
    compare,
    difference,
    named_tensors,
    one_device,
)
from tests.model_t import ModelT, TConfig, ids_of_t, labels_with_targets


def outcome_of_t() -> Outcome:
    ids = ids_of_t()
    return one_device(ModelT, [{"ids": ids, "labels": ids}])


def test_model_t_has_the_loss_and_gradient_norm_of_field_cases() -> None:
    outcome = outcome_of_t()
    squares = [grad.pow(2).sum() for grad in outcome.grads.values() if grad is not None]
    assert outcome.loss is not None
    assert round(outcome.loss.item(), 6) == 4.252752
    assert round(torch.stack(squares).sum().sqrt().item(), 6) == 5.585010


def test_equal_outcomes_pass() -> None:
    compare(outcome_of_t(), outcome_of_t(), rtol=0)


def _with_grad(outcome: Outcome, change: Callable[[Tensor], Tensor | None]) -> Outcome:
    name = "blocks.1.attention.k.weight"
    grad = outcome.grads[name]
    assert grad is not None
    return replace(outcome, grads={**outcome.grads, name: change(grad)})


def _with_logits(outcome: Outcome, change: Callable[[Tensor], Tensor]) -> Outcome:
    return replace(
        outcome, outputs={**outcome.outputs, "logits": change(outcome.outputs["logits"])}
    )


def _with_loss(outcome: Outcome, change: Callable[[Tensor], Tensor]) -> Outcome:
    assert outcome.loss is not None
    return replace(outcome, loss=change(outcome.loss))


def _one_entry(value: Tensor, step: float) -> Tensor:
    changed = value.clone()
    changed.view(-1)[7] += step
    return changed


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda o: _with_grad(o, lambda g: 2 * g), "gradient of blocks.1.attention.k.weight: off"),
        (lambda o: _with_grad(o, lambda g: _one_entry(g, 1e-9)), "gradient of blocks.1.attention"),
        (lambda o: _with_grad(o, lambda g: None), "None where one device has a gradient"),
        (lambda o: _with_grad(o, torch.zeros_like), "off by 1.00e[+]00"),
        (lambda o: _with_grad(o, lambda g: g * torch.nan), "512 NaN instead of 0"),
        (lambda o: _with_logits(o, lambda x: x.flip(1)), "output logits: off"),
        (lambda o: _with_logits(o, lambda x: x[:, :8]), r"\[1, 8, 64\] instead of torch.float64"),
        (lambda o: _with_logits(o, lambda x: x.float()), "torch.float32"),
        (lambda o: _with_loss(o, lambda x: x * (1 + 1e-9)), "loss: off by 1.00e-09"),
        (lambda o: replace(o, structure="tensor"), "the output has structure tensor"),
        (lambda o: replace(o, grads={}), "parameters differ"),
    ],
)
def test_every_kind_of_difference_is_found_and_named(
    fault: Callable[[Outcome], Outcome], named: str
) -> None:
    with pytest.raises(AssertionError, match=named):
        compare(fault(outcome_of_t()), outcome_of_t())


def test_gradient_where_one_device_has_none_must_be_zero() -> None:
    want = _with_grad(outcome_of_t(), lambda grad: None)
    compare(_with_grad(outcome_of_t(), torch.zeros_like), want)
    with pytest.raises(AssertionError, match="where one device has no gradient"):
        compare(outcome_of_t(), want)


def test_nan_meets_nan_only() -> None:
    a = torch.tensor([1.0, torch.nan, torch.inf])
    assert difference(a, a.clone())[0] == 0
    assert difference(a, a.nan_to_num())[0] == torch.inf


def test_dp_batches_give_the_mean_gradient_and_the_own_loss() -> None:
    ids = ids_of_t(2)
    batches = [{"ids": row[None], "labels": row[None]} for row in ids]
    both = one_device(ModelT, [{"ids": ids, "labels": ids}])
    split = [one_device(ModelT, batches, mine) for mine in range(2)]
    compare(replace(split[1], loss=both.loss, outputs=both.outputs), both)
    assert split[0].loss is not None and split[1].loss is not None and both.loss is not None
    torch.testing.assert_close((split[0].loss + split[1].loss) / 2, both.loss)


def test_uneven_labels_see_a_mean_of_means() -> None:
    ids = models.random_ids()
    labels = models.uneven_labels(ids)
    counts = {
        sp: [int((part != -100).sum()) for part in _shifted(labels).chunk(sp, 1)] for sp in (2, 4)
    }
    assert counts == {2: [3, 6], 4: [2, 1, 6, 0]}


def _shifted(labels: Tensor) -> Tensor:
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def test_labels_with_targets_keeps_the_slots_named() -> None:
    ids = ids_of_t(2)
    shifted = _shifted(labels_with_targets(ids, [(7, 10), (14,)]))
    assert (shifted != -100).nonzero().tolist() == [[0, 7], [0, 10], [1, 14]]


@pytest.mark.parametrize("attention", ["matmul", "einsum", "tril"])
def test_ways_to_write_attention_agree(attention: str) -> None:
    ids = ids_of_t()
    got = one_device(lambda: ModelT(TConfig(attention=(attention,))), [{"ids": ids, "labels": ids}])
    compare(got, outcome_of_t())


@pytest.mark.parametrize("name", [*models.HANDWRITTEN, "t"])
def test_reference_runs_and_every_parameter_gets_a_gradient(name: str) -> None:
    model = models.build_t() if name == "t" else models.build_handwritten(name)
    ids = models.random_ids()
    out = model(ids) if name.startswith("titan") else model(ids, ids)
    sum(value.pow(2).sum() for _, value in named_tensors(out)).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_nothing_is_sent_without_a_collective() -> None:
    with Collectives() as sent:
        torch.ones(3).sum()
    assert sent.total() == 0
