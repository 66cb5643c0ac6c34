"""Attention written by hand (matmul, softmax, matmul) becomes one scaled_dot_product_attention.

Only where the result stays the same up to rounding: the scores are used for nothing else, every
mask is proved causal or empty, and softmax is not computed in fewer bits than the queries have.
Scores [.., S, T] then exist nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ..capture.targets import UnderAutocast
from ..graph import Meta, facts, set_facts, short_name
from .masks import MASKED_BELOW, Pattern

__all__ = ["fuse_attention"]

Recognize = Callable[[Node], Pattern | None]
_CASTS = {"to", "float", "double", "half", "bfloat16", "type_as", "type"}


@dataclass(frozen=True)
class _Mask:
    """A float mask that is added, or a bool one of what is allowed and the score of the rest."""

    node: Node
    fill: float | None = None


@dataclass
class _Scores:
    """What was found on the way from softmax back to the product of queries and keys."""

    product: Node | None = None
    scale: float = 1.0
    masks: list[_Mask] = field(default_factory=list)
    casts: list[Node] = field(default_factory=list)


def fuse_attention(graph: Graph, recognize: Recognize, can_tile: Callable[[Node], bool]) -> Graph:
    """Rewrite each hand-written attention that qualifies; values change by rounding."""
    for node in list(graph.nodes):
        if node.op == "call_function" and short_name(node.target) == "softmax":
            _fuse(graph, node, recognize, can_tile)
    graph.lint()
    return graph


def _fuse(
    graph: Graph, softmax: Node, recognize: Recognize, can_tile: Callable[[Node], bool]
) -> None:
    if not _is_last_dim(softmax):
        return
    scores = _walk_back(softmax.args[0])
    casts: list[Node] = []
    final, dropout_p = _walk_forward(softmax, casts)
    if scores is None or scores.product is None or final is None:
        return
    if any(isinstance(n.target, UnderAutocast) for n in (softmax, scores.product, final)):
        return
    query, keys = scores.product.args
    value = final.args[1]
    if not all(isinstance(n, Node) for n in (query, keys, value)):
        return
    if scores.scale <= 0 or not _fits(query, keys, value, [softmax, *scores.casts, *casts]):
        return
    patterns = [recognize(mask.node) for mask in scores.masks]
    known_masks = all(pattern is not None for pattern in patterns)
    if not known_masks and not all(
        can_tile(mask.node) and _forbids_wholly(mask) for mask in scores.masks
    ):
        return
    assert isinstance(query, Node) and isinstance(keys, Node) and isinstance(value, Node)
    known = facts(final)
    with graph.inserting_before(final):
        key = graph.call_function(torch.Tensor.transpose, (keys, -2, -1))
        shape = facts(keys).meta.shape
        meta = replace(facts(keys).meta, shape=(*shape[:-2], shape[-1], shape[-2]))
        set_facts(
            key,
            replace(
                facts(keys), outs=(meta,), scope=known.scope, origin=None, aten=(), random=False
            ),
        )
        causal = Pattern.CAUSAL in patterns
        options = {"dropout_p": dropout_p, "is_causal": causal, "scale": scores.scale}
        if not known_masks:
            options["is_causal"] = False
            options["attn_mask"] = _all_allowed(graph, scores.masks)
        if _is_shared(facts(query).meta, facts(keys).meta):
            options["enable_gqa"] = True
        fused = graph.call_function(F.scaled_dot_product_attention, (query, key, value), options)
        set_facts(fused, replace(known, random=dropout_p > 0, aten=()))
    final.replace_all_uses_with(fused)


def _forbids_wholly(mask: _Mask) -> bool:
    """-inf where not allowed. With a finite fill a query that may read nothing weighs all keys
    alike, and kernels get its gradient wrong (torch 2.13, CPU: log-sum-exp absorbs the count).
    """
    return mask.fill == float("-inf")


def _all_allowed(graph: Graph, masks: list[_Mask]) -> Node:
    """All masks as one bool mask."""
    total = masks[0].node
    for mask in masks[1:]:
        shapes = facts(total).meta.shape, facts(mask.node).meta.shape
        both = graph.call_function(torch.logical_and, (total, mask.node))
        meta = replace(facts(total).meta, shape=tuple(torch.broadcast_shapes(*shapes)))
        op = torch.ops.aten.logical_and.default
        set_facts(both, replace(facts(total), outs=(meta,), aten=(op,)))
        total = both
    return total


def _is_last_dim(softmax: Node) -> bool:
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    return dim in (-1, len(facts(softmax).meta.shape) - 1)


def _fits(query: Any, keys: Any, value: Any, floats: list[Node]) -> bool:
    """Same leading dims (one key head may serve all), same dtype, nothing in fewer bits between."""
    q, k, v = (facts(n).meta for n in (query, keys, value))
    if not (len(q.shape) == len(k.shape) == len(v.shape) and len(q.shape) in (3, 4)):
        return False
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        return False
    if k.shape[:-2] != v.shape[:-2] or not (q.shape[:-2] == k.shape[:-2] or _is_shared(q, k)):
        return False
    dtypes = [facts(n).meta.dtype for n in floats]
    least = torch.finfo(q.dtype).bits
    return all(d.is_floating_point and torch.finfo(d).bits >= least for d in dtypes)


def _is_shared(q: Meta, k: Meta) -> bool:
    """One key head for all query heads, by broadcasting."""
    return len(q.shape) == 4 and k.shape[-3] == 1 and q.shape[:-3] == k.shape[:-3]


def _walk_back(start: Any) -> _Scores | None:
    """From softmax's argument to the product, through casts, masks, then scales; else None."""
    found = _Scores()
    node = start
    while isinstance(node, Node) and node.op == "call_function" and len(node.users) == 1:
        name = short_name(node.target)
        if node.kwargs and name not in _CASTS:
            return None  # torch.add(mask, scores, alpha=0.1) and the like
        if name in ("matmul", "bmm"):
            found.product = node
            return found if len(node.args) == 2 else None
        if name in _CASTS:
            found.casts.append(node)
            node = node.args[0]
            continue
        step = _mask_step(node, name, found) or _scale_step(node, name, found)
        if step is None:
            return None
        node = step
    return None


def _mask_step(node: Node, name: str, found: _Scores) -> Node | None:
    """scores + mask, scores.masked_fill(mask, -inf), where(mask, scores, -inf): the scores."""
    if found.scale != 1.0:
        return None  # a mask added before the scale would be scaled as well
    args: list[Any] = list(node.args)
    if name == "add" and len(args) == 2 and all(isinstance(a, Node) for a in args):
        sides = [a for a in args if _leads_to_product(a)]
        if len(sides) == 1:
            mask = args[1 - args.index(sides[0])]
            if not facts(mask).meta.dtype.is_floating_point:
                return None  # adding True adds 1
            found.masks.append(_Mask(mask))
            return sides[0]
    elif name == "masked_fill" and len(args) == 3 and _forbids(args[2]):
        found.masks.append(_Mask(_not(node, args[1]), _number(args[2])))
        return args[0]
    elif name == "where" and len(args) == 3 and _forbids(args[2]):
        found.masks.append(_Mask(args[0], _number(args[2])))
        return args[1]
    elif name == "where" and len(args) == 3 and _forbids(args[1]):
        found.masks.append(_Mask(_not(node, args[0]), _number(args[1])))
        return args[2]
    return None


def _not(at: Node, mask: Any) -> Node:
    """The opposite of a bool mask; dead code once it has been recognized."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(torch.logical_not, (mask,))
    meta = replace(facts(mask).meta, dtype=torch.bool)
    set_facts(node, replace(facts(at), outs=(meta,), aten=(torch.ops.aten.logical_not.default,)))
    return node


def _forbids(value: Any) -> bool:
    number = _number(value)
    return number is not None and number <= MASKED_BELOW


def _number(value: Any) -> float | None:
    """A Python number, or a scalar tensor made from one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and facts(value).meta.shape == () and value.op == "call_function":
        number = _scalar_number(value)
        return (
            None if number is None else torch.tensor(number, dtype=facts(value).meta.dtype).item()
        )
    return None


def _scalar_number(value: Node) -> float | None:
    if value.op == "call_function":
        name, args = short_name(value.target), value.args
        if name == "tensor" and args and isinstance(args[0], (int, float)):
            return float(args[0])
        if name == "full":
            fill = args[1] if len(args) > 1 else value.kwargs.get("fill_value")
            return float(fill) if isinstance(fill, (int, float)) else None
        if name in _CASTS:
            return _number(args[0])
    return None


def _leads_to_product(value: Any) -> bool:
    while isinstance(value, Node) and value.op == "call_function":
        name = short_name(value.target)
        if name in ("matmul", "bmm"):
            return True
        if name not in _CASTS and name not in (
            "mul",
            "rmul",
            "div",
            "truediv",
            "masked_fill",
            "add",
        ):
            return False
        value = value.args[0]
    return False


def _scale_step(node: Node, name: str, found: _Scores) -> Node | None:
    """scores * number, scores / number."""
    if len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    if name in ("mul", "rmul"):
        for rest, other in ((a, b), (b, a)):
            number = _number(other)
            if number is not None and isinstance(rest, Node):
                found.scale *= number
                return rest
    number = _number(b)
    if name in ("div", "truediv") and number and isinstance(a, Node):
        found.scale /= number
        return a
    return None


def _walk_forward(softmax: Node, casts: list[Node]) -> tuple[Node | None, float]:
    """(product with the values, dropout probability), from softmax through casts and dropout."""
    node, probability = softmax, 0.0
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not user.args or user.args[0] is not node:
            return None, 0.0
        name = short_name(user.target)
        if name in ("matmul", "bmm"):
            return (user if len(user.args) == 2 and not user.kwargs else None), probability
        if name == "dropout":
            training = user.args[2] if len(user.args) > 2 else user.kwargs.get("training", True)
            rate: Any = user.args[1] if len(user.args) > 1 else user.kwargs.get("p", 0.5)
            probability = float(rate) if training else 0.0
        elif name in _CASTS:
            casts.append(user)
        else:
            return None, 0.0
        node = user
    return None, 0.0
