"""FIELD-CASES.md, under its numbers: gradients and meshes, DTensor, evaluation, adapters,
compilers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests import models
from tests.compare import (
    Collectives,
    assert_same_as_one_device,
    compare,
    dp_index,
    gather,
    one_device,
)
from tests.losses import token_sum
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.pool import Rank, run_on_ranks
from tests.ranks.cases import batch_with, checked, t_on_ranks
from tests.ranks.training import (
    adamw,
    assert_state_close,
    batches_of_t,
    blocks_of,
    equal_on_all_ranks,
    parallelize_then_shard,
    split,
    whole_state,
)

ALL = range(15)


# grad-norm-mesh


def drift(rank: Rank, axes: dict[str, int], with_fsdp: bool) -> None:
    """Five AdamW steps; every rank of the mesh ends with the same bits, and with those of one
    device."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(**axes)
    batches = batches_of_t(axes["dp"])
    reference = models.build_t()
    reference_optimizer = adamw(reference)
    if with_fsdp:
        model = parallelize_then_shard(models.build_t(), mesh)
    else:
        model = split(models.build_t(), mesh)
    optimizer = adamw(model)
    for _ in range(5):
        torch.stack([reference(**batch).loss for batch in batches]).mean().backward()
        model(**batches[dp_index(mesh)]).loss.backward()
        if not with_fsdp:
            autosp.sync_gradients(model)
        for each in (reference_optimizer, optimizer):
            each.step()
            each.zero_grad()
    equal_on_all_ranks(whole_state(model))
    assert_state_close(model, reference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("with_fsdp", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("dp", [1, 2])
def test_fc_013_weights_do_not_drift_apart(dp: int, with_fsdp: bool) -> None:
    run_on_ranks(drift, {"dp": dp, "sp": 2}, with_fsdp, n=2 * dp)


def tied_on_meta(rank: Rank) -> None:
    mesh = rank.mesh(dp=1, sp=2)
    config = TConfig(tied=True)
    reference = ModelT(config)
    with torch.device("meta"):
        model = ModelT(config)
    model = parallelize_then_shard(model, mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(
        model, reference.state_dict(), options=StateDictOptions(full_state_dict=True)
    )
    batch = batches_of_t(1)[0]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for _ in range(2):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            each(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model.head.weight is model.embedding.weight
    assert_state_close(model, reference)


def test_fc_071_tied_weights_stay_one_parameter() -> None:
    run_on_ranks(tied_on_meta, n=2)


def clip_on_two_meshes(rank: Rank, with_plain: bool) -> str:
    """Blocks on the 1-D mesh, the head on a 2-D one. torch raises; a wrong norm would be the
    fault."""
    mesh = rank.mesh(dp=2, sp=2)
    batches = batches_of_t()
    want = one_device(models.build_t, batches)
    norm = torch.stack([g.pow(2).sum() for g in want.grads.values() if g is not None]).sum().sqrt()
    import autosp_dtensor as autosp

    model = split(models.build_t(), mesh)
    for block in blocks_of(model):
        fully_shard(block, mesh=autosp.fsdp_mesh(mesh))
    if not with_plain:
        # Hybrid: replicated over dp, sharded over sp.
        fully_shard(model.head, mesh=mesh)
        fully_shard(model.embedding, mesh=mesh)
    model(**batches[dp_index(mesh)]).loss.backward()
    if with_plain:
        autosp.sync_gradients(model)
    try:
        got = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    except (RuntimeError, ValueError) as error:
        return str(error)
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, norm, rtol=1e-10, atol=0)
    return ""


@pytest.mark.parametrize("with_plain", [False, True], ids=["two_meshes", "plain_among_them"])
def test_fc_087_clipping_on_mixed_meshes_is_right_or_raises(with_plain: bool) -> None:
    texts = run_on_ranks(clip_on_two_meshes, with_plain)
    assert len({bool(text) for text in texts}) == 1, texts


def accumulation(rank: Rank, sync_last_only: bool) -> int:
    """Three micro-batches; the number of reduce-scatters, one for each parameter group and sync."""
    ids = ids_of_t(6)
    mesh = rank.mesh(dp=2, sp=2)
    mine = dp_index(mesh)
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    reference = models.build_t()
    (token_sum(reference(ids).logits, targets, 45) / 2).backward()

    model = parallelize_then_shard(models.build_t(), mesh)
    loss = split(token_sum, mesh)
    with Collectives() as sent:
        for step in range(3):
            if sync_last_only:
                model.set_requires_gradient_sync(step == 2)
            row = slice(2 * step + mine, 2 * step + mine + 1)
            loss(model(ids[row]).logits, targets[row], 45).backward()
    nothing = torch.zeros(())
    compare(gather(model, {}, nothing, None), gather(reference, {}, nothing, None))
    return sum(n for name, n in sent.counts.items() if "reduce_scatter" in name)


def test_fc_105_gradients_are_reduced_once_when_sync_is_off_before_the_last() -> None:
    every = run_on_ranks(accumulation, False)
    last = run_on_ranks(accumulation, True)
    # Groups: each of two blocks, and the root with embedding and head.
    assert every == [9] * 4
    assert last == [3] * 4


# dtensor


class Scaled(nn.Module):
    """A replicated weight times sharded data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sin().sum()


def scaled(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    assert_same_as_one_device(rank, Scaled, {"x": x}, rank.mesh(sp=rank.world_size))


@pytest.mark.parametrize("n", [2, 4])
def test_fc_007_replicated_weight_on_sharded_tokens_gets_the_sum(n: int) -> None:
    run_on_ranks(scaled, n=n)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", ["head", "hidden"])
def test_fc_007_norm_weights_inside_attention_get_the_sum(kind: str, n: int) -> None:
    run_on_ranks(t_on_ranks, TConfig(qk_norm=kind), batch_with([ALL, (2, 9)], rows=2), n=n)


def ignoring_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="mean")


class TokenHead(nn.Module):
    """Cross entropy inside the model, on tokens without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 10).double()
        models.fill(self)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return ignoring_mean(logits, targets), logits


def token_head(rank: Rank, inside: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 6 if inside else 10, generator=generator, dtype=torch.float64)
    targets = torch.full((16,), -100)
    slots = [7, *range(10, 15)]
    targets[slots] = torch.tensor([0, 1, 2, 3, 4, 9])
    mesh = rank.mesh(sp=rank.world_size)
    if inside:
        batch = {"x": x.requires_grad_(), "targets": targets}
        assert_same_as_one_device(rank, TokenHead, batch, mesh, seq_dim=0, sharded=["1"])
        return
    plain, shared = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = (
        ignoring_mean(plain, targets),
        split(ignoring_mean, mesh, seq_dim=0)(shared, targets),
    )
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(shared.grad, plain.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("inside", [True, False], ids=["in_a_model", "as_a_function"])
def test_fc_025_cross_entropy_is_the_token_weighted_mean(inside: bool, n: int) -> None:
    run_on_ranks(token_head, inside, n=n)


class MadeInside(nn.Module):
    """A mask by tril, positions by arange, a rotation table as a buffer: none is a DTensor."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.t = ModelT(TConfig(attention=(attention,)))
        angles = (
            torch.arange(16, dtype=torch.float64)[:, None] * torch.linspace(0.1, 1, 16).double()
        )
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.scale = torch.full((1,), 0.5, dtype=torch.float64)  # a plain tensor as an attribute

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.t.embedding(ids)
        length = ids.shape[1]
        place = torch.arange(length)
        cos, sin = self.cos[place], self.sin[:length]
        x = torch.cat([x[..., :16] * cos, x[..., 16:] * sin], -1) * self.scale
        keep = torch.tril(torch.ones(length, length)).bool()
        weights = torch.zeros(length, length, dtype=x.dtype).masked_fill(~keep, -torch.inf)
        x = x + (weights.softmax(-1) @ x) * torch.linspace(0, 1, length, dtype=x.dtype)[:, None]
        logits = self.t.head(self.t.hidden(x, None, None))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def made_inside(rank: Rank, attention: str) -> None:
    batch = batch_with([ALL, (2, 9, 11)], rows=2)
    assert_same_as_one_device(
        rank, partial(MadeInside, attention), batch, rank.mesh(sp=2), sharded=["1"]
    )


@pytest.mark.parametrize("attention", ["sdpa", "tril"])
def test_fc_086_tensors_made_inside_forward_and_buffers(attention: str) -> None:
    run_on_ranks(made_inside, attention, n=2)


class Views(nn.Module):
    """Batch and sequence merged and taken apart again, in the ways that people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(6, 6).double()
        models.fill(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, d = x.shape
        if self.how == "view":
            y = self.linear(x.view(b * s, d)).view(b, s, d)
        elif self.how == "flatten":
            y = self.linear(x.flatten(0, 1)).unflatten(0, (b, s))
        elif self.how == "reshape_all":
            y = (x.reshape(-1) * 2).view(b, s, d)
            y = self.linear(y)
        elif self.how == "merged_out":
            y = self.linear(x.view(-1, d))
        else:
            y = self.linear(x.transpose(0, 1).reshape(s * b, d)).view(s, b, d)
        return y.pow(3).sum(), y


def views(rank: Rank, how: str, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, length, 6, generator=generator, dtype=torch.float64).requires_grad_()
    assert_same_as_one_device(
        rank, partial(Views, how), {"x": x}, rank.mesh(sp=rank.world_size), sharded=["1"]
    )


@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.parametrize("how", ["view", "flatten", "reshape_all", "merged_out", "transposed"])
def test_fc_097_views_that_merge_batch_and_sequence(how: str, length: int) -> None:
    run_on_ranks(views, how, length, n=4)


def two_axes(rank: Rank) -> str:
    import autosp_dtensor as autosp

    try:
        autosp.parallelize(ModelT(), rank.mesh(a=2, b=2), sp_axis=("a", "b"))
    except autosp.AutoSPError as error:
        return str(error)
    return ""


def test_fc_098_sequence_over_two_axes_is_refused_and_over_one_of_four_is_right() -> None:
    texts = run_on_ranks(two_axes)
    assert texts[0] and texts == [texts[0]] * 4
    batch = batch_with(ALL)
    assert run_on_ranks(t_on_ranks, TConfig(), batch, n=4) == [checked(4.2528)] * 4


# What the file's own `distribute_tensor` inputs come to: a DTensor on the sp axis is taken as it
# is.


def dtensor_in(rank: Rank) -> None:
    mesh = rank.mesh(sp=2)
    logits = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = models.random_ids() % 8
    plain = logits.clone().requires_grad_()
    want = mean_of(plain, targets)
    want.backward()
    shared = distribute_tensor(logits, mesh["sp"], [Shard(1)]).requires_grad_()
    got = split(mean_of, mesh)(shared, targets)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert shared.grad is not None
    torch.testing.assert_close(shared.grad.full_tensor(), plain.grad, rtol=1e-10, atol=1e-14)


def mean_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_dtensor_input_split_over_sp_is_taken_as_it_is() -> None:
    run_on_ranks(dtensor_in, n=2)
