"""FIELD-CASES.md, under its numbers: recomputation, how large values get, their precision."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.pool import Rank, run_on_ranks


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes. Backward on a CPU runs in the thread
    that asked for it, so the mode sees it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.count = max(self.count, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


@contextmanager
def largest() -> Iterator[_Largest]:
    mode = _Largest()
    with mode:
        yield mode


class Head(nn.Module):
    """Few features, many classes; `upcast` as most models have it."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(64, 4), nn.Linear(4, 4096, bias=False)
        self.inside = inside

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.table(ids).tanh())
        if not self.inside:
            return logits
        return mean_loss(logits, targets), logits


def mean_loss(logits: Tensor, targets: Tensor | None) -> Tensor:
    assert targets is not None
    return F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())


def chunked(rank: Rank, inside: bool) -> int:
    import autosp_dtensor as autosp

    mesh = rank.mesh(sp=2)
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(4096, (2, 32), generator=torch.Generator().manual_seed(2))
    targets[0, :20], targets[1, 5:9] = -100, -100
    whole, split = Head(inside=inside), Head(inside=inside)
    options = {"tile": 8, "check_ranks": False}  # a hash of the inputs takes a buffer of its own
    split = autosp.parallelize(split, mesh, **options)
    loss = autosp.parallelize(mean_loss, mesh, **options)
    call = (lambda m, f: m(ids, targets)[0]) if inside else (lambda m, f: f(m(ids), targets))
    call(split, loss)  # builds the programs
    with largest() as seen:
        total = call(split, loss)
        total.backward()
    autosp.sync_gradients(split)
    want = call(whole, mean_loss)
    want.backward()
    torch.testing.assert_close(total, want)
    for a, b in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    return seen.count


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_fc_103_logits_exist_for_a_chunk_alone(inside: bool) -> None:
    """V=4096, 64 tokens on two ranks, 8 at a time: 32 tokens of a rank would be 131,072 numbers."""
    for count in run_on_ranks(chunked, inside, n=2):
        assert 8 * 4096 <= count <= 8 * 4096 + 64


class Attends(nn.Module):
    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)
        self.packed = packed

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if not self.packed:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        at = torch.arange(x.shape[1])
        mask = (at[:, None] >= at) & (documents[:, :, None] == documents[:, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2)


def dense(rank: Rank, packed: bool) -> int:
    import autosp_dtensor as autosp

    model = autosp.parallelize(Attends(packed=packed), rank.mesh(sp=4))
    x = torch.randn(2, 2048, 16, generator=torch.Generator().manual_seed(1))
    borders = torch.tensor([[300, 1100, 1101], [64, 1500, 2000]])
    documents = (torch.arange(2048) >= borders[..., None]).sum(1)
    model(x, documents)
    with largest() as seen:
        model(x, documents).square().mean().backward()
    return seen.count


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_fc_104_no_mask_or_scores_of_s_by_s(packed: bool) -> None:
    """B=2, S=2048: half of 2048 x 2048 would be too many as well. (Two heads on four ranks: each
    rank computes both, and the result is whole.)"""
    for count in run_on_ranks(dense, packed, n=4):
        assert count < 2048 * 2048 // 2


class Mixes(nn.Module):
    """Seven operations along the sequence, one after another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "roll": x.roll(1, 1) * x,
            "slice": x[:, 1:].tanh(),
            "flip": x.flip(1) * x,
            "cumsum": x.cumsum(1) * x,
            "pad": F.pad(x, (0, 0, 1, 0))[:, :-1] * x,
            "cat": torch.cat([x[:, 1:], x[:, :1]], 1) * x,
            "conv": self.conv(x.transpose(1, 2)).transpose(1, 2) * x,
        }


def mixes(rank: Rank, n: int) -> str:
    import autosp_dtensor as autosp

    whole = Mixes()
    split = autosp.parallelize(copy.deepcopy(whole), rank.mesh(sp=n))
    x = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, want = split(x), whole(x)
    for name, value in got.items():
        assert isinstance(value, DTensor) and value.placements == (Shard(1),), name
        torch.testing.assert_close(value.full_tensor(), want[name])
    sum(v.square().sum() for v in want.values()).backward()
    total: Any = sum(v.square().sum() for v in got.values())
    total.full_tensor().backward()
    autosp.sync_gradients(split)
    torch.testing.assert_close(split.conv.weight.grad, whole.conv.weight.grad)
    return autosp.explain(split)


@pytest.mark.parametrize("n", [2, 4])
def test_fc_107_operations_along_the_sequence_come_back_sharded(n: int) -> None:
    """What is sent is in the report, by operation and bytes; nothing is gathered but says so."""
    for text in run_on_ranks(mixes, n, n=n):
        sent = [line for line in text.splitlines() if line.startswith(">")]
        assert sent and all("sends" in line for line in sent)


class Flagged(nn.Module):
    """A block that behaves otherwise at its first call, and says so on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(x)
        q = h.unflatten(-1, (2, 4)).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return x + a + self.down(torch.relu(self.up(h)))


class Checkpointed(nn.Module):
    def __init__(self, *, use: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Flagged(), Flagged()])
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.use else block(x)
        return x


def checkpoints(rank: Rank, options: dict[str, Any]) -> list[int]:
    import autosp_dtensor as autosp

    mesh = rank.mesh(dp=1, sp=2)
    whole = Checkpointed(use=False)
    split = Checkpointed(use=True)
    over = autosp.fsdp_mesh(mesh)
    for block in split.blocks:
        fully_shard(block, mesh=over)
    split = autosp.parallelize(fully_shard(split, mesh=over), mesh, **options)
    x = torch.randn(2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        whole.zero_grad()
        split.zero_grad()
        whole(x).square().sum().backward()
        split(x).square().sum().full_tensor().backward()
        held = dict(whole.named_parameters())
        for name, p in split.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), held[name].grad, msg=name)
    return [block.calls for block in split.blocks]


@pytest.mark.parametrize("options", [{}, {"tile": 3}, {"checkpoint": "full"}], ids=str)
def test_fc_081_checkpoint_fsdp2_and_state_on_self(options: dict[str, Any]) -> None:
    """Calls are counted as without checkpointing: recomputation does not run forward's Python."""
    for calls in run_on_ranks(checkpoints, options, n=2):
        assert calls == [2, 2]


class Angles(nn.Module):
    """Rotation angles of the positions that it is given, beside a product in the model's dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids.float()[..., None] * torch.tensor([1.0, 0.1, 0.01])
        return self.linear(self.table(ids)).sum(), angles


def angles_of(rank: Rank, dtype: torch.dtype, cast: bool) -> tuple[Tensor, list[str]]:
    import autosp_dtensor as autosp

    mesh = rank.mesh(dp=1, sp=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
    model = autosp.parallelize(Angles(), mesh)
    fully_shard(model, mesh=autosp.fsdp_mesh(mesh), mp_policy=policy)
    ids = torch.arange(32).view(2, 16)
    position_ids = torch.stack([torch.arange(300000, 300016), torch.arange(16)]).to(dtype)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    log = logging.getLogger("autosp_dtensor")
    log.addHandler(handler)
    try:
        _, angles = model(ids, position_ids)
    finally:
        log.removeHandler(handler)
    return getattr(angles, "full_tensor", lambda: angles)(), said


def test_fc_075_positions_that_fsdp2_rounds_are_told() -> None:
    """Integers are not cast, nor anything if the policy says so; else there is a warning."""
    _, want = Angles()(torch.zeros(2, 16, dtype=torch.int64),
                       torch.stack([torch.arange(300000, 300016), torch.arange(16)]))  # fmt: skip
    for dtype, cast in ((torch.int64, True), (torch.float32, False)):
        for angles, said in run_on_ranks(angles_of, dtype, cast, n=2):
            assert angles.dtype == torch.float32 and torch.equal(angles, want)
            assert not said
    for angles, said in run_on_ranks(angles_of, torch.float32, True, n=2):
        assert (angles[0, :4, 0] == 299008).all()  # it came so
        assert len(said) == 1 and "rounds them" in said[0] and "tensor 1 of FSDPAngles" in said[0]


def far_end(rank: Rank) -> list[int]:
    from autosp_dtensor.lower.exchange import all_to_all
    from autosp_dtensor.placement import Shard as Cut

    half = 2**30 + 1
    source, target = Cut(0, (1, 1)), Cut(1, (half, half))
    x = torch.zeros(1, 2 * half, dtype=torch.int8)
    x[0, -1] = 5 + rank.rank
    (got,) = all_to_all(dist.group.WORLD, rank.rank, ((source, target),), [x])
    assert got.shape == (2, half)
    return got[:, -1].tolist()


@pytest.mark.slow
def test_fc_043_more_than_two_to_the_31_elements_in_an_exchange() -> None:
    """int8, 2**31 + 2 elements on each of two ranks; the last one arrives."""
    first, last = run_on_ranks(far_end, n=2)
    assert first == [0, 0] and last == [5, 6]
