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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .._torch import (
    NEEDS_DATA,
    FakeTensor,
    FakeTensorMode,
    TorchFunctionMode,
    backward_under_modes,
    fake_store,
    memory_tracker,
)
from ..api import explain, forward_of, parallelize
from ..cost import Device
from ..errors import UsageError
from ..lower import are_made, told_of_landings
from ..mesh import fsdp_mesh
from ..run import block_paths
from ..source import line_of
from .kernels import KernelDropout, KernelWorkspace

__all__ = ["Scheme", "Setting", "Step", "fake_group", "measure", "uncounted"]

_EXCHANGE = "EXCHANGE"
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
    _EXCHANGE: "exchange buffers",
}


# Makes a model ready for its ranks, and gives what to call it with: (model, mesh, ids) -> inputs.
Scheme = Callable[[nn.Module, DeviceMesh, torch.Tensor], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """What is planned: FSDP2 on blocks and root over dp x sp, AdamW in fp32, compute in `dtype`.

    sp=1 is FSDP2 alone. budget: bytes that "auto" may plan with. device: whose figures it plans
    with. host: bytes of host memory of each rank, 0 for none. tile: as in `parallelize`.
    accumulated: gradients of an earlier batch are there. scheme: how the model is split instead of
    by `parallelize`, to compare with.
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
    tile: str | int = "auto"
    accumulated: bool = False
    scheme: Scheme | None = None


@dataclass(frozen=True)
class Step:
    """Bytes of one rank at the peak of a step, by kind, and what `explain` says of memory.

    kinds: they add up to the peak. "exchange buffers" is what all-to-alls pack and receive, until
    it is put together: what is sent from where it lies, or used where it came in, is a value.
    host: bytes in host memory, at their own peak. exchange: of exchange buffers, at theirs.
    history: bytes by kind after each operation, if they were asked for.
    """

    length: int
    peak: int
    kinds: dict[str, int]
    note: str
    seconds: float
    host: int = 0
    exchange: int = 0
    history: tuple[dict[str, int], ...] = ()


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
    dist.init_process_group("fake", rank=0, world_size=size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


_uncounted: list[None] = []


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Inside, what operations make takes no memory: values that a compiler keeps in registers."""
    _uncounted.append(None)
    try:
        yield
    finally:
        _uncounted.pop()


@contextlib.contextmanager
def _told_what_needs_data() -> Iterator[None]:
    """Inside, an operation that cannot run without data is an error that names the user's line."""
    try:
        yield
    except (*NEEDS_DATA, RuntimeError) as error:
        if not isinstance(error, NEEDS_DATA) and "_apply()" not in str(error):
            raise
        raise UsageError(
            "a plan runs on tensors without data, and the model or a hook needs their data.",
            where=line_of(error),
            have=" ".join(f"{type(error).__name__}: {error}".split()),
            why="neither can a tensor's value be read, nor a module's dtype be changed",
            fix="compute such numbers in plain Python, leave out hooks that look at values, and "
            "make parameters in their dtype at once; a plan computes in bf16 by itself",
        ) from error


class _EqualChunks(TorchFunctionMode):
    """FSDP2 cuts each parameter for all ranks and takes one part: without data, equal ones are one.
    Else a thousand ranks would make a thousand tensors of each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.none: dict[torch.dtype, torch.Tensor] = {}  # parts of ranks that get nothing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not args or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.new_empty and args[1:] == (0,):
            if args[0].dtype not in self.none:
                self.none[args[0].dtype] = func(*args)
            return self.none[args[0].dtype]
        if func is not torch.chunk:
            return func(*args, **(kwargs or {}))
        tensor, count, dim = (*args, *(kwargs or {}).values())  # as FSDP2 gives them
        size = tensor.shape[dim]
        each = max(1, -(-size // count))
        last = max(0, size - 1) // each * each
        first, rest = tensor.narrow(dim, 0, min(each, size)), tensor.narrow(dim, last, size - last)
        return (*(first for _ in range(last // each)), rest)


def measure(setting: Setting, length: int, *, fake: bool = True, history: bool = False) -> Step:
    """Run a step inside a `fake_group` and watch its memory.

    fake: on tensors without data; else on real ones, to check those against: the same bytes.
    history: give the bytes after each operation too.

    Raises:
        UsageError: the model's constructor, or a hook, reads the value of a tensor.
    """
    with _told_what_needs_data(), KernelDropout():
        return _measured(setting, length, fake, history)


def _measured(setting: Setting, length: int, fake: bool, history: bool) -> Step:
    started = time.perf_counter()
    mesh = init_device_mesh("cpu", (setting.dp, setting.sp), mesh_dim_names=("dp", "sp"))
    around = fsdp_mesh(mesh)  # made before there are fake tensors
    mode: Any = FakeTensorMode() if fake else contextlib.nullcontext()
    with mode:
        model = setting.make()
        ids = torch.zeros(setting.batch, length, dtype=torch.int64)
    scheme = setting.scheme or _parallelized(setting)
    with mode if setting.scheme else contextlib.nullcontext():
        inputs = scheme(model, mesh, ids)
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=torch.float32)
    with mode:
        with _EqualChunks():
            for path in sorted(block_paths(model)):
                fully_shard(model.get_submodule(path), mesh=around, mp_policy=policy)
            fully_shard(model, mesh=around, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        # Traces. With its backward: else the root stays gathered.
        backward_under_modes(model(**inputs).loss)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes its state
        if not setting.accumulated:
            optimizer.zero_grad()
        watch = _Watch(history)
        own = {_EXCHANGE: are_made}
        tracker = memory_tracker(model, optimizer, watch.see, lambda: not _uncounted, own)
        tracker.track_inputs(tuple(inputs.values()))
        with tracker, told_of_landings(tracker.as_value), KernelWorkspace():
            _step(model, optimizer, inputs)
    last = [] if setting.scheme else explain(model).splitlines()[-2:]
    forward = forward_of(model)
    host = forward.host if forward is not None else None
    return Step(
        length,
        watch.peak,
        _by_kind(watch.at_peak),
        "\n  ".join(last if host is not None else last[-1:]),
        time.perf_counter() - started,
        host.peak if host is not None else 0,
        watch.exchange,
        tuple(_by_kind(each) for each in watch.history),
    )


def _parallelized(setting: Setting) -> Scheme:
    """The model by `parallelize`, called with the whole sequence."""

    def scheme(model: nn.Module, mesh: DeviceMesh, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {"checkpoint": setting.checkpoint, "tile": setting.tile}
        if setting.host:
            options["offload"] = setting.host
        if setting.budget is not None and (
            setting.host or "auto" in (setting.checkpoint, setting.tile)
        ):
            options["memory_budget"] = setting.budget
        parallelize(model, mesh, check_ranks=False, **options)
        forward = forward_of(model)
        assert forward is not None
        forward.options = replace(forward.options, device=setting.device)
        return {"input_ids": ids, "labels": ids}

    return scheme


class _Watch:
    """What a memory tracker shows: the bytes at the peak, and after each operation."""

    def __init__(self, history: bool) -> None:
        self.peak = self.exchange = 0
        self.at_peak: dict[Any, int] = {}
        self.history: list[dict[Any, int]] = []
        self._keep = history

    def see(self, live: dict[Any, int]) -> None:
        if live["Total"] > self.peak:
            self.peak, self.at_peak = live["Total"], dict(live)
        self.exchange = max(self.exchange, live[_EXCHANGE])
        if self._keep:
            self.history.append(dict(live))


def _by_kind(live: dict[Any, int]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for kind, size in live.items():
        name = _KINDS.get(str(kind).rpartition(".")[2])
        if name:
            kinds[name] = kinds.get(name, 0) + size
    return kinds


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]
) -> None:
    loss = model(**inputs).loss  # as training loops do: what else it gives is let go of
    backward_under_modes(loss)  # what runs again there is to run as it did
    del loss
    optimizer.step()
    optimizer.zero_grad()
