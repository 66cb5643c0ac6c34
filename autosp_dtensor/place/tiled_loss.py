"""Cross entropy over a large vocabulary, some tokens at a time: no copy of all logits is made.

What a model does to logits on the way to the loss (a cast to fp32, a soft cap) happens inside the
tiles. Log-probabilities, fp32 logits and their gradients then exist for one tile only; the logits
themselves, in their own dtype, and their gradient are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from .._torch import once_differentiable
from ..autocast import autocast_state, under
from ..capture.targets import OutOfPlace, UnderAutocast
from ..graph import callee, facts, set_facts, short_name
from .insert import add_call, bind
from .rules.pointwise import is_pointwise

__all__ = ["tile_losses", "tiled_cross_entropy"]

# fp32 logits that one rank would hold; below it nothing is gained. And what one tile may hold.
LEAST_BYTES = 256 << 20
TILE_BYTES = 128 << 20
_VIEWS = {"view", "reshape", "flatten"}
_NAMES = ("input", "target", "weight")


@dataclass(frozen=True)
class Step:
    """One call on the logits of a tile, its other arguments being numbers."""

    call: Callable[..., Any]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(*self.before, x, *self.after, **dict(self.options))


def tile_losses(graph: Graph, axis_size: int) -> None:
    """Rewrite each cross entropy over [tokens, classes] whose logits are large on a rank."""
    for node in list(graph.nodes):
        if node.op != "call_function" or short_name(node.target) != "cross_entropy":
            continue
        if isinstance(node.target, UnderAutocast) or node.kwargs.get("reduction") != "sum":
            continue
        given = bind(node, _NAMES)
        logits, target, weight = given["input"], given["target"], given.get("weight")
        meta = facts(logits).meta
        large = meta.numel * 4 // axis_size >= LEAST_BYTES
        classes = len(meta.shape) == 2 and not facts(target).meta.dtype.is_floating_point
        trained = weight is not None and facts(weight).meta.requires_grad
        if large and classes and not trained:
            _tile(graph, node, logits, target, weight)


def _tile(graph: Graph, node: Node, logits: Node, target: Node, weight: Node | None) -> None:
    source, steps, views = _way_to(logits)
    with graph.inserting_before(node):
        for view in views:
            meta = replace(facts(view).meta, dtype=facts(source).meta.dtype)
            made = graph.call_function(callee(view), (source, *view.args[1:]), view.kwargs)
            set_facts(made, facts(view).having(outs=(meta,)))
            source = made
        options = {k: v for k, v in node.kwargs.items() if k not in _NAMES}
        args = (source, target) if weight is None else (source, target, weight)
        tiled = add_call(
            graph, node, tiled_cross_entropy, args, {"steps": tuple(steps), **options},
            facts(node).meta,
        )  # fmt: skip
    node.replace_all_uses_with(tiled)
    graph.erase_node(node)


def _way_to(logits: Node) -> tuple[Node, list[Step], list[Node]]:
    """(where logits come from, what is done to each, the views), both in the model's order."""
    node, steps, views = logits, [], []
    while node.op == "call_function" and len(node.users) == 1:
        name, known = short_name(node.target), facts(node)
        if name in _VIEWS and isinstance(node.args[0], Node):
            views.append(node)
            node = node.args[0]
            continue
        plain = is_pointwise(known.aten) and not known.random and known.single
        if not plain or isinstance(node.target, (UnderAutocast, OutOfPlace)):
            break
        if len(node.all_input_nodes) != 1 or node.all_input_nodes[0] in node.kwargs.values():
            break
        (inner,) = node.all_input_nodes
        if node.args.count(inner) != 1 or facts(inner).meta.shape != known.meta.shape:
            break
        at = node.args.index(inner)
        options = tuple(node.kwargs.items())
        steps.append(Step(callee(node), node.args[:at], node.args[at + 1 :], options))
        node = inner
    return node, steps[::-1], views[::-1]


def tiled_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    steps: tuple[Step, ...] = (),
    **options: Any,
) -> torch.Tensor:
    """cross_entropy(steps(logits), target, weight, reduction="sum"), tile by tile.

    Args:
        logits: [tokens, classes]. target: [tokens], class numbers.
        steps: what is done to logits first.
        options: cross_entropy's ignore_index, label_smoothing, reduction ("sum").
    """
    return _Tiled.apply(steps, options, weight, target, logits)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: tuple[Step, ...],
        options: dict[str, Any],
        weight: torch.Tensor | None,
        target: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        ctx.steps, ctx.options = steps, options
        ctx.save_for_backward(target, logits, *([] if weight is None else [weight]))
        ctx.autocast = autocast_state(logits.device.type)
        sums = [
            _loss(steps, options, weight, target[rows], logits[rows]) for rows in _tiles(logits)
        ]
        if not sums:  # a rank without tokens
            return _loss(steps, options, weight, target, logits)
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor):
        target, logits, *rest = ctx.saved_tensors
        weight = rest[0] if rest else None
        grad = torch.empty_like(logits)
        for rows in _tiles(logits):
            part = logits[rows].detach().requires_grad_()
            with torch.enable_grad(), under(ctx.autocast):
                loss = _loss(ctx.steps, ctx.options, weight, target[rows], part)
            (found,) = torch.autograd.grad(loss, part, incoming[0])
            grad[rows] = found
        return None, None, None, None, grad


def _tiles(logits: torch.Tensor) -> list[slice]:
    height = max(1, TILE_BYTES // (4 * max(1, logits.shape[1])))
    return [slice(top, top + height) for top in range(0, logits.shape[0], height)]


def _loss(
    steps: tuple[Step, ...],
    options: dict[str, Any],
    weight: torch.Tensor | None,
    target: torch.Tensor,
    logits: torch.Tensor,
) -> torch.Tensor:
    for step in steps:
        logits = step(logits)
    return F.cross_entropy(logits, target, weight, **options)
