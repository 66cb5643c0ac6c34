"""Attention over split sequences, and packed documents, against Ulysses written by hand.

    python benchmarks/attention.py [--lengths 8192 32768] [--repeat 5] [--forward-only]

Starts two gloo ranks with one thread each. B=1, H=8, D=64, fp32. Part 1: causal attention from
[B, S/2, H, D] to [B, S/2, H, D], exchanges included; both sides alternate in one run and the median
of the ratios counts. Part 2: the same with packed documents of 1,024 tokens, autosp against
scaled_dot_product_attention with the dense mask, inside the same hand-written exchange. The
all-to-alls of a step are counted on both sides: q, k and v go in one, the result in one.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn
from ulysses import ulysses_attention

import autosp_dtensor as autosp

HEADS, HEAD_DIM, DOCUMENT = 8, 64, 1024


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain causal attention as written for one device, [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document: torch.Tensor
) -> torch.Tensor:
    """Causal attention inside documents, [B, S, H, D] and ids [B, S]."""
    position = torch.arange(q.shape[1], device=q.device)
    same = document[:, None, :, None] == document[:, None, None, :]
    mask = same & (position[:, None] >= position[None, :])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def ratio(
    ours: Callable[[], None], theirs: Callable[[], None], repeat: int
) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the ratios of alternating runs."""
    times: list[tuple[float, float]] = []
    for run in range(repeat + 1):
        pair = []
        for function in (ours, theirs):
            dist.barrier()
            start = time.perf_counter()
            function()
            dist.barrier()
            pair.append(time.perf_counter() - start)
        if run:  # the first traces and warms up
            times.append((pair[0], pair[1]))
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return a, b, statistics.median(x / y for x, y in times)


def exchanges(step: Callable[[], None]) -> int:
    """All-to-alls of one step."""
    count, real = 0, dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        step()
    return count


def worker(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    group = mesh.get_group()
    backward = not options.forward_only
    split_causal = autosp.parallelize(causal, mesh, check_ranks=False)
    split_packed = autosp.parallelize(packed, mesh, check_ranks=False)
    for length in options.lengths:
        torch.manual_seed(rank)
        q, k, v = (
            torch.randn(1, length // 2, HEADS, HEAD_DIM, requires_grad=backward) for _ in range(3)
        )
        whole = [DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in (q, k, v)]
        grad = torch.randn(1, length // 2, HEADS, HEAD_DIM)
        document = (torch.arange(length) // DOCUMENT).unsqueeze(0)
        dense = (document[:, None, :, None] == document[:, None, None, :]).tril()

        def step(out: torch.Tensor, grad: torch.Tensor = grad) -> None:
            if isinstance(out, DTensor):
                out = out.to_local()
            if backward:
                out.backward(grad, retain_graph=True)

        def report(
            name: str, ours: Callable[[], None], theirs: Callable[[], None], length: int = length
        ) -> None:
            a, b, middle = ratio(ours, theirs, options.repeat)
            sent, by_hand = exchanges(ours), exchanges(theirs)
            assert sent == (4 if backward else 2), f"{sent} all-to-alls"
            if rank == 0:
                part = "forward and backward" if backward else "forward"
                print(
                    f"S={length} sp=2 {name}, {part}: autosp {a:.3f} s, by hand {b:.3f} s, "
                    f"ratio {middle:.3f}; all-to-alls {sent}, by hand {by_hand}",
                    flush=True,
                )

        report(
            "causal",
            lambda whole=whole: step(split_causal(*whole)),
            lambda q=q, k=k, v=v: step(ulysses_attention(q, k, v, group)),
        )
        report(
            f"documents of {DOCUMENT}",
            lambda whole=whole, ids=document: step(split_packed(*whole, document=ids)),
            lambda q=q, k=k, v=v, dense=dense: step(ulysses_attention(q, k, v, group, mask=dense)),
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--forward-only", action="store_true")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(worker, (port, options), 2)


if __name__ == "__main__":
    main()
