"""FIELD-CASES.md, under its numbers: the exchange around attention, and towers beside it, on ranks.

Heads, masks, packed documents and lengths are in tests/place/test_field_cases_*.py, in one process.
"""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests import models
from tests.compare import Collectives, assert_same_as_one_device, dp_index, one_device, whole
from tests.losses import token_sum
from tests.model_t import IGNORED, ModelT, TConfig, ids_of_t, labels_with_targets
from tests.place.field_cases import t_with
from tests.place.test_field_cases_heads import WithSinks
from tests.pool import Rank, run_on_ranks
from tests.ranks.cases import checked, shifted
from tests.ranks.training import parallelize_then_shard, split

# length


def cut_by_the_loader(rank: Rank) -> tuple[str, str]:
    import autosp_dtensor as autosp

    half = ids_of_t(1).chunk(2, 1)[rank.rank]
    try:
        split(ModelT(), rank.mesh(sp=2))(half, half)
    except autosp.AutoSPError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_fc_070_parts_cut_by_the_loader_are_refused() -> None:
    """Ranks that pass their own parts pass different data, and that is looked for."""
    for name, text in run_on_ranks(cut_by_the_loader, n=2):
        assert name == "RankMismatchError"
        assert text.startswith("ranks of one sp group were called with different data.")
        assert "each rank passes the same whole batch" in text


def cut_once(rank: Rank) -> tuple[float, int]:
    ids = ids_of_t(1)
    mesh = rank.mesh(sp=2)
    logits = split(ModelT(), mesh)(ids).logits
    return split(token_sum, mesh)(logits, shifted(ids), 1).item(), logits.to_local().shape[1]


def test_fc_070_each_rank_holds_half_of_the_tokens_and_all_targets_count() -> None:
    for total, tokens in run_on_ranks(cut_once, n=2):
        assert tokens == 8
        assert total / 15 == checked(4.2528)


# collectives


class Passed(nn.Module):
    """Attention in which each token reads itself: what comes out is what went in, exactly."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        order = (1, 2, 0, 3) if self.layout == "S B H D" else (0, 2, 1, 3)
        back = (2, 0, 1, 3) if self.layout == "S B H D" else (0, 2, 1, 3)
        v = x.permute(order)
        itself = torch.eye(v.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(v * 0, v * 0, v, itself).permute(back)


def there_and_back(rank: Rank, layout: str, shape: tuple[int, int, int]) -> int:
    b, s, h = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    value = (1000 * b + 10 * s + h).double()[..., None] + torch.tensor([0.0, 0.5])
    weight = value.flip(0, 1, 2) + 0.25
    if layout == "S B H D":
        value, weight = (x.transpose(0, 1).contiguous() for x in (value, weight))
    mesh, seq_dim = rank.mesh(sp=rank.world_size), 0 if layout == "S B H D" else 1
    x = distribute_tensor(value, mesh["sp"], [Shard(seq_dim)]).requires_grad_()
    model = split(Passed(layout), mesh, seq_dim=seq_dim)
    with Collectives() as sent:
        out = model(x)
        out.backward(distribute_tensor(weight, mesh["sp"], out.placements))
    assert torch.equal(out.full_tensor(), value)
    assert x.grad is not None and torch.equal(x.grad.full_tensor(), weight)
    return sent.exchanges()


@pytest.mark.parametrize("layout", ["B S H D", "S B H D"])
@pytest.mark.parametrize("n", [2, 4])
def test_fc_027_exchange_there_and_back_is_the_identity(layout: str, n: int) -> None:
    for shape in ((2, 8, 4), (3, 9, 5)):
        sent = run_on_ranks(there_and_back, layout, shape, n=n)
        assert sent == [4] * n  # there and back, forward and backward


class Given(nn.Module):
    """Attention over q, k and v that are handed in, against a gradient that is."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = k[:, : self.kv_heads], v[:, : self.kv_heads]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (out.transpose(1, 2) * grad).sum(), out


def gradients_of_inputs(rank: Rank, length: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, length, 4, 8, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    batch = {"q": q, "k": k, "v": v, "grad": grad}
    for name in "qkv":
        batch[name].requires_grad_()
    mesh = rank.mesh(sp=rank.world_size)
    inputs = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in batch.items()}
    want, _ = Given(kv_heads)(**batch)
    want.backward()
    got, _ = split(Given(kv_heads), mesh)(**inputs)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for name in "qkv":
        torch.testing.assert_close(inputs[name].grad, batch[name].grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", [2, 4])
def test_fc_038_gradient_of_each_position_of_q_k_and_v(n: int) -> None:
    """No ring and no step per block here: each rank has all keys of its heads, or all keys."""
    for length, kv_heads in ((16, 4), (13, 2), (16, 1)):
        run_on_ranks(gradients_of_inputs, length, kv_heads, n=n)


def normed_with_biases() -> ModelT:
    model = ModelT(TConfig(qk_norm="head"))
    for block in model.blocks:
        attention: Any = block.attention
        for name in "qkv":
            old = getattr(attention, name)
            new = nn.Linear(old.in_features, old.out_features).double()
            new.weight = old.weight
            with torch.no_grad():
                new.bias.copy_(torch.linspace(-0.5, 0.5, old.out_features))
            setattr(attention, name, new)
    return model


def with_sleeps(rank: Rank) -> None:
    import autosp_dtensor as autosp

    ids = ids_of_t(2)
    labels = labels_with_targets(ids, [range(15), (2, 9, 11)])
    batch = {"ids": ids, "labels": labels}
    mesh = rank.mesh(sp=rank.world_size)
    want = one_device(normed_with_biases, [batch])
    model = split(normed_with_biases(), mesh)
    draw, exchange = random.Random(rank.rank), dist.all_to_all_single

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.random() * 4e-3)
        work = exchange(*args, **kwargs)
        time.sleep(draw.random() * 4e-3)
        return work

    first: dict[str, Tensor] = {}
    for step in range(20):
        model.zero_grad()
        with mock.patch.object(dist, "all_to_all_single", late if step else exchange):
            model(**batch).loss.backward()
        autosp.sync_gradients(model)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        first = first or grads
        assert all(torch.equal(first[name], grads[name]) for name in first), step
    assert {"blocks.0.attention.q_norm", "blocks.1.attention.k.bias"} <= first.keys()
    for name, grad in first.items():
        torch.testing.assert_close(grad, want.grads[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4])
def test_fc_045_late_exchanges_leave_every_gradient_bit_equal(n: int) -> None:
    run_on_ranks(with_sleeps, n=n)


def with_sinks() -> ModelT:
    model = t_with(WithSinks)
    for block in model.blocks:
        sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
        block.attention.sinks = nn.Parameter(sinks)
    return model


def clipped_with_sinks(rank: Rank) -> None:
    ids = ids_of_t(2)
    labels = labels_with_targets(ids, [range(15), (2, 9, 11)])
    batch = {"ids": ids, "labels": labels}
    want = one_device(with_sinks, [batch])
    squares = {name: g.square().sum() for name, g in want.grads.items() if g is not None}
    sinks = [name for name in squares if name.endswith("sinks")]
    norm = torch.stack([*squares.values()]).sum().sqrt()
    without = torch.stack([x for name, x in squares.items() if name not in sinks]).sum().sqrt()
    assert len(sinks) == 2 and norm > without * (1 + 1e-6)
    model = parallelize_then_shard(with_sinks(), rank.mesh(sp=rank.world_size))
    model(**batch).loss.backward()
    got = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(whole(got), norm, rtol=1e-10, atol=0)
    for name in sinks:
        grad = whole(model.get_parameter(name).grad)
        torch.testing.assert_close(grad, want.grads[name] * 0.1 / (norm + 1e-6), rtol=1e-9, atol=0)


@pytest.mark.parametrize("n", [2, 4])
def test_fc_024_gradients_of_sinks_enter_the_clipping_norm(n: int) -> None:
    """All heads' of both layers, whole on FSDP2's shards. The norm without them is another one."""
    run_on_ranks(clipped_with_sinks, n=n)


class Sliced(nn.Module):
    """Inputs of the exchange that are not contiguous: a slice, transposes, an expanded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        models.fill(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)[:, 4:]
        q = y.unflatten(-1, (4, 2)).transpose(1, 2)
        k = y.flip(-1).unflatten(-1, (2, 4)).mT.transpose(1, 2)
        v = y[..., :2].unsqueeze(1).expand(-1, 4, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.square().sum(), out


def strided_inputs(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 16, 8, generator=generator, dtype=torch.float64)
    assert_same_as_one_device(rank, Sliced, {"x": x}, rank.mesh(sp=rank.world_size))


@pytest.mark.parametrize("n", [2, 4])
def test_fc_084_inputs_of_any_stride(n: int) -> None:
    run_on_ranks(strided_inputs, n=n)


def in_groups(rank: Rank, axes: dict[str, int], kv_heads: int) -> list[int]:
    mesh = rank.mesh(**axes)
    ids = ids_of_t(4)
    batches = [{"ids": part, "labels": part} for part in ids.chunk(2)]
    config = TConfig(heads=4, kv_heads=kv_heads)
    for set_up in (None, parallelize_then_shard):
        assert_same_as_one_device(rank, lambda: ModelT(config), batches, mesh, set_up=set_up)
    return dist.get_process_group_ranks(mesh["sp"].get_group())


def test_fc_096_groups_of_neighbours_and_of_every_other_rank() -> None:
    axes = [{"dp": 2, "sp": 2}, {"sp": 2, "dp": 2}]
    neighbours = run_on_ranks(in_groups, axes[0], 1)
    others = run_on_ranks(in_groups, axes[1], 2)
    assert neighbours == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert others == [[0, 2], [1, 3], [0, 2], [1, 3]]


# cross-modal


class WithTower(ModelT):
    """A row without an image runs the tower on zeros, which the loss does not see."""

    image = 7

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(12, 32).double()
        models.fill(self.tower)

    def forward(self, ids: Tensor, labels: Tensor, pixels: Tensor | None = None) -> Any:  # type: ignore[override]
        x = self.embedding(ids)
        if pixels is None:
            x = x + self.tower(x.new_zeros(4, 12)).sum() * 0
        else:
            marks = (ids == self.image)[..., None].expand_as(x)
            x = x.masked_scatter(marks, self.tower(pixels))
        logits = self.head(self.hidden(x, None, None))
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def tower_sharded(model: nn.Module, mesh: Any) -> nn.Module:
    import autosp_dtensor as autosp

    model = split(model, mesh)
    fully_shard(model.tower, mesh=autosp.fsdp_mesh(mesh))
    for block in model.blocks:
        fully_shard(block, mesh=autosp.fsdp_mesh(mesh))
    return fully_shard(model, mesh=autosp.fsdp_mesh(mesh))


def images_in_some_rows(rank: Rank) -> list[float]:
    mesh = rank.mesh(dp=2, sp=2)
    ids = ids_of_t(2)
    ids[ids == WithTower.image] = 8
    plain = [{"ids": row[None], "labels": row[None]} for row in ids]
    with_image = dict(plain[0], ids=plain[0]["ids"].clone())
    with_image["ids"][0, 6:10] = WithTower.image  # over the cut at 8
    generator = torch.Generator().manual_seed(6)
    with_image["pixels"] = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    losses = []
    for batches in ([with_image, plain[1]], plain):
        want = assert_same_as_one_device(rank, WithTower, batches, mesh, set_up=tower_sharded)
        assert want.loss is not None
        losses.append(want.loss.item())
    return [dp_index(mesh), *losses]


def test_fc_078_rows_with_and_without_an_image_do_not_wait_for_each_other() -> None:
    found = run_on_ranks(images_in_some_rows, timeout=30)
    assert [int(index) for index, *_ in found] == [0, 0, 1, 1]
    assert found[0][1] != found[0][2] and found[2][1] == found[2][2]
