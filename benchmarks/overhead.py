"""What a cached call costs beside the unsharded module, and how many collectives a step makes.

    python benchmarks/overhead.py [--steps 60]

Part 1, one process, sp=1: a Llama of 8 layers and tiny width, where overhead shows most; forward,
and forward with backward, as the median of ratios of alternating steps. Part 2, in a fake group of
4: collectives of one step, counted at torch.distributed, against Ulysses written by hand (one
exchange each for q, k, v and the output).
"""

from __future__ import annotations

import argparse
import collections
import copy
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from ulysses import ulysses_attention

import autosp_dtensor as autosp


def tiny_llama(layers: int = 8) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mesh_of(size: int) -> DeviceMesh:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    return init_device_mesh("cpu", (size,), mesh_dim_names=("sp",))


def overhead(steps: int) -> None:
    mesh = mesh_of(1)
    plain = tiny_llama()
    split = autosp.parallelize(copy.deepcopy(plain), mesh)
    ids = torch.randint(0, 256, (1, 32))
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "autosp": []}

    def step(model: nn.Module) -> tuple[float, float]:
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - start

    for _ in range(5):
        step(plain)
        step(split)
    for _ in range(steps):
        times["plain"].append(step(plain))
        times["autosp"].append(step(split))
    for part, name in enumerate(("forward", "forward and backward")):
        ratios = [b[part] / a[part] for a, b in zip(times["plain"], times["autosp"], strict=True)]
        medians = [
            1000 * statistics.median(t[part] for t in times[kind]) for kind in ("plain", "autosp")
        ]
        print(
            f"sp=1, {name}: {medians[0]:.2f} ms unsharded, {medians[1]:.2f} ms autosp, "
            f"ratio {statistics.median(ratios):.3f}"
        )


class Counter:
    """Counts calls of torch.distributed's collectives."""

    names = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "all_gather_single",
             "reduce_scatter_tensor", "reduce_scatter_single")  # fmt: skip

    def __enter__(self) -> collections.Counter[str]:
        self.counts: collections.Counter[str] = collections.Counter()
        self.saved = {name: getattr(dist, name) for name in self.names if hasattr(dist, name)}
        for name, function in self.saved.items():
            setattr(dist, name, self._counting(name, function))
        return self.counts

    def _counting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, function in self.saved.items():
            setattr(dist, name, function)


def collectives(layers: int = 4, size: int = 4) -> None:
    mesh = mesh_of(size)
    ids = torch.randint(0, 256, (1, 32))
    model = autosp.parallelize(tiny_llama(layers), mesh, check_ranks=False)
    model(input_ids=ids, labels=ids)  # traced once
    with Counter() as ours:
        model(input_ids=ids, labels=ids).loss.backward()
    q, k, v = (torch.randn(1, 32 // size, 4, 8, requires_grad=True) for _ in range(3))
    with Counter() as theirs:
        for _ in range(layers):
            ulysses_attention(q, k, v, mesh.get_group()).sum().backward()
    print(
        f"collectives per step, {layers} layers, sp={size}: autosp {dict(ours)}, "
        f"Ulysses by hand {dict(theirs)} and its loss"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    overhead(options.steps)
    collectives()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
