"""Losses that are means over tokens become sums over a global count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import Facts, callee, facts, short_name
from .insert import add_call, bind

__all__ = ["split_mean", "target_weight"]


def split_mean(graph: Graph, node: Node) -> None:
    """Rewrite one loss: what every rank can sum, over what is counted on the whole."""
    name = short_name(node.target)
    if name in ("cross_entropy", "nll_loss"):
        _class_loss_mean(graph, node, name)
    elif name in _ELEMENT_LOSSES:
        _element_loss_mean(graph, node, name)


def _legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that the deprecated pair of flags means."""
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


_CLASS_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def _class_loss_mean(graph: Graph, node: Node, name: str) -> None:
    """mean -> sum over the weight of valid targets, which every rank counts on the whole target."""
    given = bind(node, _CLASS_NAMES)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = _legacy_reduction(given.get("size_average"), given.get("reduce"))
    else:
        reduction = given.get("reduction", "mean")
    logits, target, weight = given["input"], given["target"], given.get("weight")
    kept = {k: given[k] for k in ("ignore_index", "label_smoothing") if k in given}
    if name == "nll_loss":
        kept.pop("label_smoothing", None)
    known: Facts = facts(node)
    with graph.inserting_before(node):
        if reduction != "mean":
            same = add_call(
                graph,
                node,
                callee(node),
                (logits, target, weight),
                {**kept, "reduction": reduction},
                known.meta,
                known.aten,
            )
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            return
        if facts(logits).meta.dtype == torch.float16:  # a sum over tokens leaves the range of fp16
            meta = replace(facts(logits).meta, dtype=torch.float32)
            logits = add_call(
                graph,
                node,
                torch.Tensor.float,
                (logits,),
                {},
                meta,
                (torch.ops.aten._to_copy.default,),
            )
        dtype = facts(logits).meta.dtype if known.meta.dtype == torch.float16 else known.meta.dtype
        total = add_call(
            graph,
            node,
            callee(node),
            (logits, target, weight),
            {**kept, "reduction": "sum"},
            replace(known.meta, dtype=dtype),
        )
        count_meta = replace(known.meta, requires_grad=False, dtype=dtype)
        if facts(target).meta.dtype.is_floating_point:
            shape = facts(target).meta.shape
            count: Any = facts(target).meta.numel // shape[min(1, len(shape) - 1)]
        else:
            count = add_call(
                graph,
                node,
                target_weight,
                (target, weight, given.get("ignore_index", -100), dtype),
                {},
                count_meta,
            )
        mean = add_call(
            graph,
            node,
            torch.div,
            (total, count),
            {},
            replace(known.meta, dtype=dtype),
            (torch.ops.aten.div.Tensor,),
        )
        if dtype != known.meta.dtype:
            mean = add_call(
                graph,
                node,
                torch.Tensor.to,
                (mean, known.meta.dtype),
                {},
                known.meta,
                (torch.ops.aten._to_copy.default,),
            )
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def target_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What cross entropy's mean divides by: the valid targets, or their class weights' sum."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    return (weight.detach()[target.where(valid, 0)] * valid).sum().to(dtype)


_ELEMENT_LOSSES = {
    "mse_loss": ("input", "target", "size_average", "reduce", "reduction", "weight"),
    "l1_loss": ("input", "target", "size_average", "reduce", "reduction", "weight"),
    "smooth_l1_loss": ("input", "target", "size_average", "reduce", "reduction", "beta"),
    "huber_loss": ("input", "target", "reduction", "delta", "weight"),
    "binary_cross_entropy": ("input", "target", "weight", "size_average", "reduce", "reduction"),
    "binary_cross_entropy_with_logits": (
        "input", "target", "weight", "size_average", "reduce", "reduction", "pos_weight"),
    "kl_div": ("input", "target", "size_average", "reduce", "reduction", "log_target"),
    "soft_margin_loss": ("input", "target", "size_average", "reduce", "reduction"),
    "poisson_nll_loss": (
        "input", "target", "log_input", "full", "size_average", "eps", "reduce", "reduction"),
}  # fmt: skip


def _element_loss_mean(graph: Graph, node: Node, name: str) -> None:
    """Any reduction -> reduction="none", then sum or mean as an operation of its own."""
    given = bind(node, _ELEMENT_LOSSES[name])
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = _legacy_reduction(given.get("size_average"), given.get("reduce"))
    if reduction == "none" or (
        given.get("weight") is not None and name in ("mse_loss", "l1_loss", "huber_loss")
    ):
        return
    known = facts(node)
    a, b = facts(given["input"]).meta, facts(given["target"]).meta
    shape = torch.broadcast_shapes(a.shape, b.shape)
    extra = {
        k: v
        for k, v in given.items()
        if k not in ("input", "target", "size_average", "reduce", "reduction")
    }
    with graph.inserting_before(node):
        each = add_call(
            graph, node, callee(node), (given["input"], given["target"]),
            {**extra, "reduction": "none"},
            replace(known.meta, shape=tuple(shape)), known.aten,
        )  # fmt: skip
        if reduction == "batchmean":
            total = add_call(graph, node, torch.sum, (each,), {}, known.meta)
            result = add_call(
                graph,
                node,
                torch.div,
                (total, a.shape[0]),
                {},
                known.meta,
                (torch.ops.aten.div.Tensor,),
            )
        else:
            result = add_call(
                graph,
                node,
                torch.sum if reduction == "sum" else torch.mean,
                (each,),
                {},
                known.meta,
            )
    node.replace_all_uses_with(result)
    graph.erase_node(node)
