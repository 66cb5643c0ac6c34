"""Ranks as threads of one process, and what they need of torch.distributed, over lists.

Each rank passes its own `Wire` as the group. Autograd runs a CPU graph in the thread that calls
backward, so ranks go through both directions side by side as processes would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autosp_dtensor.lower import collectives


class _Shared:
    def __init__(self, n: int) -> None:
        self.n = n
        self.slots: list[Any] = [None] * n
        self.barrier = threading.Barrier(n, timeout=20)
        self.calls: list[str] = []


class Wire:
    """One rank's end. `exchange` gives what all ranks brought, in rank order."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.shared, self.rank = shared, rank

    def exchange(self, kind: str, mine: Any) -> list[Any]:
        shared = self.shared
        shared.slots[self.rank] = mine
        if self.rank == 0:
            shared.calls.append(kind)
        shared.barrier.wait()
        everyone = list(shared.slots)
        shared.barrier.wait()
        return everyone


def _all_to_all(
    received: Tensor,
    sent: Tensor,
    ins: Any = None,
    outs: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> None:
    n = group.shared.n
    assert received.is_contiguous() and sent.is_contiguous()
    ins = ins or [received.shape[0] // n] * n
    outs = outs or [sent.shape[0] // n] * n
    assert sum(ins) == received.shape[0] and sum(outs) == sent.shape[0]
    parts = group.exchange("all_to_all", sent.detach().split(outs))
    mine = [theirs[group.rank] for theirs in parts]
    assert [part.shape[0] for part in mine] == list(ins), "what is sent is what is waited for"
    received.copy_(torch.cat(mine))


def _all_gather(received: Tensor, sent: Tensor, group: Any = None) -> None:
    assert received.is_contiguous() and sent.is_contiguous()
    received.copy_(torch.cat(group.exchange("all_gather", sent.detach())).view(received.shape))


def _reduce_scatter(received: Tensor, sent: Tensor, group: Any = None) -> None:
    assert received.is_contiguous() and sent.is_contiguous()
    total = sum(group.exchange("reduce_scatter", sent.detach()))
    received.copy_(total.chunk(group.shared.n)[group.rank].view(received.shape))


def _all_reduce(x: Tensor, group: Any = None) -> None:
    assert x.is_contiguous()
    x.copy_(sum(group.exchange("all_reduce", x.detach().clone())))


@contextmanager
def _wired() -> Iterator[None]:
    places = [
        (dist, "all_to_all_single", _all_to_all),
        (dist, "all_reduce", _all_reduce),
        (collectives, "all_gather_single", _all_gather),
        (collectives, "reduce_scatter_single", _reduce_scatter),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, function in places:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def on_ranks(n: int, body: Callable[[Wire, int], Any]) -> tuple[list[Any], list[str]]:
    """What `body(group, rank)` returns on each of n ranks, and which collectives were made."""
    shared = _Shared(n)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(Wire(shared, rank), rank)
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    with _wired():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:  # the first one, not what the others saw of it
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results, shared.calls
