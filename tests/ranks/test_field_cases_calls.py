"""FIELD-CASES.md, under its numbers: gradients and meshes, DTensor, evaluation, adapters,
compilers."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests import models
from tests.compare import (
    Collectives,
    assert_same_as_one_device,
    compare,
    difference,
    dp_index,
    gather,
    one_device,
    whole,
)
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.pool import Rank, run_on_ranks
from tests.ranks.cases import batch_with, checked, t_on_ranks
from tests.ranks.training import (
    adamw,
    assert_state_close,
    equal_on_all_ranks,
    logged,
    parallelize_then_shard,
    split,
    whole_state,
)

ALL = range(15)


# eval-accounting


def evaluate(rank: Rank, axes: dict[str, int], together: bool) -> None:
    """Three rows with 15, 5 and 1 targets; the loss of each, and of all by tokens."""
    mesh = rank.mesh(**axes)
    model, reference = split(ModelT(), mesh), ModelT()
    model.eval()
    reference.eval()
    ids = ids_of_t(3)
    lengths, valid = (16, 13, 9), (15, 5, 1)
    rows = []
    for row, (length, count) in enumerate(zip(lengths, valid, strict=True)):
        labels = ids[row : row + 1, :length].clone()
        labels[:, 1 : length - count] = -100
        rows.append({"ids": ids[row : row + 1, :length], "labels": labels})
    if together:  # a last batch smaller than the others
        rows = [
            {key: torch.cat([rows[0][key][:, :9], rows[1][key][:, :9]]) for key in rows[0]},
            rows[2],
        ]
    with torch.no_grad():
        got = [model(**row).loss.item() for row in rows]
        want = [reference(**row).loss.item() for row in rows]
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("together", [False, True], ids=["rows", "smaller_last_batch"])
@pytest.mark.parametrize("axes", [{"dp": 2, "sp": 1}, {"sp": 2}, {"sp": 4}], ids=str)
def test_fc_015_evaluation_loss_is_that_of_one_device(axes: dict[str, int], together: bool) -> None:
    run_on_ranks(evaluate, axes, together, n=math.prod(axes.values()))


def schedule(rank: Rank, axes: dict[str, int]) -> tuple[int, int, list[float], list[int]]:
    """Steps of an epoch of 8 rows at B=1, tokens of all data groups in a step, LR by step, rows
    seen."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(**axes)
    replicas, index = autosp.data_shard(mesh)
    rows = torch.arange(8)
    sampler: DistributedSampler = DistributedSampler(
        rows, num_replicas=replicas, rank=index, shuffle=False
    )
    loader = DataLoader(rows, batch_size=1, sampler=sampler)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    rates, seen = [], []
    for batch in loader:
        seen.append(int(batch))
        optimizer.step()
        rates.append(cosine.get_last_lr()[0])
        cosine.step()
    return len(loader), replicas * 16, rates, seen


def test_fc_039_steps_tokens_and_learning_rate_do_not_depend_on_sp() -> None:
    alone = run_on_ranks(schedule, {"dp": 2, "sp": 1}, n=2)
    split_too = run_on_ranks(schedule, {"dp": 2, "sp": 2})
    assert alone[0][:2] == (4, 32)
    assert split_too == [alone[0], alone[0], alone[1], alone[1]]


def train_evaluate_generate(rank: Rank, with_fsdp: bool) -> None:
    """Train at B=2 and S=16, evaluate at B=3 and S=13, then five greedy tokens after a prompt of
    7."""
    mesh = rank.mesh(dp=1, sp=2)
    build = partial(models.build_transformers, "llama", use_cache=True)
    reference = build()
    model = parallelize_then_shard(build(), mesh) if with_fsdp else split(build(), mesh)
    model(**models.batch_transformers("plain")).loss.backward()
    model.zero_grad()
    model.eval()
    reference.eval()
    evaluated = models.batch_transformers("padding", batch=3, length=13)
    prompt = models.random_ids(1, 7)
    with torch.no_grad():
        got, want = model(**evaluated), reference(**evaluated)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(whole(got.logits), want.logits, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert (
        model.generate(prompt, **options).tolist() == reference.generate(prompt, **options).tolist()
    )


@pytest.mark.parametrize("with_fsdp", [False, True], ids=["plain", "fsdp2"])
def test_fc_085_evaluation_of_another_shape_and_greedy_decoding(with_fsdp: bool) -> None:
    run_on_ranks(train_evaluate_generate, with_fsdp, n=2)


# peft


def adapters(rank: Rank) -> None:
    import autosp_dtensor as autosp

    batch = batch_with([ALL, (2, 9, 11)], rows=2)
    build = partial(ModelT, TConfig(lora_rank=2))
    want = assert_same_as_one_device(rank, build, batch, rank.mesh(sp=rank.world_size))
    trained = {name for name, grad in want.grads.items() if grad is not None}
    assert trained and all(name.endswith((".A", ".B")) for name in trained)
    model = split(build(), rank.mesh(sp=rank.world_size))
    optimizer = adamw(model)
    model(**batch).loss.backward()
    autosp.sync_gradients(model)
    optimizer.step()
    equal_on_all_ranks(whole_state(model))


@pytest.mark.parametrize("n", [2, 4])
def test_fc_046_both_factors_of_an_adapter_train_on_all_tokens(n: int) -> None:
    run_on_ranks(adapters, n=n)


def adapters_added_later(rank: Rank) -> None:
    """As PEFT does it: modules are swapped in a model that is split and has run."""
    import autosp_dtensor as autosp

    batch = batch_with([ALL, (2, 9, 11)], rows=2)
    want = one_device(partial(ModelT, TConfig(lora_rank=2)), [batch])
    model = split(ModelT(), rank.mesh(sp=2))
    model(**batch).loss.backward()
    model.zero_grad()
    other = ModelT(TConfig(lora_rank=2))
    model.requires_grad_(False)
    for block, adapted in zip(model.blocks, other.blocks, strict=True):
        block.attention.q, block.attention.v = adapted.attention.q, adapted.attention.v
        block.attention.o, block.up, block.down = adapted.attention.o, adapted.up, adapted.down
    out = model(**batch)
    out.loss.backward()
    autosp.sync_gradients(model)
    compare(gather(model, {}, out, out.loss), want)


def test_fc_046_adapters_put_in_after_the_first_call() -> None:
    run_on_ranks(adapters_added_later, n=2)


class Wrapper(nn.Module):
    """Any module around the model that forwards the call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def wrapped(rank: Rank, how: str) -> None:
    import autosp_dtensor as autosp

    mesh = rank.mesh(sp=2)
    batch = batch_with([ALL, (2, 9, 11)], rows=2)
    want = one_device(ModelT, [batch])
    if how == "wrapper_is_split":
        model = split(Wrapper(ModelT()), mesh)
    elif how == "wrapper_around_split":
        model = Wrapper(split(ModelT(), mesh))
    elif how == "compiled_is_split":
        model = split(torch.compile(ModelT(), backend="eager"), mesh)
    elif how == "compiled_around_split":
        model = torch.compile(split(ModelT(), mesh), backend="eager")
    else:
        model = ModelT()
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        model.blocks[1].attention.compile(backend="eager")
        model = split(model, mesh)
    out = model(**batch)
    out.loss.backward()
    autosp.sync_gradients(model)
    error, text = difference(out.loss.detach(), want.loss)
    assert error < 1e-10, text
    error, text = difference(whole(out.logits), want.outputs["logits"])
    assert error < 1e-10, text
    for name, parameter in model.named_parameters():
        for prefix in ("inner.", "_orig_mod."):
            name = name.replace(prefix, "")
        error, text = difference(parameter.grad, want.grads[name])
        assert error < 1e-10, f"{name}: {text}"


@pytest.mark.parametrize(
    "how",
    [
        "wrapper_is_split",
        "wrapper_around_split",
        "compiled_is_split",
        "compiled_around_split",
        "compiled_blocks",
    ],
)
def test_fc_090_wrappers_around_and_inside_the_model(how: str) -> None:
    run_on_ranks(wrapped, how, n=2)


# compile


def exchanges_forward(rank: Rank, checkpointed: tuple[int, ...]) -> int:
    build = partial(ModelT, TConfig(checkpointed=checkpointed))
    batch = batch_with([ALL, (2, 9, 11)], rows=2)
    assert_same_as_one_device(rank, build, batch, rank.mesh(sp=2))
    model = split(build(), rank.mesh(sp=2))
    with Collectives() as sent:
        model(**batch)
    return sent.exchanges()


def test_fc_026_attention_in_checkpointed_layers_is_split_as_well() -> None:
    """Two exchanges for each layer forward, q with k and v, and the output."""
    assert run_on_ranks(exchanges_forward, (), n=2) == [4, 4]
    assert run_on_ranks(exchanges_forward, (1,), n=2) == [4, 4]


def without_compiler(rank: Rank, stance: str) -> float:
    config = TConfig(graph_break=True)
    compiler = torch.compiler.set_stance(stance) if stance else nullcontext()
    with compiler:
        return t_on_ranks(rank, config, batch_with(ALL))


@pytest.mark.parametrize("stance", ["", "force_eager"])
def test_fc_061_without_a_compiler_and_over_a_graph_break_the_split_program_runs(
    stance: str,
) -> None:
    assert run_on_ranks(without_compiler, stance, n=2) == [checked(4.2528)] * 2


def lengths_differ_by_group(rank: Rank) -> None:
    """Each group traces at other steps; FSDP2 joins them at every step."""
    mesh = rank.mesh(dp=2, sp=2)
    lengths = [(16, 32), (24, 16), (16, 24), (32, 16)]
    reference = models.build_t()
    model = parallelize_then_shard(models.build_t(), mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in lengths:
        batches = []
        for group, length in enumerate(step):
            ids = ids_of_t(4, length)[2 * group : 2 * group + 2]
            batches.append({"ids": ids, "labels": models.uneven_labels(ids)})
        torch.stack([reference(**batch).loss for batch in batches]).mean().backward()
        model(**batches[dp_index(mesh)]).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_state_close(model, reference)


def test_fc_079_groups_that_trace_at_different_steps_do_not_wait_for_each_other() -> None:
    run_on_ranks(lengths_differ_by_group, timeout=60)


def stream_of_lengths(rank: Rank) -> int:
    model = split(ModelT(), rank.mesh(sp=2))
    with logged() as lines:
        for length in (8, 16, 24, 32, 13, 9, 16, 13, 8):
            ids = ids_of_t(2, length)
            batch = {"ids": ids, "labels": models.uneven_labels(ids)}
            want = one_device(ModelT, [batch])
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            assert want.loss is not None
            torch.testing.assert_close(loss.detach(), want.loss, rtol=1e-12, atol=0)
    return len(lines)


def test_fc_083_every_length_works_and_is_traced_once() -> None:
    assert run_on_ranks(stream_of_lengths, n=2) == [6, 6]


@pytest.mark.parametrize("n", [2, 4])
def test_fc_088_three_ways_to_write_attention_in_one_model(n: int) -> None:
    config = TConfig(layers=3, attention=("matmul", "einsum", "sdpa"))
    run_on_ranks(t_on_ranks, config, batch_with([ALL, (2, 9, 11)], rows=2), n=n)


class Gathered(nn.Module):
    """Reads the sequence whole, then merges batch and sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        models.fill(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).cumsum(1).flip(1)
        flat = y.view(-1, 6)
        assert flat.shape[0] == x.shape[0] * x.shape[1]
        return flat.sin().mean(), flat


def gathered_lengths(rank: Rank) -> None:
    for length in (8, 10, 13):
        generator = torch.Generator().manual_seed(length)
        x = torch.randn(2, length, 6, generator=generator, dtype=torch.float64)
        assert_same_as_one_device(rank, Gathered, {"x": x}, rank.mesh(sp=4))


def test_fc_099_length_after_a_gather_is_the_length_of_the_sequence() -> None:
    run_on_ranks(gathered_lengths)
