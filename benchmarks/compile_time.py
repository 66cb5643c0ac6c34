"""How long the compiler takes: Llama-3.1-8B, 131,072 tokens, sp=8, in a fake group on one CPU.

    python benchmarks/compile_time.py [--layers 32] [--seq 131072] [--sp 8] [--no-compile]

Prints seconds for each stage, peak memory of the process, how much one more layer costs, and in the
same run the time that the front end of torch.compile (fullgraph, a backend that does nothing) takes
on the same model.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.lower import cut_regions, lower
from autosp_dtensor.place import place
from autosp_dtensor.placement import Replicate
from autosp_dtensor.run.build import block_paths, region_paths


def llama(layers: int) -> nn.Module:
    """Llama-3.1-8B's sizes (meta-llama/Llama-3.1-8B, config.json), without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def stages(model: nn.Module, length: int, axis_size: int) -> tuple[dict[str, float], int]:
    """Seconds of each stage, and the number of operations in the lowered program."""
    ids = torch.empty((1, length), dtype=torch.int64, device="meta")
    clock = [time.perf_counter()]

    def lap(result: Any) -> Any:
        clock.append(time.perf_counter())
        return result

    call = read_call(model, (), {"input_ids": ids, "labels": ids}, lambda _: Replicate())
    captured = lap(capture(call))
    blocks, regions = frozenset(block_paths(model)), frozenset(region_paths(model, set()))
    placed = lap(place(captured.graph, axis_size, [None, None], 1, blocks=blocks, regions=regions))
    flat = lap(lower(placed, axis_size, captured.fake_mode))
    lap(cut_regions(flat, set(regions)))
    names = ("ghost and trace", "place", "lower and verify", "regions")
    laps = [after - before for before, after in itertools.pairwise(clock)]
    return dict(zip(names, laps, strict=True)), len(flat.nodes)


def compile_front_end(model: nn.Module, length: int) -> float:
    """Seconds until torch.compile hands a whole graph to its backend."""
    ids = torch.empty((1, length), dtype=torch.int64, device="meta")
    reached: list[float] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reached.append(time.perf_counter())
        return graph.forward

    start = time.perf_counter()
    torch.compile(model, fullgraph=True, backend=backend)(input_ids=ids, labels=ids)
    return reached[0] - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seq", type=int, default=131072)
    parser.add_argument("--sp", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many runs counts")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    model = llama(options.layers)
    small = llama(max(options.layers // 2, 1))
    stages(llama(1), 1024, options.sp)  # imports and first-use tables
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runs = [stages(model, options.seq, options.sp) for _ in range(options.repeat)]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best, operations = min(runs, key=lambda run: sum(run[0].values()))
    total = sum(best.values())
    print(
        f"{options.layers} layers, {options.seq} tokens, sp={options.sp}: {operations} nodes "
        "around the repeated blocks"
    )
    for name, seconds in best.items():
        print(f"  {name:<18}{seconds:7.2f} s")
    print(f"  {'total':<18}{total:7.2f} s")
    print(
        f"  peak memory       {after / 2**10:7.0f} MiB, of which before: {before / 2**10:.0f} MiB"
    )
    half = min(
        (stages(small, options.seq, options.sp)[0] for _ in range(options.repeat)),
        key=lambda s: sum(s.values()),
    )
    fewer = options.layers - max(options.layers // 2, 1)
    for name in ("ghost and trace", "place", "lower and verify", "regions"):
        each = 1000 * (best[name] - half[name]) / max(fewer, 1)
        print(f"  one more layer, {name:<17}{each:6.1f} ms")
    if not options.no_compile:
        seconds = compile_front_end(model, options.seq)
        print(
            f"  torch.compile's front end {seconds:.2f} s: {seconds / total:.1f} times all of the "
            "above"
        )


if __name__ == "__main__":
    main()
