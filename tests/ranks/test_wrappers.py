"""What people put around or into a model: hooks, DDP, frozen parameters, two models at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests import models
from tests.compare import assert_same_as_one_device, compare, dp_index, gather, one_device
from tests.model_t import TConfig
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import batches_of_t, blocks_of, parallelize_then_shard, shard


def hooks_fire(rank: Rank, with_fsdp: bool, when: str) -> None:
    """Forward hooks on the blocks, set before or after `parallelize`; once for each call."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(dp=2, sp=2)
    fired: list[str] = []

    def watch(model: nn.Module) -> None:
        for index, block in enumerate(blocks_of(model)):
            block.register_forward_pre_hook(lambda m, a, i=index: fired.append(f"pre {i}"))
            block.register_forward_hook(lambda m, a, out, i=index: fired.append(f"post {i}"))

    model = models.build_t()
    if when == "before":
        watch(model)
    model = autosp.parallelize(model, mesh)
    if with_fsdp:
        model = shard(model, mesh)
    batch = batches_of_t()[dp_index(mesh)]
    if when == "after_a_call":
        model(**batch).loss.backward()
    if when != "before":
        watch(model)
    for _ in range(2):  # the second call is cached
        fired.clear()
        model(**batch).loss.backward()
        assert fired == ["pre 0", "post 0", "pre 1", "post 1"], fired


@pytest.mark.parametrize("when", ["before", "after", "after_a_call"])
@pytest.mark.parametrize("with_fsdp", [False, True], ids=["plain", "fsdp2"])
def test_forward_hooks_on_blocks_fire_once_per_call(with_fsdp: bool, when: str) -> None:
    run_on_ranks(hooks_fire, with_fsdp, when)


def activations_seen(rank: Rank) -> None:
    """An activation hook, as probes use them, sees this rank's part of the block's output."""
    import autosp_dtensor as autosp

    plain, split = models.build_t(), autosp.parallelize(models.build_t(), rank.mesh(sp=2))
    seen: dict[str, torch.Tensor] = {}
    for name, model in (("plain", plain), ("split", split)):
        blocks_of(model)[0].register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: out.detach().clone()})
        )
    batch = batches_of_t(1)[0]
    plain(**batch)
    split(**batch)
    part = seen["split"]
    part = part.to_local() if isinstance(part, DTensor) else part
    torch.testing.assert_close(part, seen["plain"].chunk(2, 1)[rank.rank], rtol=1e-12, atol=1e-12)


def test_activation_hook_sees_the_tokens_of_its_rank() -> None:
    run_on_ranks(activations_seen, n=2)


def backward_hook(rank: Rank) -> str:
    import autosp_dtensor as autosp

    fired: list[int] = []
    model = autosp.parallelize(models.build_t(), rank.mesh(sp=2))
    for index, block in enumerate(blocks_of(model)):
        block.register_full_backward_hook(lambda m, gi, go, i=index: fired.append(i))
    try:
        model(**batches_of_t(1)[0]).loss.backward()
    except autosp.CaptureError as error:
        return str(error)
    assert fired == [1, 0], fired
    return ""


def test_module_backward_hooks_fire_or_are_refused_by_the_name_of_the_module() -> None:
    texts = run_on_ranks(backward_hook, n=2)
    assert texts == [texts[0]] * 2
    assert texts[0] == "" or "  node  blocks.0" in texts[0]


def hook_replaces(rank: Rank) -> None:
    """A hook that returns a value changes the model; that must be so on split sequences, too."""

    def build() -> nn.Module:
        model = models.build_t()
        blocks_of(model)[0].register_forward_hook(lambda m, a, out: out * 0.5)
        return model

    assert_same_as_one_device(rank, build, batches_of_t(1)[0], rank.mesh(sp=2))


def test_forward_hook_that_changes_the_output_of_a_block_is_obeyed() -> None:
    run_on_ranks(hook_replaces, n=2)


def tensor_hook_in_a_hook(rank: Rank, with_fsdp: bool, when: str) -> None:
    """`out.register_hook(fn)` in a forward hook is run at every call: fn sees, and may change, the
    gradient of one device, in this rank's part."""
    seen: list[torch.Tensor] = []

    def build() -> nn.Module:
        model = models.build_t()

        def halved(grad: torch.Tensor) -> torch.Tensor:
            seen.append(grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())
            return grad * 0.5

        def hook(module: nn.Module, *given: Any) -> None:
            value = given[-1][0] if when == "before" else given[-1]
            value.register_hook(halved)

        block = blocks_of(model)[1]
        if when == "before":
            block.register_forward_pre_hook(hook)
        else:
            block.register_forward_hook(hook)
        return model

    assert_same_as_one_device(
        rank,
        build,
        batches_of_t(1)[0],
        rank.mesh(sp=2),
        set_up=parallelize_then_shard if with_fsdp else None,
    )
    one, split = seen
    torch.testing.assert_close(split, one, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("with_fsdp", [False, True], ids=["plain", "fsdp2"])
def test_tensor_hook_that_a_forward_hook_puts_on_is_obeyed(with_fsdp: bool, when: str) -> None:
    run_on_ranks(tensor_hook_in_a_hook, with_fsdp, when, n=2)


def gradient_hooks(rank: Rank) -> None:
    """`Tensor.register_post_accumulate_grad_hook` is how optimizers-in-backward work."""
    import autosp_dtensor as autosp

    model = autosp.parallelize(models.build_t(), rank.mesh(sp=2))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    model(**batches_of_t(1)[0]).loss.backward()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


def test_gradient_hooks_of_parameters_fire_once() -> None:
    run_on_ranks(gradient_hooks, n=2)


def under_ddp(model: nn.Module, mesh: Any) -> nn.Module:
    import autosp_dtensor as autosp

    split = autosp.parallelize(model, mesh)
    return DistributedDataParallel(split, process_group=autosp.fsdp_mesh(mesh).get_group())


def t_with_ddp(rank: Rank, config: TConfig) -> None:
    assert_same_as_one_device(
        rank,
        partial(models.build_t, config),
        batches_of_t(),
        rank.mesh(dp=2, sp=2),
        set_up=under_ddp,
    )


@pytest.mark.parametrize("config", [TConfig(), TConfig(lora_rank=2)], ids=["plain", "lora"])
def test_gradients_under_ddp_equal_one_device(config: TConfig) -> None:
    run_on_ranks(t_with_ddp, config)


def build_frozen(frozen: str) -> nn.Module:
    model = models.build_t()
    {
        "embedding": model.embedding,
        "first_block": model.blocks[0],
        "all_but_head": model,
    }[frozen].requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def frozen_part(rank: Rank, frozen: str, with_fsdp: bool) -> None:
    assert_same_as_one_device(
        rank,
        partial(build_frozen, frozen),
        batches_of_t(),
        rank.mesh(dp=2, sp=2),
        set_up=parallelize_then_shard if with_fsdp else under_ddp,
    )


@pytest.mark.parametrize("with_fsdp", [True, False], ids=["fsdp2", "ddp"])
@pytest.mark.parametrize("frozen", ["embedding", "first_block", "all_but_head"])
def test_frozen_parameters_get_no_gradient_and_the_rest_the_right_one(
    frozen: str, with_fsdp: bool
) -> None:
    run_on_ranks(frozen_part, frozen, with_fsdp)


def freeze_between_steps(rank: Rank) -> None:
    """`requires_grad_` after a program was traced."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(sp=2)
    batch = batches_of_t(1)[0]
    model, reference = autosp.parallelize(models.build_t(), mesh), models.build_t()
    for trainable in (True, False, True):
        for each in (model, reference):
            each.zero_grad()
            each.blocks[0].requires_grad_(trainable)
            each(**batch).loss.backward()
        autosp.sync_gradients(model)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11, msg=name)


def test_parameters_frozen_and_thawed_between_steps() -> None:
    run_on_ranks(freeze_between_steps, n=2)


def two_models(rank: Rank) -> None:
    """Two models on different meshes, calls in between each other."""
    meshes = [rank.mesh(dp=2, sp=2), rank.mesh(sp=4)]
    configs = [TConfig(), TConfig(layers=1, qk_norm="head")]
    builds = [partial(models.build_t, config) for config in configs]
    batches = [batches_of_t(2), batches_of_t(1, length=12)]
    wants = [
        one_device(build, batch, dp_index(mesh) % len(batch))
        for build, batch, mesh in zip(builds, batches, meshes, strict=True)
    ]
    split = [
        parallelize_then_shard(build(), mesh) for build, mesh in zip(builds, meshes, strict=True)
    ]
    outs = [
        model(**batch[dp_index(mesh) % len(batch)])
        for model, batch, mesh in zip(split, batches, meshes, strict=True)
    ]
    for out in outs:
        out.loss.backward()
    for model, out, want in zip(split, outs, wants, strict=True):
        compare(gather(model, {}, out, out.loss), want)


def test_two_models_with_different_meshes_in_one_process() -> None:
    run_on_ranks(two_models)


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = models.build_t()
        self.drop = nn.Dropout(0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drop(self.model(ids).logits)


def inside_saved_hooks(rank: Rank, options: dict[str, Any]) -> None:
    """Hooks on saved tensors are for what a call computes: a first call, which is traced, saves
    what the later ones save."""
    import autosp_dtensor as autosp
    from tests.losses import mean

    mesh = rank.mesh(dp=1, sp=2)
    ids = models.random_ids()
    targets = ids.roll(-1, 1)
    plain, split = WithDropout(), autosp.parallelize(WithDropout(), mesh, **options)
    loss = autosp.parallelize(mean, mesh, **options)
    saved: list[list[str]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[-1].append(f"{type(x).__name__} {tuple(x.shape)}")
        return x

    def step(around: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        around(lambda: loss(split(ids), targets)).backward()
        autosp.sync_gradients(split)
        grads = {name: p.grad.clone() for name, p in split.named_parameters() if p.grad is not None}
        split.zero_grad()
        return grads

    def checkpointed(call: Any) -> Any:
        return checkpoint(call, use_reentrant=False)

    def counted(call: Any) -> Any:
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return call()

    first, again = step(checkpointed), step(checkpointed)
    want = step(lambda call: call())
    assert first.keys() == again.keys() == want.keys() == dict(plain.named_parameters()).keys()
    for name, grad in want.items():
        torch.testing.assert_close(first[name], grad, rtol=0, atol=0)
        torch.testing.assert_close(again[name], grad, rtol=0, atol=0)

    split = autosp.parallelize(WithDropout(), mesh, **options)
    loss = autosp.parallelize(mean, mesh, **options)
    for _ in range(2):
        step(counted)
    assert saved[0] == saved[1]
    assert not any("Fake" in kind for kind in saved[0])


@pytest.mark.parametrize("kept", ["none", "sequence", "full"])
@pytest.mark.parametrize("tile", [3, "none"])
def test_checkpoint_of_the_users_around_a_call(kept: str, tile: Any) -> None:
    run_on_ranks(inside_saved_hooks, {"checkpoint": kept, "tile": tile}, n=2)
