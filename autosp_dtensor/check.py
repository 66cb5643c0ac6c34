"""`verify`: the user's own call, split and on one device, compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._torch import module_hook_dicts, original_class
from .graph import facts, short_name
from .lower import Drawn
from .run import Forward
from .tree import flatten

__all__ = ["Report", "verify_call"]


@dataclass(frozen=True)
class Row:
    """One compared value: largest difference over the largest magnitude on one device."""

    name: str
    error: float
    size: float


@dataclass(frozen=True)
class Report:
    """What `verify` found. `print` shows the worst rows; `ok`: all are within `tolerance`.

    random: operations of the call that drew random numbers, with their source lines. They draw
    others on one device, so values differ, and the difference says nothing of the splitting.
    """

    rows: tuple[Row, ...]
    tolerance: float
    random: tuple[str, ...] = ()

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: row.error if row.error == row.error else float("inf"))

    @property
    def ok(self) -> bool:
        return all(row.error <= self.tolerance for row in self.rows)

    def __str__(self) -> str:
        ordered = sorted(
            self.rows, key=lambda row: -row.error if row.error == row.error else float("-inf")
        )
        head = f"{'value':<52}{'relative error':>15}{'largest':>12}"
        body = [f"{row.name[-51:]:<52}{row.error:>15.2e}{row.size:>12.3g}" for row in ordered[:12]]
        verdict = "equal to one device" if self.ok else "NOT equal to one device"
        lines = [
            head,
            *body,
            f"{len(self.rows)} values compared, {verdict} (tolerance {self.tolerance:.0e})",
        ]
        if self.random and not self.ok:
            lines += [
                "the call draws random numbers, by design others than one device draws:",
                *(f"  {text}" for text in self.random),
                "verify it without: model.eval(), or dropout 0",
            ]
        return "\n".join(lines)


def verify_call(
    model: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tolerance: float | None,
) -> Report:
    """Run both; gradients already on the parameters are put back afterwards."""
    mesh = forward.gradient_mesh
    saved = [parameter.grad for parameter in model.parameters()]
    reference = _one_device(model)
    generator = torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        for parameter in model.parameters():
            parameter.grad = None
        split = model(*args, **kwargs)
        drawn = _drawn(forward)
        loss = _backward(split)
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            grads = {
                n: _mean(_zero_if_none(p), mesh)
                for n, p in model.named_parameters()
                if p.requires_grad
            }
        else:
            grads = {
                n: _whole(_zero_if_none(p)) for n, p in model.named_parameters() if p.requires_grad
            }
    finally:
        for parameter, grad in zip(model.parameters(), saved, strict=True):
            parameter.grad = grad
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    torch.set_rng_state(generator)
    whole = reference(*args, **kwargs)
    wanted_loss = _backward(whole)
    rows = [] if loss is None else [_row("loss", loss, wanted_loss)]
    for (name, got), (_, want) in zip(_tensors(split), _tensors(whole), strict=True):
        rows.append(_row(f"output {name}", _whole(got.detach()), want.detach()))
    wanted = {
        name: _mean(_zero_if_none(parameter), mesh)
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    largest = max((grad.abs().max().item() for grad in wanted.values()), default=0.0)
    for name, want in wanted.items():
        rows.append(_row(f"grad {name}", grads[name], want, _floor(want, largest)))
    if tolerance is None:
        kinds = {p.dtype for p in reference.parameters()} | {t.dtype for _, t in _tensors(whole)}
        tolerance = 64 * max(torch.finfo(kind).eps for kind in kinds or {torch.float32})
    return Report(tuple(rows), tolerance, drawn)


def _drawn(forward: Forward) -> tuple[str, ...]:
    """The random operations of the program that has just run: `dropout, layers.0.mlp (m.py:8)`."""
    if forward.last is None or not torch.is_grad_enabled():  # it may have run unsplit
        return ()
    nodes = [node for node, _ in forward.last.nodes() if isinstance(node.target, Drawn)]
    return tuple(sorted({f"{short_name(node.target)}, {facts(node).source}" for node in nodes}))


def _one_device(model: nn.Module) -> nn.Module:
    """An unsharded copy with whole parameters and the user's own forward."""
    memo: dict[int, Any] = {}
    shells = []
    for module in model.modules():
        cls = original_class(module)
        shell = cls.__new__(cls)
        memo[id(module)] = shell
        shells.append((module, shell))
    for tensor in [*model.parameters(), *model.buffers()]:
        value = _whole(tensor.detach()).clone()
        memo[id(tensor)] = (
            nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        )
    for module, shell in shells:
        for name, value in module.__dict__.items():
            if name in module_hook_dicts():
                shell.__dict__[name] = type(value)()
            elif name == "forward" and getattr(value, "is_autosp_forward", False):
                if value.original_attribute is not None:
                    shell.__dict__[name] = copy.deepcopy(value.original_attribute, memo)
            else:
                try:
                    shell.__dict__[name] = copy.deepcopy(value, memo)
                except Exception:  # process groups, locks: the copy may share them
                    shell.__dict__[name] = value
    return memo[id(model)]


def _backward(result: Any) -> torch.Tensor | None:
    """Backward from the result's `loss`, else its first scalar, else a sum over all of it."""
    tensors = [t for _, t in _tensors(result) if t.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return None
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = next((t for t in tensors if t.dim() == 0), None)
    if loss is None:
        loss = torch.stack([_whole(t).square().mean() for t in tensors]).sum()
    loss.backward()
    return loss.detach()


def _tensors(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for index, leaf in enumerate(flatten(result)[0]):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            yield str(index), leaf


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _zero_if_none(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _mean(grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    grad = grad.clone()
    for dim in range(mesh.ndim):
        dist.all_reduce(grad, group=mesh.get_group(dim))
    return grad / mesh.size()


def _floor(want: torch.Tensor, largest: float) -> float:
    """What a gradient's error is measured against at least, the model's largest one being known.

    One that is zero but for rounding (a key's bias) has no size of its own: what is left of the
    terms that cancel, which are as large as other gradients, differs with their order.
    """
    rounding = min(torch.finfo(want.dtype).eps, torch.finfo(torch.float32).eps) * largest
    is_zero = not want.numel() or want.abs().max().item() <= rounding
    return largest if is_zero else 1e-3 * largest


def _row(name: str, got: torch.Tensor, want: torch.Tensor | None, floor: float = 0.0) -> Row:
    assert want is not None
    size = want.abs().max().item() if want.numel() else 0.0
    error = (got - want).abs().max().item() if want.numel() else 0.0
    scale = max(size, floor)
    return Row(name, error / scale if scale > 0 else error, size)
