"""What tiles cost a step that would fit without them: sp=1, one process, one CPU thread.

    python benchmarks/tile_time.py [--length 8192] [--vocabulary 32768] [--repeat 7]

A Llama whose logits are large enough for tile="auto" to tile its loss. Forward and backward under
tile="none" and "auto", one after the other in each round, in the processor's time; and the largest
resident memory of each, by a process of its own (Linux).

    python benchmarks/tile_time.py --heads [--length 8192] [--repeat 7]

Causal attention alone, 8 heads of 64, fp32, forward and backward: one call against one for each
head, in the processor's time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import llama, seconds
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autosp_dtensor as autosp
from autosp_dtensor.checkpoint.by_heads import ByHeads

MODES = ("none", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--memory", choices=MODES, help="print a step's resident memory alone")
    parser.add_argument("--heads", action="store_true", help="attention by heads alone")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if given.heads:
        return attention(given.length, given.repeat)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("sp",))
    plain = llama(
        vocab_size=given.vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=given.length,
    )
    ids = torch.randint(0, 256, (1, given.length))
    if given.memory:
        seconds(autosp.parallelize(plain, mesh, tile=given.memory), ids)
        status = Path("/proc/self/status").read_text()  # getrusage tells the parent's as well
        print(next(x.split()[1] for x in status.splitlines() if x.startswith("VmHWM")))
        return
    models = {m: autosp.parallelize(copy.deepcopy(plain), mesh, tile=m) for m in MODES}
    for model in models.values():
        seconds(model, ids)
    (found,) = {line.split()[1] for line in str(autosp.explain(models["auto"])).splitlines()
                if "tiles x" in line}  # fmt: skip
    size = given.length * given.vocabulary * 4 / 2**20
    print(f"{given.length:,} tokens, {given.vocabulary:,} classes: {size:.0f} MiB of fp32 logits, "
          f"tiles {found}")  # fmt: skip
    rounds = [{m: seconds(model, ids) for m, model in models.items()} for _ in range(given.repeat)]
    for mode in MODES:
        taken = statistics.median(each[mode] for each in rounds)
        ratio = statistics.median(each[mode] / each["none"] for each in rounds)
        own = subprocess.run(
            [sys.executable, __file__, "--memory", mode, "--length", str(given.length),
             "--vocabulary", str(given.vocabulary)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        memory = int(own.stdout) / 2**20
        print(f"tile={mode!r:<7} {1000 * taken:8.1f} ms, {ratio:.3f} of none; {memory:.2f} GiB")
    dist.destroy_process_group()


def attention(length: int, repeat: int) -> None:
    one = F.scaled_dot_product_attention
    for key_heads in (8, 2):
        q, k, v = (torch.randn(1, h, length, 64, requires_grad=True) for h in (8, *[key_heads] * 2))
        gradient = torch.randn_like(q)
        taken: dict[str, list[float]] = {"one call": [], "a call for each head": []}
        for _ in range(repeat + 1):  # the first warms up
            for name, call in zip(taken, (one, ByHeads(one, None)), strict=True):
                start = time.process_time()
                call(q, k, v, is_causal=True, enable_gqa=key_heads != 8).backward(gradient)
                taken[name].append(time.process_time() - start)
        rounds = list(zip(*(each[1:] for each in taken.values()), strict=True))
        ratio = statistics.median(b / a for a, b in rounds)
        whole = statistics.median(a for a, _ in rounds)
        print(f"{length:,} tokens, 8 heads, {key_heads} key heads: {1000 * whole:.0f} ms in one "
              f"call, {ratio:.3f} of that in a call for each head")  # fmt: skip


if __name__ == "__main__":
    main()
