"""What tiles cost a step that would fit without them: sp=1, one process, one CPU thread.

    python benchmarks/tile_time.py [--length 8192] [--vocabulary 32768] [--loss z] [--repeat 7]

A Llama whose logits are large enough for tiles. Forward and backward under tile="none" and "auto",
one after the other in each round, in the processor's time; and the largest resident memory of each,
by a process of its own (Linux). --loss z adds a z-loss: by tiles, its backward runs the final
projection once more, so "auto" asks whether the step fits without: here told that it does (1 TiB),
and that it does not (1 byte).

    python benchmarks/tile_time.py --mlp [--length 8192] [--repeat 7]

One layer with a large MLP, all of which checkpoint="full" runs again in backward anyway.

    python benchmarks/tile_time.py --groups [--length 8192] [--repeat 7]

One layer of 8 heads of 64 and a small MLP under checkpoint="full": all heads at once against 8
groups of one, from the projections on (tile=length, so that nothing else is cut).

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
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import llama, seconds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autosp_dtensor as autosp
from autosp_dtensor.checkpoint.by_heads import ByHeads

MODES: dict[str, dict[str, Any]] = {"none": {"tile": "none"}, "auto": {"tile": "auto"}}
FITS = {"checkpoint": "none", "memory_budget": 1 << 40}
DOES_NOT = {"checkpoint": "none", "memory_budget": 1}


class Scored(nn.Module):
    """A Llama without its own loss: cross entropy and a z-loss, or hidden states' mean."""

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.loss == "mlp":
            return self.model.model(input_ids).last_hidden_state.square().mean()
        logits = self.model(input_ids=input_ids).logits.flatten(0, 1).float()
        z = logits.logsumexp(-1).square().mean()
        return F.cross_entropy(logits, labels.flatten()) + 1e-4 * z


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--loss", choices=("plain", "z"), default="plain")
    parser.add_argument("--mlp", action="store_true", help="a large MLP that runs again")
    parser.add_argument("--groups", action="store_true", help="heads from the projections on")
    parser.add_argument("--memory", help="print the resident memory of one mode's step alone")
    parser.add_argument("--heads", action="store_true", help="attention by heads alone")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if given.heads:
        return attention(given.length, given.repeat)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("sp",))
    plain, modes = made(given)
    ids = torch.randint(0, 256, (1, given.length))
    if given.memory:
        step(autosp.parallelize(plain, mesh, **modes[given.memory]), ids)
        status = Path("/proc/self/status").read_text()  # getrusage tells the parent's as well
        print(next(x.split()[1] for x in status.splitlines() if x.startswith("VmHWM")))
        return
    models = {m: autosp.parallelize(copy.deepcopy(plain), mesh, **o) for m, o in modes.items()}
    for name, model in models.items():
        step(model, ids)
        text = str(autosp.explain(model))
        tiles = [x.split()[1] for x in text.splitlines() if "tiles x" in x]
        groups = max(1, sum(": heads " in x or ", heads " in x for x in text.splitlines()))
        print(f"{name}: tiles {', '.join(tiles) or 'nowhere'}; heads in {groups} groups")
    if not given.groups:
        size = given.length * (4 * 8192 if given.mlp else given.vocabulary) * 4 / 2**20
        what = "an MLP" if given.mlp else "fp32 logits"
        print(f"{given.length:,} tokens: {size:.0f} MiB of {what}")
    rounds = [{m: step(model, ids) for m, model in models.items()} for _ in range(given.repeat)]
    for mode in modes:
        taken = statistics.median(each[mode] for each in rounds)
        ratio = statistics.median(each[mode] / each["none"] for each in rounds)
        own = subprocess.run(
            [sys.executable, __file__, "--memory", mode, *sys.argv[1:]],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        memory = int(own.stdout) / 2**20
        print(f"{mode:<20} {1000 * taken:8.1f} ms, {ratio:.3f} of none; {memory:.2f} GiB")
    dist.destroy_process_group()


def made(given: argparse.Namespace) -> tuple[nn.Module, dict[str, dict[str, Any]]]:
    """The model, and the options of each run by name."""
    if given.mlp or given.groups:
        model = llama(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=8192 if given.mlp else 64,
            num_hidden_layers=1,
            num_attention_heads=8,
            max_position_embeddings=given.length,
        )
        modes = MODES if given.mlp else {"none": MODES["none"], "groups": {"tile": given.length}}
        full = {"checkpoint": "full"}
        return Scored(model, "mlp"), {mode: {**o, **full} for mode, o in modes.items()}
    model = llama(
        vocab_size=given.vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=given.length,
    )
    if given.loss == "plain":
        return model, MODES
    modes = {"none": MODES["none"], "auto, fits": FITS, "auto, does not fit": DOES_NOT}
    return Scored(model, "z"), modes


def step(model: nn.Module, ids: torch.Tensor) -> float:
    """The processor's seconds of forward and backward."""

    def run(input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        found = model(input_ids=input_ids, labels=labels)
        return found if hasattr(found, "loss") else SimpleNamespace(loss=found)

    run.zero_grad = model.zero_grad
    return seconds(run, ids)


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
