"""Rewrites of whole-sequence calls into equal ones that can be placed, up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import Facts, Meta, callee, facts, set_facts, short_name
from .fuse import fuse_attention
from .masks import Pattern, ReadState, TileMask, recognize, tile_mask, tiled_attention

__all__ = ["canonicalize", "target_weight"]

log = logging.getLogger("autosp_dtensor")
_LARGE_MASK = 1 << 20


def canonicalize(graph: Graph, axis_size: int, read: ReadState | None = None) -> Graph:
    """Means become sums over a global count, plain causal masks go, key heads are shared."""
    patterns: dict[Node, Pattern | None] = {}

    def pattern_of(mask: Node) -> Pattern | None:
        if mask not in patterns:
            patterns[mask] = recognize(mask, read)
        return patterns[mask]

    tiles: dict[Node, tuple[TileMask, list[Node]] | None] = {}

    def tiles_of(mask: Node) -> tuple[TileMask, list[Node]] | None:
        if mask not in tiles:
            tiles[mask] = tile_mask(mask)
        return tiles[mask]

    fuse_attention(graph, pattern_of, lambda mask: tiles_of(mask) is not None)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = short_name(node.target)
        if name in ("cross_entropy", "nll_loss"):
            _class_loss_mean(graph, node, name)
        elif name in _ELEMENT_LOSSES:
            _element_loss_mean(graph, node, name)
        elif name == "scaled_dot_product_attention":
            _drop_plain_mask(node, pattern_of)
            _share_key_heads(graph, node)
            _tile_mask(graph, node, tiles_of)
    graph.lint()
    return graph


def _add(
    graph: Graph,
    like: Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta: Meta,
    aten: tuple[Any, ...] = (),
) -> Node:
    node = graph.call_function(target, args, kwargs)
    set_facts(node, replace(facts(like), outs=(meta,), aten=aten, random=False, single=True))
    return node


def _legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that the deprecated pair of flags means."""
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _bind(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    bound = dict(zip(names, node.args, strict=False))
    bound.update(node.kwargs)
    return bound


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
    given = _bind(node, _CLASS_NAMES)
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
            same = _add(
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
            logits = _add(
                graph,
                node,
                torch.Tensor.float,
                (logits,),
                {},
                meta,
                (torch.ops.aten._to_copy.default,),
            )
        dtype = facts(logits).meta.dtype if known.meta.dtype == torch.float16 else known.meta.dtype
        total = _add(
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
            count = _add(
                graph,
                node,
                target_weight,
                (target, weight, given.get("ignore_index", -100), dtype),
                {},
                count_meta,
            )
        mean = _add(
            graph,
            node,
            torch.div,
            (total, count),
            {},
            replace(known.meta, dtype=dtype),
            (torch.ops.aten.div.Tensor,),
        )
        if dtype != known.meta.dtype:
            mean = _add(
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
    given = _bind(node, _ELEMENT_LOSSES[name])
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
        each = _add(
            graph, node, callee(node), (given["input"], given["target"]),
            {**extra, "reduction": "none"},
            replace(known.meta, shape=tuple(shape)), known.aten,
        )  # fmt: skip
        if reduction == "batchmean":
            total = _add(graph, node, torch.sum, (each,), {}, known.meta)
            result = _add(
                graph,
                node,
                torch.div,
                (total, a.shape[0]),
                {},
                known.meta,
                (torch.ops.aten.div.Tensor,),
            )
        else:
            result = _add(
                graph,
                node,
                torch.sum if reduction == "sum" else torch.mean,
                (each,),
                {},
                known.meta,
            )
    node.replace_all_uses_with(result)
    graph.erase_node(node)


_SDPA_NAMES = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)


def _drop_plain_mask(node: Node, pattern_of: Callable[[Node], Pattern | None]) -> None:
    """A mask proved causal, or to allow all, is said by the kernel's argument, and is dead code."""
    given = _bind(node, _SDPA_NAMES)
    mask = given.get("attn_mask")
    if not isinstance(mask, Node) or given.get("is_causal"):
        return
    pattern = pattern_of(mask)
    if pattern is None:
        return
    given["attn_mask"] = None
    given["is_causal"] = pattern is Pattern.CAUSAL
    node.args = (given.pop("query"), given.pop("key"), given.pop("value"))
    node.kwargs = given


def _warn_of_mask(node: Node, mask: Node) -> None:
    """Once for a mask, where it is large: layers share it."""
    meta = facts(mask).meta
    first = min(n for n in mask.users if short_name(n.target) == "scaled_dot_product_attention")
    if meta.nbytes >= _LARGE_MASK and node is first:
        log.warning(
            "attention at %s takes a mask of %.1f MiB as it is, whole on every rank",
            facts(node).source,
            meta.nbytes / 2**20,
        )


def _tile_mask(
    graph: Graph, node: Node, tiles_of: Callable[[Node], tuple[TileMask, list[Node]] | None]
) -> None:
    """A mask that the model computes from vectors is made tile by tile, while attention runs."""
    given = _bind(node, _SDPA_NAMES)
    mask = given.get("attn_mask")
    if not isinstance(mask, Node) or facts(mask).meta.shape[-2] == 1:
        return
    found = tiles_of(mask)
    rank = len(facts(given["query"]).meta.shape)
    if found is None or rank != 4 or given.get("dropout_p") or given.get("is_causal"):
        _warn_of_mask(node, mask)
        return
    expression, leaves = found
    options = {k: given[k] for k in ("scale", "enable_gqa") if given.get(k)}
    with graph.inserting_before(node):
        args = (given["query"], given["key"], given["value"], *leaves)
        tiled = _add(
            graph, node, tiled_attention, args, {"mask": expression, **options}, facts(node).meta
        )
    node.replace_all_uses_with(tiled)
    graph.erase_node(node)


def _share_key_heads(graph: Graph, node: Node) -> None:
    """Key and value heads that the model repeats for its query heads are shared instead.

    So enable_gqa says it, and no copies are exchanged.
    """
    given = _bind(node, _SDPA_NAMES)
    if given.get("enable_gqa"):
        return
    key, value = (_repeated_from(given[name]) for name in ("key", "value"))
    if key is None or value is None or key[1] != value[1]:
        return
    query = given.pop("query")
    del given["key"], given["value"]
    given["enable_gqa"] = True
    node.args, node.kwargs = (query, key[0], value[0]), given


def _repeated_from(node: Any) -> tuple[Node, int] | None:
    """(x, g) where the node is x [B, Hkv, S, D] with each head g times in a row; else None."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if len(facts(node).meta.shape) != 4:
        return None
    name = short_name(node.target)
    if name == "contiguous":
        return _repeated_from(node.args[0])
    if name == "repeat_interleave":
        given = _bind(node, ("input", "repeats", "dim"))
        source, repeats = given.get("input"), given.get("repeats")
        if isinstance(source, Node) and isinstance(repeats, int) and given.get("dim") in (1, -3):
            return source, repeats
        return None
    return _expanded_from(node) if name in ("reshape", "view", "flatten") else None


def _expanded_from(node: Node) -> tuple[Node, int] | None:
    """The same said as x[:, :, None].expand(B, Hkv, g, S, D).reshape(B, Hkv * g, S, D)."""
    wide: Any = node.args[0]
    if short_name(wide.target) not in ("expand", "broadcast_to"):
        return None
    narrow: Any = wide.args[0]
    if not (short_name(narrow.target) == "unsqueeze" or _adds_dims_alone(narrow)):
        return None
    source: Any = narrow.args[0]
    b, h, s, d = facts(node).meta.shape
    wide_shape = facts(wide).meta.shape
    if len(wide_shape) != 5 or wide_shape[3:] != (s, d) or wide_shape[0] != b:
        return None
    kept, groups = wide_shape[1], wide_shape[2]
    shapes = facts(narrow).meta.shape, facts(source).meta.shape
    if shapes != ((b, kept, 1, s, d), (b, kept, s, d)) or kept * groups != h or groups == 1:
        return None
    return source, groups


def _adds_dims_alone(node: Node) -> bool:
    """x[:, :, None]: an index of whole slices and None, which moves nothing."""
    if short_name(node.target) != "getitem":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(i is None or i is Ellipsis or i == slice(None) for i in index)
