"""The ways to call a model: modes, shapes, precision, embeddings, checkpoints inside, no split at
all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests import models
from tests.compare import (
    Collectives,
    assert_same_as_one_device,
    compare,
    difference,
    gather,
    one_device,
    whole,
)
from tests.model_t import ModelT, TConfig, TOutput, ids_of_t
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import batches_of_t, logged, split
from tests.upcasts import upcasts_stay_in_fp64


def step_like_one_device(model: nn.Module, build: Callable[[], nn.Module], batch: dict) -> None:
    """One step of a model that is split already, against a new one on one device."""
    import autosp_dtensor as autosp

    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    autosp.sync_gradients(model)
    compare(gather(model, {}, out, out.loss), one_device(build, [batch]))


# Modes.


class WithDropout(ModelT):
    """Dropout on the hidden states, which evaluation must leave alone."""

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        return F.dropout(super().hidden(x, position_ids, mask), 0.5, self.training)


def evaluated(rank: Rank, mode: str) -> None:
    """Evaluation before, between and after training steps; logits and loss are those of one
    device."""
    model, reference = split(WithDropout(), rank.mesh(sp=2)), WithDropout()
    without = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]
    batch = batches_of_t(1)[0]
    for _ in range(2):
        model.eval()
        reference.eval()
        with without():
            got, want = model(**batch), reference(**batch)
            assert not got.loss.requires_grad
            assert isinstance(got.logits, DTensor)
            torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)
            torch.testing.assert_close(whole(got.logits), want.logits, rtol=1e-12, atol=1e-12)
        model.train()
        trained = model(**batch).loss
        trained.backward()
        assert not torch.equal(trained.detach(), want.loss), "dropout is off in training"


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_between_training_steps(mode: str) -> None:
    run_on_ranks(evaluated, mode, n=2)


def with_autocast(rank: Rank) -> list[float]:
    """Gradient error against fp64 of autocast on one device, and of autocast on the ranks."""
    import autosp_dtensor as autosp

    batch = batches_of_t(1)[0]
    exact = one_device(ModelT, [batch])
    errors = []
    for model in (ModelT().float(), split(ModelT().float(), rank.mesh(sp=2))):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**batch)
        assert out.logits.dtype == torch.bfloat16
        out.loss.backward()
        if errors:
            autosp.sync_gradients(model)
        squares = sum(
            float((p.grad.double() - exact.grads[name]).pow(2).sum())
            for name, p in model.named_parameters()
        )
        errors.append(squares**0.5)
    return errors


def test_autocast_is_off_by_at_most_twice_what_it_is_on_one_device() -> None:
    for alone, on_ranks in run_on_ranks(with_autocast, n=2):
        assert 0 < on_ranks <= 2 * alone


# Shapes and forms.

SHAPES = [(2, 16), (1, 16), (3, 8), (2, 13), (2, 16), (1, 9), (3, 8), (2, 13)]


def shapes_change(rank: Rank) -> list[str]:
    model = split(ModelT(), rank.mesh(sp=rank.world_size))
    with logged() as lines:
        for rows, length in SHAPES:
            ids = ids_of_t(rows, length)
            batch = {"ids": ids, "labels": models.uneven_labels(ids)}
            step_like_one_device(model, ModelT, batch)
    return lines


@pytest.mark.parametrize("n", [2, 4])
def test_each_new_shape_is_traced_once_and_logged_in_one_line(n: int) -> None:
    for lines in run_on_ranks(shapes_change, n=n):
        assert len(lines) == len(set(SHAPES)), lines
        assert all("\n" not in line for line in lines)


def positional_and_keyword(rank: Rank) -> None:
    ids = models.random_ids()
    labels = models.uneven_labels(ids)
    model = split(ModelT(), rank.mesh(sp=2))
    want = ModelT()(ids, labels)
    for out in (
        model(ids, labels),
        model(ids, labels=labels),
        model(ids=ids, labels=labels),
        model(labels=labels, ids=ids),
        model(ids, labels, None),
        model(*[ids], **{"labels": labels}),
    ):
        assert type(out) is TOutput
        torch.testing.assert_close(out.loss, want.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(whole(out.logits), want.logits, rtol=1e-12, atol=1e-12)
    assert model(ids).loss is None


def test_positional_and_keyword_arguments() -> None:
    run_on_ranks(positional_and_keyword, n=2)


def embeddings_in(rank: Rank, n: int) -> None:
    """`inputs_embeds` that asks for a gradient gets the one of one device, on every rank."""
    build = partial(models.build_transformers, "llama")
    build()
    ids = models.random_ids()
    embeds = torch.randn(2, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with upcasts_stay_in_fp64():
        assert_same_as_one_device(
            rank,
            build,
            {"inputs_embeds": embeds.requires_grad_(), "labels": models.uneven_labels(ids)},
            rank.mesh(sp=n),
            sharded=["logits"],
        )


@pytest.mark.parametrize("n", [2, 4])
def test_inputs_embeds_get_their_gradient(n: int) -> None:
    run_on_ranks(embeddings_in, n, n=n)


def embeddings_from_outside(rank: Rank) -> None:
    """Embeddings made by a module outside the split model: its weight is trained as well."""
    import autosp_dtensor as autosp

    ids = models.random_ids()
    labels = models.uneven_labels(ids)
    grads = []
    for on_ranks in (False, True):
        table = nn.Embedding(64, 32).double()
        models.fill(table)
        model = models.build_transformers("qwen3")
        if on_ranks:
            model = split(model, rank.mesh(sp=2))
        model(inputs_embeds=table(ids), labels=labels).loss.backward()
        if on_ranks:
            autosp.sync_gradients(model)
        grads.append((table.weight.grad, model.lm_head.weight.grad))
    for got, want in zip(grads[1], grads[0], strict=True):
        assert difference(got, want)[0] < 1e-6  # transformers computes norms in fp32


def test_module_before_the_split_model_gets_its_gradient() -> None:
    run_on_ranks(embeddings_from_outside, n=2)


def two_calls(rank: Rank, order: str) -> None:
    """Two calls before one backward (as in DPO or contrastive losses), and two backwards in the
    other order."""
    import autosp_dtensor as autosp

    first, second = batches_of_t(2)
    model, reference = split(ModelT(), rank.mesh(sp=2)), ModelT()
    for each in (model, reference):
        a, b = each(**first).loss, each(**second).loss
        if order == "one_backward":
            (a * b + a.exp() / 100).backward()
        else:
            b.backward()
            a.backward()
    autosp.sync_gradients(model)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        error, text = difference(p.grad, q.grad)
        assert error < 1e-10, f"{name}: {text}"


@pytest.mark.parametrize("order", ["one_backward", "last_first"])
def test_two_calls_before_backward(order: str) -> None:
    run_on_ranks(two_calls, order, n=2)


def gradients_asked_for(rank: Rank) -> None:
    """`torch.autograd.grad` instead of `backward`: the mean over sp is the gradient."""
    batch = batches_of_t(1)[0]
    model, reference = split(ModelT(), rank.mesh(sp=2)), ModelT()
    got = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    want = torch.autograd.grad(reference(**batch).loss, list(reference.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.distributed.all_reduce(a)
        assert difference(a / 2, b)[0] < 1e-10


def test_autograd_grad_gives_shares_whose_mean_is_the_gradient() -> None:
    run_on_ranks(gradients_asked_for, n=2)


class Looped(ModelT):
    """One block called three times, as in universal transformers."""

    def __init__(self) -> None:
        super().__init__(TConfig(layers=1))

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        for _ in range(3):
            x = super().hidden(x, position_ids, mask)
        return x


def looped(rank: Rank) -> None:
    assert_same_as_one_device(rank, Looped, batches_of_t(1)[0], rank.mesh(sp=2), sharded=["logits"])


def test_block_called_three_times_gets_the_sum_of_its_gradients() -> None:
    run_on_ranks(looped, n=2)


# torch.utils.checkpoint inside.


def checkpoint_inside(rank: Rank, which: str) -> None:
    build: Callable[[], nn.Module]
    batch: dict[str, Any]
    if which == "hf":

        def build() -> nn.Module:
            model = models.build_transformers("llama")
            model.gradient_checkpointing_enable({"use_reentrant": False})
            return model

        batch = models.batch_transformers("plain")
        build()
        with upcasts_stay_in_fp64():
            assert_same_as_one_device(rank, build, batch, rank.mesh(sp=2))
        return
    layers = {"one": (1,), "all": (0, 1)}[which]
    build = partial(ModelT, TConfig(checkpointed=layers))
    assert_same_as_one_device(rank, build, batches_of_t(1)[0], rank.mesh(sp=2))


@pytest.mark.parametrize("which", ["one", "all", "hf"])
def test_checkpoint_inside_the_model(which: str) -> None:
    run_on_ranks(checkpoint_inside, which, n=2)


# sp = 1.


def alone(rank: Rank) -> int:
    mesh = rank.mesh(dp=2, sp=1)
    model, reference = split(ModelT(), mesh), ModelT()
    batch = batches_of_t(1)[0]
    with Collectives() as sent:
        for each in (model, reference):
            for _ in range(2):
                each(**batch).loss.backward()
        out = model(**batch)
    assert type(out.loss) is Tensor
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    return sent.total()


def test_sp_of_one_sends_nothing_and_is_bit_equal() -> None:
    assert run_on_ranks(alone, n=2) == [0, 0]


def sent_in_a_step(rank: Rank) -> dict[str, int]:
    """What a cached step sends: 2 layers, forward and backward."""
    model = split(ModelT(), rank.mesh(sp=2))
    batch = batches_of_t(1)[0]
    model(**batch).loss.backward()
    with Collectives() as sent:
        model(**batch).loss.backward()
    return {"exchanges": sent.exchanges(), **sent.counts}


def test_a_step_sends_no_more_than_hand_written_ulysses() -> None:
    """Of each layer: q, k, v in one exchange and the output in one; the same again backward."""
    for counts in run_on_ranks(sent_in_a_step, n=2):
        assert counts["exchanges"] <= 2 * 2 * 2, counts
        others = sum(n for name, n in counts.items() if name != "exchanges") - counts["exchanges"]
        # The sum of the loss, its gradient, and the comparison of calls.
        assert others <= 3, counts


# Functions.


def pure(rank: Rank) -> None:
    """A function of (parameters, batch), as with `torch.func.functional_call`."""
    template = ModelT()
    batch = batches_of_t(1)[0]

    def loss_of(parameters: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(template, parameters, (), batch).loss

    def parameters() -> dict[str, Tensor]:
        return {k: v.detach().clone().requires_grad_() for k, v in template.named_parameters()}

    plain, shared = parameters(), parameters()
    want = loss_of(plain, batch)
    want.backward()
    got = split(loss_of, rank.mesh(sp=2))(shared, batch)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for name, value in shared.items():
        # Plain inputs that ask for a gradient get the true one.
        error, text = difference(value.grad, plain[name].grad)
        assert error < 1e-10, f"{name}: {text}"


def test_pure_function_of_parameters_and_batch() -> None:
    run_on_ranks(pure, n=2)


def function_is_new(rank: Rank) -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    made = split(loss, rank.mesh(sp=2))
    assert callable(made) and made is not loss
    assert made.__name__ == "loss"
    logits = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = models.random_ids() % 8
    torch.testing.assert_close(made(logits, targets), loss(logits, targets), rtol=1e-12, atol=0)


def test_function_gives_a_new_callable_that_takes_plain_tensors_too() -> None:
    run_on_ranks(function_is_new, n=2)
