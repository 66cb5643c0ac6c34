"""`parallelize` and what goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .check import Report, verify_call
from .checkpoint import MODES, Checkpoint
from .errors import MeshError, UsageError
from .explain import explain_program, latest
from .mesh import axis_names, fsdp_mesh, sp_mesh
from .run import Forward, Options, host_bytes
from .source import call_site

__all__ = ["explain", "forward_of", "parallelize", "sync_gradients", "verify"]

T = TypeVar("T", bound=Callable[..., Any])


def parallelize(
    model: T,
    mesh: DeviceMesh,
    *,
    sp_axis: str = "sp",
    dp_axis: str = "dp",
    seq_dim: int = 1,
    check_ranks: bool = True,
    checkpoint: str | Checkpoint = "auto",
    memory_budget: int | None = None,
    offload: str | int = "none",
    tile: str | int = "auto",
) -> T:
    """Split the sequence over one mesh axis. Loss, outputs and gradients stay those of one device.

    The module's code goes on seeing whole sequences; programs are traced at the first call with new
    shapes and cached. Every rank of an sp group passes the same whole batch. Results that are
    replicated are plain tensors; those split over sp are DTensors on `mesh[sp_axis]`.

    Args:
        model: an nn.Module (changed in place: same object, parameters, names, state_dict), or a
            callable such as a loss function of (logits, labels), for which a new callable is
            returned.
        mesh: any DeviceMesh with an axis `sp_axis`.
        sp_axis: the axis that sequences are split over.
        dp_axis: the data axis, which `sync_gradients` averages over as well; other axes are left
            alone.
        seq_dim: the sequence dim of the inputs: 1 for [B, S], 0 for [S, B].
        check_ranks: compare every call and its data over the sp group (16 bytes). On a GPU a call's
            data is compared at the next call, so that the device does not wait; a program's first
            call at once.
        checkpoint: what each repeated or FSDP2 module keeps for backward. "none": all. "full":
            nothing but its inputs. "sequence": attention's output and log-sum-exp, which cost most
            to compute again per byte. "auto": what saves most time per byte, as long as it fits in
            memory. Or a `Checkpoint`. Modules that the model checkpoints itself are left alone.
        memory_budget: bytes of one rank's device that "auto" (of any kind) may plan with; by
            default nine tenths of a GPU's memory; on a CPU, where none is given, nothing is
            computed again.
        offload: whether what backward needs may wait in host memory. "none". "auto": what the
            device's memory does not take, and what is faster to fetch than to compute again; as
            much as the ranks of a machine may take of its free memory, measured here. Or bytes of
            host memory of each rank, for the same; on a CPU without memory_budget, all moves.
        tile: operations that work on each token by itself run on some tokens at a time, so that
            what is wide between them never exists for all: logits and their loss, MLPs. "auto":
            where it is large (256 MiB on a rank) and takes no time: losses that are one sum, and
            what runs again in backward; other losses, whose projection then runs once more, where
            the step does not fit without. An integer: everywhere, that many tokens at a time.
            "none": nowhere. Wide results (logits) beside a loss are made when they are first read.
            Attention runs for some heads at a time, where its backward's workspace is that large.

    Raises:
        MeshError: the mesh has no axis `sp_axis`, or the model is parallelized already, on another
            mesh.
        CaptureError, PlacementError, RankMismatchError: at a call, on all ranks, before its first
            collective; RankMismatchError on a GPU also for data of the call before.

    Source: AutoSP (ICLR 2026); all-to-all attention after DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    sp = sp_mesh(mesh, sp_axis)
    options = _options(seq_dim, check_ranks, checkpoint, memory_budget, offload, tile)
    if not callable(model):
        raise UsageError(
            f"parallelize takes a module or a callable, got {type(model).__name__}.",
            where=call_site(),
            have=f"{model!r:.80}",
            why="there is no forward to trace",
            fix="pass the model itself, or a function of tensors such as a loss function",
        )
    if dp_axis == sp_axis:
        raise UsageError(
            f"sp_axis and dp_axis are both '{sp_axis}'.",
            where=call_site(),
            have=f"axes {axis_names(mesh)} of sizes {tuple(mesh.shape)}",
            why="ranks of the one share a sequence, ranks of the other have rows of their own",
            fix="name two axes; a mesh without a data axis needs no dp_axis=",
        )
    if isinstance(model, DistributedDataParallel):
        raise MeshError(
            "parallelize got a module that DDP has wrapped.",
            where=call_site(),
            have=f"{type(model).__name__} around a {type(model.module).__name__}",
            why="DDP reduces gradients around the module; the sequence is split inside it",
            fix="parallelize the module first, then wrap it: DDP(autosp.parallelize(model, mesh), "
            "process_group=autosp.fsdp_mesh(mesh).get_group())",
        )
    if isinstance(model, nn.Module):
        inner = [name for name, child in model.named_modules() if forward_of(child) is not None]
        if inner:
            raise MeshError(
                f"{'the model' if inner[0] == '' else inner[0]} is parallelized already.",
                where=call_site(),
                have="parallelized: " + ", ".join(name or "the model" for name in inner[:3]),
                why="its sequence would be split twice",
                fix="call parallelize once, on the outermost module that takes whole sequences",
            )
    gradient_mesh = fsdp_mesh(mesh, sp_axis=sp_axis, dp_axis=dp_axis)
    if offload != "none":
        host = host_bytes(gradient_mesh) if offload == "auto" else int(offload)
        options = replace(options, host=host)
    forward = Forward(model, sp, gradient_mesh, options)
    if not isinstance(model, nn.Module):
        return cast(T, forward)
    model.__dict__["forward"] = forward
    return cast(T, model)


def _options(
    seq_dim: Any,
    check_ranks: Any,
    checkpoint: Any,
    memory_budget: Any,
    offload: Any,
    tile: Any,
) -> Options:
    """The options that were asked for, each checked."""
    if not isinstance(check_ranks, bool):
        raise UsageError(
            f"check_ranks is True or False, got {check_ranks!r}.",
            where=call_site(),
            have=f"check_ranks={check_ranks!r}",
            why="calls are compared over the sp group, or they are not",
            fix="leave it out, or pass False once a run is known to be right",
        )
    if not isinstance(seq_dim, int) or isinstance(seq_dim, bool) or seq_dim < 0:
        raise UsageError(
            f"seq_dim is a dim counted from the left, got {seq_dim!r}.",
            where=call_site(),
            have=f"seq_dim={seq_dim!r}",
            why="all inputs have the sequence at the same place from the left",
            fix="1 for [B, S], 0 for [S, B]",
        )
    if not isinstance(checkpoint, Checkpoint) and checkpoint not in MODES:
        raise UsageError(
            f"checkpoint is one of {', '.join(MODES)} or a Checkpoint, got {checkpoint!r}.",
            where=call_site(),
            have=f"checkpoint={checkpoint!r}",
            why="it says what is kept for backward",
            fix='leave it out for "auto", or pass Checkpoint(keep=("attention",))',
        )
    if memory_budget is not None and (not isinstance(memory_budget, int) or memory_budget <= 0):
        raise UsageError(
            f"memory_budget is a number of bytes, got {memory_budget!r}.",
            where=call_site(),
            have=f"memory_budget={memory_budget!r}",
            why="it is what one rank's device may hold in a step",
            fix="for example memory_budget=70 * 2**30",
        )
    if not _is_count(offload) and offload not in ("none", "auto"):
        raise UsageError(
            f'offload is "none", "auto" or a number of bytes, got {offload!r}.',
            where=call_site(),
            have=f"offload={offload!r}",
            why="it is how much host memory of each rank may hold what backward needs",
            fix='"auto" takes what is free; or for example offload=100 * 2**30',
        )
    if memory_budget is not None and "auto" not in (checkpoint, tile) and offload == "none":
        raise UsageError(
            'memory_budget goes with checkpoint="auto", tile="auto" or offload=.',
            where=call_site(),
            have=f"memory_budget={memory_budget}, checkpoint={checkpoint!r}, tile={tile!r}",
            why="any other choice says by itself what is kept, and what runs by tiles",
            fix="leave one of them out",
        )
    if not _is_count(tile) and tile not in ("auto", "none"):
        raise UsageError(
            f'tile is "auto", "none" or a number of tokens, got {tile!r}.',
            where=call_site(),
            have=f"tile={tile!r}",
            why="it says how many tokens of an MLP or a loss are computed at one time",
            fix='leave it out for "auto", or pass for example tile=4096',
        )
    return Options(seq_dim, check_ranks, checkpoint, memory_budget, tile, offload=offload)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def forward_of(model: Any) -> Forward | None:
    """The runner of a parallelized module or function, or None."""
    if isinstance(model, Forward):
        return model
    found = getattr(model, "__dict__", {}).get("forward")
    return found if isinstance(found, Forward) else None


def explain(model: Any) -> str:
    """The latest call's program as text: operations, placements, bytes sent and kept, totals.

    Raises:
        UsageError: `model` is not parallelized, or has not been called.
    """
    return explain_program(latest(_runner(model, "explain").last))


def verify(model: nn.Module, *args: Any, tolerance: float | None = None, **kwargs: Any) -> Report:
    """Run this call split and on one device, and compare loss, outputs and all gradients.

    Every rank makes the whole model and the whole call once: use a short sequence, before a long
    run. Gradients and buffers are put back. Dropout must be off (model.eval(), or p=0): its masks
    differ by design; the report says where numbers were drawn.

    Args:
        tolerance: largest relative error that counts as equal; by default 64 times the dtype's
            epsilon.

    Returns:
        a Report: `print` it for the worst values, `.ok` for the verdict.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            "verify takes a module.",
            where=call_site(),
            have=type(model).__name__,
            why="it compares the gradients of parameters",
            fix="verify the module whose output the function takes",
        )
    return verify_call(model, _runner(model, "verify"), args, kwargs, tolerance)


def _runner(model: Any, name: str) -> Forward:
    found = forward_of(model)
    if found is None and isinstance(model, nn.Module):
        found = next((f for m in model.modules() if (f := forward_of(m)) is not None), None)
    if found is None:
        raise UsageError(
            f"{name} takes what parallelize gave back.",
            where=call_site(),
            have=f"a {type(model).__name__} that parallelize has not seen",
            why="programs, mesh and options are kept on what parallelize gave back",
            fix="call autosp.parallelize(model, mesh) first",
        )
    return found


def sync_gradients(model: nn.Module) -> None:
    """Average gradients over sp and dp, for parameters under neither FSDP2 nor DDP.

    Call it between backward and step. A parameter that got no gradient on this rank counts as zero
    where another rank has one. Parameters that FSDP2 manages are left alone: it averages them by
    itself.

    Raises:
        UsageError: the model is not parallelized, or FSDP2 manages all its parameters.
    """
    forward = _runner(model, "sync_gradients")
    mesh = forward.gradient_mesh
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters = [p for p in trained if not isinstance(p, DTensor)]
    if trained and not parameters:
        raise UsageError(
            "the model is under FSDP2, which averages gradients by itself.",
            where=call_site(),
            have=f"{len(trained)} trained parameters, all sharded by FSDP2",
            why="averaging them again would be wrong",
            fix="drop sync_gradients",
        )
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    if not parameters:
        return
    has = torch.tensor(
        [p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device
    )
    for group in groups:
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    for parameter, any_rank in zip(parameters, has.tolist(), strict=True):
        if not any_rank:
            continue
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for group in groups:
            dist.all_reduce(grad, group=group)
        parameter.grad = grad.div_(mesh.size())
