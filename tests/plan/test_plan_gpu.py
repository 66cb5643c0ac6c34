"""A plan against a training step that runs: on a GPU by its allocator; on a CPU, where the same
code runs at sizes of its own, by torch's memory tracker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import autosp_dtensor as autosp
from autosp_dtensor._torch import memory_tracker
from autosp_dtensor.cost import DEVICES
from autosp_dtensor.plan.configs import model_maker
from autosp_dtensor.plan.kernels import KernelWorkspace
from autosp_dtensor.plan.measure import Setting, fake_group, measure

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@dataclass(frozen=True)
class Sizes:
    """A model of four layers, a length, how many tokens make a tile, and the least that a step is
    to take: so much that what libraries keep for themselves (cuBLAS: 32 MiB) is small beside it."""

    hidden: int
    vocabulary: int
    length: int
    tile: int
    least: int

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama", "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0,
        }  # fmt: skip


GPU = {
    "none": Sizes(1024, 8192, 1 << 15, 4096, 4 << 30),
    "full": Sizes(1024, 8192, 5 << 15, 4096, 4 << 30),
}
CPU = {"none": Sizes(64, 512, 512, 64, 1 << 20), "full": Sizes(64, 512, 512, 64, 1 << 20)}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = [pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU]), "cpu"]


@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("device", DEVICE)
def test_a_step_takes_what_was_planned(device: str, checkpoint: str) -> None:
    """Within 5%: of fake tensors on the CPU, with a GPU's kernels counted, and of real ones."""
    sizes = (GPU if device == "cuda" else CPU)[checkpoint]
    setting = Setting(
        model_maker(sizes.config)[1], 1, 1, checkpoint, device=DEVICES["h200-141gb"],
        tile="none" if checkpoint == "none" else sizes.tile,
    )  # fmt: skip
    with fake_group(1):
        planned = measure(setting, sizes.length)
    assert planned.peak >= sizes.least
    taken = peak_of_a_step(device, setting, sizes)
    assert planned.peak == pytest.approx(taken, rel=0.05), planned.kinds


def peak_of_a_step(device: str, setting: Setting, sizes: Sizes) -> int:
    """The most bytes on the device during the second step of a training, written as users do."""
    with one_rank("nccl" if device == "cuda" else "gloo"):
        mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("dp", "sp"))
        with torch.device(device):
            model: Any = setting.make()
        autosp.parallelize(model, mesh, checkpoint=setting.checkpoint, tile=setting.tile)
        around = autosp.fsdp_mesh(mesh)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.model.layers:
            fully_shard(block, mesh=around, mp_policy=policy)
        fully_shard(model, mesh=around, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ids = torch.randint(1, sizes.vocabulary, (1, sizes.length), device=device)

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # traces, and makes the optimizer's state
        counted = of_allocator if device == "cuda" else of_tracker
        return counted(step, model, optimizer, ids)


@contextlib.contextmanager
def one_rank(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_allocator(step: Callable[[], None], *_: Any) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def of_tracker(step: Callable[[], None], model: Any, optimizer: Any, ids: torch.Tensor) -> int:
    peak = 0

    def see(live: dict[Any, int]) -> None:
        nonlocal peak
        peak = max(peak, live["Total"])

    tracker = memory_tracker(model, optimizer, see, lambda: True, {})
    tracker.track_inputs((ids,))
    with tracker, KernelWorkspace():  # the CPU's kernel has no workspace, which a GPU's has
        step()
    return peak
