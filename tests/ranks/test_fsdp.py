"""FSDP2 over dp and sp together: gradients, norms, precision, accumulation, meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests import models
from tests.compare import (
    assert_same_as_one_device,
    compare,
    dp_index,
    gather,
    one_device,
    whole,
)
from tests.model_t import ModelT, TConfig, ids_of_t, labels_with_targets
from tests.models_handwritten import HEAD_SIZE, TitanLlama, precompute_freqs_cis
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import (
    assert_state_close,
    batches_of_llama,
    batches_of_t,
    blocks_of,
    parallelize_then_shard,
    shard,
    shard_then_parallelize,
    train_on_ranks,
    train_one_device,
)
from tests.upcasts import upcasts_stay_in_fp64

ORDERS = {"parallelize_first": parallelize_then_shard, "shard_first": shard_then_parallelize}
MESHES = {
    "dp1_sp2": {"dp": 1, "sp": 2},
    "dp2_sp1": {"dp": 2, "sp": 1},
    "dp2_sp2": {"dp": 2, "sp": 2},
    "sp4": {"sp": 4},
    "dp4_sp1": {"dp": 4, "sp": 1},
    "replicate2_sp2": {"dp_replicate": 2, "sp": 2},
}


def size_of(axes: dict[str, int]) -> int:
    return axes.get("dp", 1) * axes.get("dp_replicate", 1) * axes["sp"]


def t_with_fsdp(rank: Rank, order: str, axes: dict[str, int], config: TConfig) -> None:
    batches = batches_of_t(size_of(axes) // axes["sp"])
    assert_same_as_one_device(
        rank,
        partial(models.build_t, config),
        batches,
        rank.mesh(**axes),
        set_up=ORDERS[order],
        sharded=["logits"],
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_gradients_under_fsdp2_equal_one_device(axes: dict[str, int], order: str) -> None:
    run_on_ranks(t_with_fsdp, order, axes, TConfig(), n=size_of(axes))


@pytest.mark.parametrize(
    "config",
    [TConfig(tied=True), TConfig(lora_rank=2), TConfig(qk_norm="head"), TConfig(checkpointed=(1,))],
    ids=["tied", "lora", "qk_norm", "checkpointed"],
)
def test_variants_under_fsdp2_equal_one_device(config: TConfig) -> None:
    run_on_ranks(t_with_fsdp, "parallelize_first", MESHES["dp2_sp2"], config)


def family_with_fsdp(rank: Rank, family: str, order: str) -> None:
    build = partial(models.build_transformers, family)
    build()
    with upcasts_stay_in_fp64():
        assert_same_as_one_device(
            rank, build, batches_of_llama(), rank.mesh(dp=2, sp=2), set_up=ORDERS[order]
        )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_transformers_under_fsdp2_equal_one_device(family: str, order: str) -> None:
    run_on_ranks(family_with_fsdp, family, order)


def with_options(rank: Rank, options: dict[str, Any]) -> None:
    def set_up(model: nn.Module, mesh: Any) -> nn.Module:
        import autosp_dtensor as autosp

        return shard(autosp.parallelize(model, mesh), mesh, **options)

    assert_same_as_one_device(
        rank, models.build_t, batches_of_t(), rank.mesh(dp=2, sp=2), set_up=set_up
    )


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_reshard_after_forward_does_not_change_gradients(reshard: bool | int) -> None:
    run_on_ranks(with_options, {"reshard_after_forward": reshard})


def with_root_only(rank: Rank, blocks_only: bool) -> None:
    """One FSDP2 group for all, or blocks alone with the embedding and the head left to
    `sync_gradients`."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(dp=2, sp=2)
    batch = batches_of_t()[0]
    want = one_device(models.build_t, [batch])
    model = autosp.parallelize(models.build_t(), mesh)
    over = autosp.fsdp_mesh(mesh)
    if blocks_only:
        for block in blocks_of(model):
            fully_shard(block, mesh=over)
    else:
        fully_shard(model, mesh=over)
    out = model(**batch)
    out.loss.backward()
    if blocks_only:
        autosp.sync_gradients(model)
    got = gather(model, batch, out, out.loss)
    compare(got, want)


@pytest.mark.parametrize("blocks_only", [False, True], ids=["root_only", "blocks_only"])
def test_fsdp2_on_a_part_of_the_model(blocks_only: bool) -> None:
    run_on_ranks(with_root_only, blocks_only)


# Precision.


def relative_error(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """One number for all gradients: what is off, over what there is."""
    off = sum(float((grads[name].double() - exact[name]).pow(2).sum()) for name in exact)
    return (off / sum(float(grad.pow(2).sum()) for grad in exact.values())) ** 0.5


def in_bf16(rank: Rank, order: str) -> list[dict[str, float]]:
    """Errors against fp64 of FSDP2 alone, and of FSDP2 with split sequences: loss, logits,
    gradients."""
    import autosp_dtensor as autosp

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batch = batches_of_t(1)[0]
    exact = one_device(models.build_t, [batch])
    mesh = rank.mesh(dp=1, sp=2)
    rows = []
    for split in (False, True):
        model = models.build_t().float()
        if split and order == "parallelize_first":
            model = autosp.parallelize(model, mesh)
        model = shard(model, mesh, mp_policy=policy)
        if split and order == "shard_first":
            model = autosp.parallelize(model, mesh)
        out = model(**batch)
        assert out.logits.dtype == torch.bfloat16
        out.loss.backward()
        got = gather(model, batch, out, out.loss)
        assert all(grad is not None and grad.dtype == torch.float32 for grad in got.grads.values())
        rows.append(
            {
                "loss": abs(float(got.loss) - float(exact.loss)),
                "logits": relative_error(got.outputs, exact.outputs | {"loss": exact.loss}),
                "gradients": relative_error(got.grads, exact.grads),
            }
        )
    return rows


@pytest.mark.parametrize("order", ORDERS)
def test_bf16_is_off_by_at_most_twice_what_fsdp2_alone_is(order: str) -> None:
    for alone, split in run_on_ranks(in_bf16, order, n=2):
        # A single loss may be exact by luck, so its bound has the rounding of one bf16 logit beside
        # it.
        assert split["loss"] <= 2 * alone["loss"] + 4 * 2**-8
        assert split["logits"] <= 2 * alone["logits"]
        assert split["gradients"] <= 2 * alone["gradients"]


# Meta device.


def on_meta(rank: Rank, name: str, order: str) -> None:
    """Build on meta, parallelize, shard, then memory and weights; buffers are made anew, as their
    owner must."""
    build: Callable[[], nn.Module] = {
        "t": ModelT,
        "tied": partial(ModelT, TConfig(tied=True)),
        "titan": partial(models.build_handwritten, "titan_gqa"),
    }[name]
    reference = build()
    ids = ids_of_t(2)
    labels = models.uneven_labels(ids)
    mesh = rank.mesh(dp=2, sp=2)
    with torch.device("meta"):
        model = TitanLlama().double() if name == "titan" else build()
    model = ORDERS[order](model, mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    set_model_state_dict(
        model, reference.state_dict(), options=StateDictOptions(full_state_dict=True)
    )
    if name == "titan":
        model.freqs_cis = precompute_freqs_cis(HEAD_SIZE, 64)

    if name == "titan":
        want, got = reference(ids), model(ids)
        want.logsumexp(-1).mean().backward()
        got.full_tensor().logsumexp(-1).mean().backward()
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-10)
    else:
        want, got = reference(ids, labels), model(ids, labels)
        want.loss.backward()
        got.loss.backward()
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-10, atol=1e-10)
    for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-11, msg=key)
    if name == "tied":
        assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["t", "tied", "titan"])
def test_model_built_on_meta_trains_after_to_empty(name: str, order: str) -> None:
    run_on_ranks(on_meta, name, order)


# Norms, accumulation, steps.


def clipped(rank: Rank, axes: dict[str, int], max_norm: float) -> None:
    batches = batches_of_t(4)[: max(1, size_of(axes) // axes["sp"])]
    want = one_device(models.build_t, batches)
    norm = torch.stack([g.pow(2).sum() for g in want.grads.values() if g is not None]).sum().sqrt()
    mesh = rank.mesh(**axes)
    model = parallelize_then_shard(models.build_t(), mesh)
    model(**batches[dp_index(mesh)]).loss.backward()
    got = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.full_tensor(), norm, rtol=1e-10, atol=0)
    for name, parameter in model.named_parameters():
        expected = want.grads[name] * (max_norm / (norm + 1e-6)).clamp(max=1)
        torch.testing.assert_close(whole(parameter.grad), expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_clip_grad_norm_gives_the_one_device_norm(axes: dict[str, int]) -> None:
    run_on_ranks(clipped, axes, 0.1, n=size_of(axes))


def token_sum(logits: Tensor, targets: Tensor, num_items: float) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (
        num_items
    )


def accumulated(rank: Rank) -> None:
    """Three micro-batches of 15, 3 and 1 targets, each divided by the count of all."""
    import autosp_dtensor as autosp

    ids = ids_of_t(6)
    rows = [range(15), range(12, 15), (9,)]
    mesh = rank.mesh(dp=2, sp=2)
    mine = dp_index(mesh)
    shifted = []
    for row in range(6):
        labels = labels_with_targets(ids[row : row + 1], rows[row // 2])
        shifted.append(nn.functional.pad(labels[:, 1:], (0, 1), value=-100))
    count = 19.0
    reference = models.build_t()
    for row in range(6):
        (token_sum(reference(ids[row : row + 1]).logits, shifted[row], count) / 2).backward()

    model = parallelize_then_shard(models.build_t(), mesh)
    loss = autosp.parallelize(token_sum, mesh)
    for step in range(3):
        row = 2 * step + mine
        loss(model(ids[row : row + 1]).logits, shifted[row], count).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-11, msg=name)


def test_accumulation_over_micro_batches_with_unequal_target_counts() -> None:
    run_on_ranks(accumulated)


def stepped(rank: Rank, axes: dict[str, int]) -> None:
    batches = batches_of_t(size_of(axes) // axes["sp"])
    reference, losses = train_one_device(models.build_t, batches, 4)
    mesh = rank.mesh(**axes)
    model = parallelize_then_shard(models.build_t(), mesh)
    got = train_on_ranks(model, batches, mesh, 4)
    torch.testing.assert_close(
        torch.tensor(got),
        torch.tensor([step[dp_index(mesh)] for step in losses]),
        rtol=1e-7,
        atol=0,
    )
    # AdamW divides by the root of the second moment, so a gradient near zero magnifies rounding.
    assert_state_close(model, reference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("axes", [MESHES["dp2_sp2"], MESHES["sp4"]], ids=["dp2_sp2", "sp4"])
def test_four_adamw_steps_equal_one_device(axes: dict[str, int]) -> None:
    run_on_ranks(stepped, axes)


def mesh_for_fsdp(rank: Rank) -> None:
    import autosp_dtensor as autosp

    flat = autosp.fsdp_mesh(rank.mesh(dp=2, sp=2))
    assert flat.ndim == 1 and flat.size() == 4
    assert flat.get_local_rank() == dist.get_rank()
    assert autosp.fsdp_mesh(rank.mesh(dp=2, sp=2)).size() == 4, "asked a second time"
    assert autosp.fsdp_mesh(rank.mesh(sp=4)).size() == 4
    both = autosp.fsdp_mesh(rank.mesh(dp_replicate=2, sp=2))
    assert both.ndim == 2 and tuple(both.shape) == (2, 2)
    three = autosp.fsdp_mesh(rank.mesh(dp_replicate=2, dp=1, sp=2))
    assert three.ndim == 2 and tuple(three.shape) == (2, 2)


def test_fsdp_mesh_is_dp_and_sp_in_one_dimension_or_two_with_replicas() -> None:
    run_on_ranks(mesh_for_fsdp)
