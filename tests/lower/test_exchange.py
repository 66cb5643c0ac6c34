"""What travels has one order on all ranks, whatever their strides; only needed copies are made."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autosp_dtensor.lower import exchange
from autosp_dtensor.placement import Shard, chunk_sizes
from tests.lower import wire
from tests.lower.wire import on_ranks
from tests.pieces import cut, shardings
from tests.simulate import lowered


def laid(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, dims in memory in another order."""
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def memory_order(x: Tensor) -> list[int]:
    return sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -x.stride(d))


def _shards(dim: int, length: int, n: int) -> list[Shard]:
    return [Shard(dim, sizes, outer) for sizes, outer in shardings(length, n)]


@pytest.mark.parametrize("tokens", [None, 1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_may_lay_their_parts_out_differently(n: int, batch: int, tokens: int | None) -> None:
    """Values and gradients, bit for bit: each rank, and each gradient, in an order of its own."""
    whole = torch.randn(batch, 12, 8, 3, generator=torch.Generator().manual_seed(n))
    orders = list(itertools.permutations(range(4)))
    for number, pair in enumerate(itertools.product(_shards(1, 12, n), _shards(2, 8, n))):
        source, target = pair if number % 2 else pair[::-1]
        parts = cut(whole, source, n)
        wanted = cut(whole, target, n)

        def body(group: Any, rank: int, number=number, move=(source, target), parts=parts) -> Any:
            order, other = orders[(5 * number + 7 * rank) % 24], orders[(number + 11 * rank) % 24]
            x = laid(parts[rank], order).requires_grad_()
            (out,) = exchange.all_to_all(group, rank, (move,), [x], tokens=(tokens,))
            grad = laid(out.detach() * 2, other)
            return out.detach(), torch.autograd.grad(out, x, grad)[0]

        results, _ = on_ranks(n, body)
        for (out, grad), want, part in zip(results, wanted, parts, strict=True):
            assert torch.equal(out, want), f"{source} -> {target}"
            assert torch.equal(grad, part * 2), f"{source} -> {target}"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_dims_of_the_result_lie_as_those_of_the_input(order: tuple[int, ...]) -> None:
    move = Shard(2, (4, 4)), Shard(1, (3, 3))
    parts = cut(torch.randn(2, 6, 8, 5), move[0], 2)

    def body(group: Any, rank: int) -> Tensor:
        x = laid(parts[rank], order)
        return exchange.all_to_all(group, rank, (move,), [x], tokens=(2,))[0]

    for out in on_ranks(2, body)[0]:
        assert memory_order(out) == list(order)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
@pytest.mark.parametrize("batch", [1, 2])
def test_contiguous_results_and_gradients_as_their_values(
    batch: int, sizes: tuple[int, int]
) -> None:
    """Laid out as attention reads them, and back as the model had them, whatever comes back."""
    move = Shard(2, (4, 4)), Shard(1, sizes)
    wholes = [torch.randn(batch, 6, 8, 5) + k for k in range(3)]
    parts = [cut(x, move[0], 2) for x in wholes]
    wanted = [cut(x, move[1], 2) for x in wholes]

    def body(group: Any, rank: int) -> Any:
        mine = [laid(p[rank], (0, 2, 1, 3)).requires_grad_() for p in parts]
        outs = exchange.all_to_all(
            group, rank, (move,) * 3, [*mine], tokens=(2,) * 3, contiguous=(False, True, True)
        )
        grads = [laid(outs[0].detach() * 2, (0, 1, 2, 3)), outs[1].detach() * 2,
                 laid(outs[2].detach() * 2, (2, 0, 1, 3))]  # fmt: skip
        return [x.detach() for x in outs], torch.autograd.grad(outs, mine, grads)

    for rank, (outs, grads) in enumerate(on_ranks(2, body)[0]):
        for k, (out, grad) in enumerate(zip(outs, grads, strict=True)):
            assert torch.equal(out, wanted[k][rank])
            assert (out if k else out.transpose(1, 2)).is_contiguous()
            assert out.untyped_storage().nbytes() == out.nbytes, "memory is not shared"
            assert torch.equal(grad, parts[k][rank] * 2)
            assert (grad.transpose(1, 2) if k else grad).is_contiguous()


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("copy_", "clone", "cat")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Copies that one exchange of these values makes, on each rank."""
    real = wire._all_to_all

    def sent(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # the stand-in for a network copies as well
            real(*args, **kwargs)

    monkeypatch.setattr(wire, "_all_to_all", sent)

    def count(
        move: tuple[Shard, Shard], tokens: int, *values: Tensor, contiguous: tuple[bool, ...] = ()
    ) -> list[int]:
        parts = [cut(x, move[0], 2) for x in values]

        def body(group: Any, rank: int) -> int:
            mine = [p[rank].transpose(1, 2).contiguous().transpose(1, 2) for p in parts]
            with Copies() as copies:
                exchange.all_to_all(
                    group,
                    rank,
                    (move,) * len(mine),
                    [*mine],
                    tokens=(tokens,) * len(mine),
                    contiguous=contiguous,
                )
            return copies.count

        return on_ranks(2, body)[0]

    return count


@pytest.mark.parametrize("back", [False, True])
def test_one_value_of_one_row_is_copied_once(counted: Callable[..., list[int]], back: bool) -> None:
    """[1, H, S, D] in memory as [1, S, H, D]: what comes in, or what goes out, lies ready."""
    move = Shard(2, (4, 4)), Shard(1, (3, 3))
    assert counted(move[::-1] if back else move, 2, torch.randn(1, 6, 8, 5)) == [1, 1]


def test_no_value_is_copied_more_than_twice(counted: Callable[..., list[int]]) -> None:
    move, by_head = (Shard(2, (4, 4)), Shard(1, (3, 3))), (False, True, True)
    assert counted(move, 2, torch.randn(2, 6, 8, 5)) == [2, 2]
    assert counted(move, 2, *(torch.randn(2, 6, 8, 5) for _ in "qkv")) == [6, 6]
    assert counted(move, 2, *(torch.randn(2, 6, 8, 5) for _ in "qkv"), contiguous=by_head) == [6, 6]
    assert counted(move, 2, *(torch.randn(1, 6, 8, 5) for _ in "qkv"), contiguous=by_head) == [6, 6]


def test_values_of_one_row_for_one_operation_come_in_ready(
    counted: Callable[..., list[int]],
) -> None:
    """q, k and v lie side by side on the wire; not where their head sizes differ."""
    q = torch.randn(1, 6, 8, 5)
    to_heads = Shard(2, (4, 4)), Shard(1, (3, 3))
    assert counted(to_heads, 2, q, q + 1, q + 2) == [3, 3]
    assert counted(to_heads[::-1], 2, q, q + 1, q + 2) == [6, 6]
    assert counted(to_heads, 2, q, torch.randn(1, 6, 8, 7)) == [4, 4]


@pytest.mark.parametrize("to_heads", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_several_values_in_one_exchange(n: int, to_heads: bool) -> None:
    """Values and gradients, bit for bit: other numbers of heads, other head sizes, any strides."""
    for heads, sizes, batch in itertools.product(
        [(6, 6, 6), (12, 6, 6)], [(5, 5, 5), (5, 5, 3)], [1, 2]
    ):
        wholes = [
            torch.randn(batch, h, 12, d, generator=torch.Generator().manual_seed(h + d))
            for h, d in zip(heads, sizes, strict=True)
        ]
        pairs = [(Shard(2, (12 // n,) * n), Shard(1, (h // n,) * n)) for h in heads]
        moves = tuple(pair if to_heads else pair[::-1] for pair in pairs)
        parts = [cut(x, move[0], n) for x, move in zip(wholes, moves, strict=True)]
        wanted = [cut(x, move[1], n) for x, move in zip(wholes, moves, strict=True)]

        def body(group: Any, rank: int, parts=parts, moves=moves) -> Any:
            order = (0, 2, 1, 3) if rank % 2 else (0, 1, 2, 3)
            mine = [laid(p[rank], order).requires_grad_() for p in parts]
            outs = exchange.all_to_all(group, rank, moves, [*mine], tokens=(2, 2, 2))
            outs = [out * k for k, out in enumerate(outs, 1)]
            grads = torch.autograd.grad(outs, mine, [out.detach() for out in outs])
            return [out.detach() for out in outs], grads

        for rank, (outs, grads) in enumerate(on_ranks(n, body)[0]):
            for k, want in enumerate(wanted):
                assert torch.equal(outs[k], want[rank] * (k + 1))
                assert torch.equal(grads[k], parts[k][rank] * (k + 1) * (k + 1))


@pytest.mark.parametrize("heads_first", [True, False])
def test_program_says_which_dim_counts_tokens(heads_first: bool) -> None:
    table = torch.randn(16, 24, dtype=torch.float64)

    def forward(ids: Tensor) -> Tensor:
        x = F.embedding(ids, table).unflatten(-1, (4, 6))
        q = x.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q + 1, q + 2, is_causal=True)
        return (y if heads_first else y.transpose(1, 2)) * 2

    program = lowered(forward, (torch.zeros(2, 8, dtype=torch.int64),), 2)
    exchanges = program.named("all_to_all")
    assert exchanges
    for node in exchanges:
        for (source, target), tokens in zip(node.target.moves, node.target.tokens, strict=True):
            assert tokens in (source.dim, target.dim)
            sizes = source.sizes if tokens == source.dim else target.sizes
            assert sizes == (4, 4)  # of 8 tokens, not of 4 heads


def test_on_a_cpu_attention_reads_heads_that_lie_together() -> None:
    """Its kernel is the slower the further apart a head's rows are, of keys and values."""
    table = torch.randn(16, 24, dtype=torch.float64)

    def forward(ids: Tensor) -> Tensor:
        x = F.embedding(ids, table).unflatten(-1, (4, 6)).transpose(1, 2)
        y = F.scaled_dot_product_attention(x, x + 1, x + 2, is_causal=True)
        return y.cumsum(2) * 2

    program = lowered(forward, (torch.zeros(2, 8, dtype=torch.int64),), 2)
    moved, back = (node.target.contiguous for node in program.named("all_to_all"))
    assert (moved, back) == ((False, True, True), (False,))  # q, k, v; the result


def test_other_operations_read_what_they_find() -> None:
    """No rule says that another operation takes any strides: a view of its input may follow."""
    x = torch.randn(2, 4, 8)
    program = lowered(lambda x: x.cumsum(2), (x,), 2, 2, sharded={0: Shard(2, (4, 4))})
    (there, *_) = program.named("all_to_all")
    (move,) = there.target.moves
    assert move[1].dim < move[0].dim and there.target.contiguous == (False,)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("heads", [4, 3])
def test_what_was_packed_is_gone_before_there_is_memory_for_what_comes_in(
    heads: int, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even parts and uneven ones, of values that the exchange alone holds."""
    move = (Shard(1, chunk_sizes(6, 2)), Shard(2, chunk_sizes(heads, 2)))
    packed: dict[int, list[StorageWeakRef]] = {}
    gone: list[bool] = []
    depart = exchange._Flight.depart

    def watched(self: Any) -> None:
        gone.extend(ref.expired() for ref in packed[self.group.rank])
        depart(self)

    def body(group: Any, rank: int) -> None:
        start = torch.ones(2, 3, heads, 4, requires_grad=grad)
        given = [start + k for k in range(3)]  # whose backward saves nothing
        packed[rank] = [StorageWeakRef(x.untyped_storage()) for x in given]
        exchange.all_to_all(group, rank, (move,) * 3, given)

    monkeypatch.setattr(exchange._Flight, "depart", watched)
    on_ranks(2, body)
    assert len(gone) == 6 and all(gone)
