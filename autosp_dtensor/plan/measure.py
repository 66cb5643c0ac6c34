"""One training step on tensors without data, in a fake group: live bytes by kind, at their peak."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .._torch import FakeTensorMode, memory_tools
from ..api import explain, forward_of, parallelize
from ..checkpoint import Device
from ..errors import UsageError
from ..mesh import fsdp_mesh
from ..run import block_paths

__all__ = ["Setting", "Step", "fake_group", "measure"]

_KINDS = {
    "SHARDED_PARAM": "parameters",
    "UNSHARDED_PARAM": "gathered parameters",
    "BUFFER": "buffers",
    "SHARDED_GRAD": "gradients",
    "UNSHARDED_GRAD": "gathered gradients",
    "ACT": "kept for backward",
    "TEMP": "temporaries",
    "ALL_GATHER": "gathering",
    "REDUCE_SCATTER": "reducing",
    "OPT": "optimizer",
    "INP": "inputs",
}


@dataclass(frozen=True)
class Setting:
    """What is planned: FSDP2 on blocks and root over dp x sp, AdamW in fp32, compute in `dtype`.

    sp=1 is FSDP2 alone. budget: bytes that "auto" may plan with. device: whose figures it plans
    with. host: bytes of host memory of each rank, 0 for none.
    """

    make: Callable[[], nn.Module]
    dp: int
    sp: int
    checkpoint: Any = "auto"
    budget: int | None = None
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    device: Device | None = None
    host: int = 0


@dataclass(frozen=True)
class Step:
    """Bytes of one rank at the peak of a step, by kind, and what `explain` says of memory. host:
    bytes in host memory, at their own peak.
    """

    length: int
    peak: int
    kinds: dict[str, int]
    note: str
    seconds: float
    host: int = 0


@contextlib.contextmanager
def fake_group(size: int) -> Iterator[None]:
    """A process group of this size in one process, whose collectives do nothing."""
    if dist.is_initialized():
        raise UsageError(
            "a plan needs a process of its own.",
            where="autosp.plan",
            have="torch.distributed is initialized here",
            why="it makes a fake group of the size that is planned for",
            fix="python -m autosp_dtensor plan ..., or call it before init_process_group",
        )
    store, _ = memory_tools()
    dist.init_process_group("fake", rank=0, world_size=size, store=store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(setting: Setting, length: int, *, fake: bool = True) -> Step:
    """Run two steps inside a `fake_group`, the second one watched.

    fake: on tensors without data; else on real ones, to check those against: the same bytes.
    """
    started = time.perf_counter()
    mesh = init_device_mesh("cpu", (setting.dp, setting.sp), mesh_dim_names=("dp", "sp"))
    around = fsdp_mesh(mesh)  # made before there are fake tensors
    mode: Any = FakeTensorMode() if fake else contextlib.nullcontext()
    with mode:
        model = setting.make()
        ids = torch.zeros(setting.batch, length, dtype=torch.int64)
    options: dict[str, Any] = {"checkpoint": setting.checkpoint}
    if setting.host:
        options["offload"] = setting.host
    if setting.budget is not None and (setting.checkpoint == "auto" or setting.host):
        options["memory_budget"] = setting.budget
    model = parallelize(model, mesh, check_ranks=False, **options)
    forward = forward_of(model)
    assert forward is not None
    forward.options = replace(forward.options, device=setting.device)
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=torch.float32)
    with mode:
        for path in sorted(block_paths(model)):
            fully_shard(model.get_submodule(path), mesh=around, mp_policy=policy)
        fully_shard(model, mesh=around, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        _step(model, optimizer, ids)  # traces, makes the optimizer's state
        _, tracker_of = memory_tools()
        tracker = tracker_of(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            _step(model, optimizer, ids)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    kinds: dict[str, int] = {}
    for kind, size in peak.items():
        name = _KINDS.get(str(kind).rpartition(".")[2])
        if name:
            kinds[name] = kinds.get(name, 0) + size
    last = explain(model).splitlines()[-2:]
    note = "\n  ".join(last if forward.host is not None and setting.host else last[-1:])
    host = forward.host.peak if forward.host is not None else 0
    return Step(length, peak["Total"], kinds, note, time.perf_counter() - started, host)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    del out
    optimizer.step()
    optimizer.zero_grad()
