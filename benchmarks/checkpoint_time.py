"""What computing activations again costs in time: sp=1, one process, one CPU thread.

    python benchmarks/checkpoint_time.py [--length 2048] [--width 128] [--layers 6] [--repeat 9]

A Llama whose attention is at least half of its FLOPs. Forward and backward under checkpoint="none",
"sequence" (attention's output is kept, the rest runs again) and "full", one after the other in each
round. Prints the median of each and the median of the ratios to "none" in the same round, in the
processor's time, which other processes disturb less than the clock's.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings

import torch
import torch.distributed as dist
from steps import llama, seconds
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autosp_dtensor as autosp

MODES = ("none", "sequence", "full")


def attention_share(width: int, length: int) -> float:
    """Of a block's FLOPs: causal scores and their product with V, 2 S d a token; 26 d^2 of
    projections (4 d^2 around attention, 9 d^2 in the MLP, each twice)."""
    return 2 * length * width / (2 * length * width + 26 * width**2)


def more_flops(width: int, length: int) -> float:
    """Of a step, what "sequence" runs again: all but attention and the MLP's last projection, which
    nobody asks for. A product's backward is twice its forward, attention's is 2.5 times (its
    scores are made again)."""
    attention, rest = 2 * length * width, 26 * width**2
    return (rest - 6 * width**2) / (3 * rest + 3.5 * attention)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=9)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("sp",))
    plain = llama(
        vocab_size=256,
        hidden_size=given.width,
        intermediate_size=3 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 32,
        max_position_embeddings=given.length,
    )
    models = {m: autosp.parallelize(copy.deepcopy(plain), mesh, checkpoint=m) for m in MODES}
    ids = torch.randint(0, 256, (1, given.length))
    share = attention_share(given.width, given.length)
    print(
        f"{given.length:,} tokens, width {given.width}, {given.layers} layers: attention is "
        f'{share:.0%} of a block\'s FLOPs; by FLOPs alone "sequence" takes '
        f"{1 + more_flops(given.width, given.length):.3f} of none"
    )
    for model in models.values():
        seconds(model, ids)
    rounds = [{m: seconds(model, ids) for m, model in models.items()} for _ in range(given.repeat)]
    for mode in MODES:
        taken = statistics.median(each[mode] for each in rounds)
        ratio = statistics.median(each[mode] / each["none"] for each in rounds)
        print(f"checkpoint={mode!r:<11} {1000 * taken:8.1f} ms, {ratio:.3f} of none")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
