"""What every rank holds against the same model in one process on the whole sequence, in fp64.

The order of work keeps the comparison itself from hanging: first every collective (the same ones on
all ranks), then the comparison, which is local. All differences are collected, so that a failure
shows the pattern and not the first number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Rank

RTOL = 1e-10

# A gradient that is zero in exact arithmetic (a key bias under softmax) is rounding noise: it is
# judged against this part of the largest gradient instead of against itself.
NOISE_FLOOR = 1e-3

Batch = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One step as whole tensors: what came out, and what every parameter and every input got as
    gradient."""

    structure: Any
    loss: Tensor | None
    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    input_grads: dict[str, Tensor | None]
    sharded: frozenset[str] = frozenset()


def assert_same_as_one_device(
    rank: Rank,
    build: Callable[[], nn.Module],
    batches: Batch | Sequence[Batch],
    mesh: Any,
    *,
    set_up: Callable[[nn.Module, Any], nn.Module] | None = None,
    loss: Callable[..., Tensor] | None = None,
    sharded: Sequence[str] = (),
    rtol: float = RTOL,
    **options: Any,
) -> Outcome:
    """Train for one step on the ranks and compare with one process; returns the outcome of one
    process.

    Args:
        rank: what the pool handed to the test function.
        build: makes the model; called twice, and must give equal weights both times.
        batches: keyword arguments of the call, or one such batch for each dp index. With several,
            the gradient to reach is the mean over them.
        mesh: the mesh with an `sp` axis.
        set_up: takes the built model to the one that trains. Without it: `parallelize`, and
            `sync_gradients` after the backward pass. With it the gradients must be right by
            themselves (FSDP2 or DDP).
        loss: `loss(logits, batch)` for a model that gives logits only; it is parallelized as well.
        sharded: outputs that must come back as DTensors on `mesh["sp"]`.
        rtol: largest difference allowed, relative to the largest entry of the tensor.
        options: handed to `parallelize`.
    """
    import autosp_dtensor as autosp

    batches = [batches] if isinstance(batches, dict) else list(batches)
    mine = dp_index(mesh) % len(batches)
    want = one_device(build, batches, mine, loss)

    model = build()
    if set_up is None:
        model = autosp.parallelize(model, mesh, **options)
    else:
        model = set_up(model, mesh)
    split_loss = None if loss is None else autosp.parallelize(loss, mesh, **options)
    batch = fresh(batches[mine])
    out, total = forward_backward(model, batch, split_loss)
    if set_up is None:
        autosp.sync_gradients(model)
    got = gather(model, batch, out, total)

    compare(got, want, rtol)
    assert_sharded(out, sharded, mesh)
    return want


def dp_index(mesh: Any) -> int:
    """Which batch the group of this rank reads."""
    for name in ("dp", "dp_replicate"):
        if name in mesh.mesh_dim_names:
            return mesh[name].get_local_rank()
    return 0


def one_device(
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    mine: int = 0,
    loss: Callable[..., Tensor] | None = None,
) -> Outcome:
    """The reference: outputs of batch number `mine`, gradients averaged over all batches."""
    outcomes = []
    for batch in batches:
        model, batch = build(), fresh(batch)
        out, total = forward_backward(model, batch, loss)
        outcomes.append(gather(model, batch, out, total))
    grads = {
        name: mean_of([outcome.grads[name] for outcome in outcomes]) for name in outcomes[0].grads
    }
    chosen = outcomes[mine]
    return Outcome(
        chosen.structure, chosen.loss, chosen.outputs, grads, chosen.input_grads, frozenset()
    )


def mean_of(grads: Sequence[Tensor | None]) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return torch.stack(present).sum(0) / len(grads) if present else None


def fresh(batch: Batch) -> Batch:
    """The same values with no history, so that two runs cannot share a gradient."""
    return {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for name, value in batch.items()
    }


def forward_backward(
    model: Callable[..., Any], batch: Batch, loss: Callable[..., Tensor] | None
) -> tuple[Any, Tensor | None]:
    """Call, then backward from the loss: the one given, or the scalar that the model itself
    returns."""
    if loss is not None:
        labels = {name: value for name, value in batch.items() if name in LOSS_INPUTS}
        inputs = {name: value for name, value in batch.items() if name not in LOSS_INPUTS}
        out = model(**inputs)
        total = loss(logits_of(out), **labels)
    else:
        out = model(**batch)
        total = loss_of(out)
    if total is not None and total.requires_grad:
        total.backward()
    return out, total


# What goes to a loss outside the model instead of to the model.
LOSS_INPUTS = ("targets", "weight", "num_items", "chosen")


def logits_of(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else dict(named_tensors(out))["logits"]


def loss_of(out: Any) -> Tensor | None:
    scalars = [value for _, value in named_tensors(out) if value.ndim == 0]
    return scalars[0] if scalars else None


def gather(model: nn.Module | Any, batch: Batch, out: Any, total: Tensor | None) -> Outcome:
    """Every tensor whole, on every rank. Collectives run here, in an order that does not depend on
    the rank."""
    outputs = dict(named_tensors(out))
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    # DDP puts its own name in front.
    grads = {name.removeprefix("module."): parameter.grad for name, parameter in named.items()}
    assert_same_names_have_gradients(grads)
    return Outcome(
        structure=structure(out),
        loss=None if total is None else whole(total),
        outputs={name: whole(value) for name, value in outputs.items()},
        grads={name: None if grad is None else whole(grad) for name, grad in grads.items()},
        input_grads={
            name: None if value.grad is None else whole(value.grad)
            for name, value in batch.items()
            if isinstance(value, Tensor) and value.requires_grad
        },
        sharded=frozenset(n for n, value in outputs.items() if isinstance(value, DTensor)),
    )


def assert_same_names_have_gradients(grads: Mapping[str, Tensor | None]) -> None:
    """Gathering a gradient that some rank lacks would hang, so ranks agree on the list first."""
    if not dist.is_initialized():
        return
    mine = sorted(name for name, grad in grads.items() if grad is not None)
    lists: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, mine)
    for other, names in enumerate(lists):
        odd = sorted(set(names) ^ set(lists[0]))
        assert not odd, f"rank 0 and rank {other} do not have gradients for the same names: {odd}"


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def compare(got: Outcome, want: Outcome, rtol: float = RTOL) -> None:
    """Raise with every difference, worst first."""
    assert got.structure == want.structure, (
        f"the output has structure {got.structure}, on one device {want.structure}"
    )
    found = [*_loss_differences(got, want)]
    for name, value in want.outputs.items():
        found.append((f"output {name}", *difference(got.outputs[name], value)))
    floor = NOISE_FLOOR * max((size(grad) for grad in want.grads.values()), default=0.0)
    assert got.grads.keys() == want.grads.keys(), (
        f"parameters differ: {sorted(got.grads.keys() ^ want.grads.keys())}"
    )
    for name, grad in want.grads.items():
        found.append((f"gradient of {name}", *_gradient_difference(got.grads[name], grad, floor)))
    for name, grad in want.input_grads.items():
        found.append(
            (f"gradient of input {name}", *_gradient_difference(got.input_grads[name], grad, 0.0))
        )
    bad = sorted((row for row in found if not row[1] <= rtol), key=lambda row: -row[1])
    if bad:
        lines = [f"{name}: {text}" for name, _, text in bad[:12]]
        raise AssertionError(
            f"{len(bad)} of {len(found)} values differ from one device by more than {rtol:g}:\n  "
            + "\n  ".join(lines)
        )


def _loss_differences(got: Outcome, want: Outcome) -> Iterator[tuple[str, float, str]]:
    if want.loss is None:
        assert got.loss is None, "a loss where one device has none"
        return
    assert got.loss is not None, "no loss where one device has one"
    yield ("loss", *difference(got.loss, want.loss))


def _gradient_difference(
    got: Tensor | None, want: Tensor | None, floor: float
) -> tuple[float, str]:
    if want is None:
        largest = 0.0 if got is None else size(got)
        return largest, f"largest entry {largest:.3g} where one device has no gradient"
    if got is None:
        return math.inf, "None where one device has a gradient"
    return difference(got, want, floor)


def difference(got: Tensor, want: Tensor, floor: float = 0.0) -> tuple[float, str]:
    """The largest difference over the largest entry, and what to print. NaN must meet NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf, f"{got.dtype} {[*got.shape]} instead of {want.dtype} {[*want.shape]}"
    if not torch.equal(got.isnan(), want.isnan()):
        return math.inf, f"{int(got.isnan().sum())} NaN instead of {int(want.isnan().sum())}"
    got, want = got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)
    apart = (got - want).abs() if got.dtype != torch.bool else (got ^ want).double()
    apart = apart.masked_fill(got == want, 0)  # infinities of one sign are equal
    scale = max(size(want), floor)
    largest = size(apart)
    error = largest / scale if scale else largest
    where = (
        tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
        if apart.numel()
        else ()
    )
    return error, (
        f"off by {error:.2e} (largest at {where}: {got[where].item():.10g}, "
        f"one device {want[where].item():.10g})"
    ) if apart.numel() else (error, "empty")


def size(value: Tensor | None) -> float:
    return float(value.abs().max()) if value is not None and value.numel() else 0.0


def assert_sharded(out: Any, names: Sequence[str], mesh: Any) -> None:
    """Values split over sp are DTensors on that axis alone; everything else, the loss above all, is
    a plain tensor."""
    if mesh["sp"].size() == 1:
        return
    tensors = dict(named_tensors(out))
    for name in names:
        value = tensors[name]
        assert isinstance(value, DTensor), f"output {name} is not a DTensor"
        assert value.device_mesh == mesh["sp"], f"output {name} is on {value.device_mesh}"
        assert value.placements[0].is_shard(), f"output {name} is {value.placements}"
    for name, value in tensors.items():
        assert value.ndim or type(value) is Tensor, f"scalar {name} is a {type(value).__name__}"


def named_tensors(out: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of an output with a path for each: dataclasses, mappings (ModelOutput), tuples and
    lists."""
    if isinstance(out, Tensor):
        yield prefix or "out", out
        return
    if isinstance(out, Mapping):
        parts: Any = out.items()
    elif is_dataclass(out) and not isinstance(out, type):
        parts = [(part.name, getattr(out, part.name)) for part in fields(out)]
    elif isinstance(out, tuple | list):
        parts = [(str(i), part) for i, part in enumerate(out)]
    else:
        return
    for name, part in parts:
        yield from named_tensors(part, f"{prefix}.{name}" if prefix else name)


def structure(out: Any) -> Any:
    """Types and names of an output, tensors reduced to a word, to see that a caller cannot tell the
    difference."""
    if isinstance(out, Tensor):
        return "tensor"
    if isinstance(out, Mapping):
        return type(out).__name__, {name: structure(part) for name, part in out.items()}
    if is_dataclass(out) and not isinstance(out, type):
        return type(out).__name__, {f.name: structure(getattr(out, f.name)) for f in fields(out)}
    if isinstance(out, tuple | list):
        return type(out).__name__, [structure(part) for part in out]
    return type(out).__name__


class Collectives(TorchDispatchMode):
    """Counts what is sent while it is on: `counts["alltoall_base_"]`, `total()`.

    Every collective of torch.distributed passes the dispatcher, from Python and from the backward
    pass alike.
    """

    _SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
    _NOT_A_SEND = ("wait_tensor", "monitored_barrier_", "barrier")

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in self._SPACES and name not in self._NOT_A_SEND:
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def total(self) -> int:
        return sum(self.counts.values())

    def exchanges(self) -> int:
        """All-to-alls, whatever torch calls them on this backend."""
        return sum(
            n for name, n in self.counts.items() if "alltoall" in name or "all_to_all" in name
        )


def collectives(on: bool = True) -> Any:
    return Collectives() if on else nullcontext()
