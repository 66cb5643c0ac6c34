"""flex_attention, taken apart: scores, score_mod and mask_mod on all positions at once, weights.

What score_mod and mask_mod do to one score is recorded as torch calls on broadcast positions, so
that it is known as an expression: it is proved causal, or evaluated on tiles, like any mask. No
score is ever held for all pairs of positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..errors import CaptureError
from ..graph import facts, short_name

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["flex_weights", "handlers", "mod_violation"]

_MODULE = "torch.nn.attention.flex_attention"
_LOOKUPS = {"getitem", "index"}
_FACTORIES = {"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"}


_aten = torch.ops.aten
# Copies, and what treats each element by itself but lacks the tag in some torch version.
_UNTAGGED = {
    _aten._to_copy,
    _aten.clone,
    _aten.lift_fresh,
    _aten.where,
    _aten.detach,
    _aten.alias,
    _aten.scalar_tensor,
    _aten.copy,
    _aten.floor_divide,
    _aten.masked_fill,
    _aten.rsub,
}


def handlers() -> dict[str, Callable[..., Any]]:
    """A handler for each dotted path."""
    return {
        f"{_MODULE}.flex_attention": _attention,
        f"{_MODULE}.create_block_mask": _block_mask,
    }


def flex_weights(
    scores: torch.Tensor, value: torch.Tensor, stats: tuple[str, ...] = ()
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(scores) @ value, zeros where all scores are -inf; and statistics of the scores.

    Args:
        scores: [B, H, S, T], fp32 or fp64.
        value: [B, H, T, E].
        stats: of "lse" and "max", each a further result [B, H, S].
    """
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    out = weights.to(value.dtype) @ value
    each = {"lse": scores.logsumexp(-1), "max": scores.amax(-1)}
    return (out, *(each[name] for name in stats)) if stats else out


def _block_mask(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> Any:
    """A BlockMask that knows its mask_mod and nothing else: blocks are found while it runs."""
    bound.apply_defaults()
    given = bound.arguments
    kind = function.__globals__["BlockMask"]
    mask = object.__new__(kind)
    size = given["BLOCK_SIZE"]
    mask.__dict__.update(
        seq_lengths=(given["Q_LEN"], given["KV_LEN"]),
        mask_mod=given["mask_mod"],
        BLOCK_SIZE=(size, size) if isinstance(size, int) else tuple(size),
    )
    return mask


def _attention(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> Any:
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = given["query"], given["key"], given["value"]
    mask, where = given["block_mask"], recorder.where()
    lengths = tuple(getattr(mask, "seq_lengths", ())) if mask is not None else ()
    if lengths and lengths != (query.shape[-2], key.shape[-2]):
        raise CaptureError(
            "a block mask was made for other lengths.",
            where=where,
            have=f"mask for {lengths[0]} queries and {lengths[1]} keys, attention has "
            f"{query.shape[-2]} and {key.shape[-2]}",
            why="which positions it means is not known",
            fix="make it with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) for this length; "
            "the length is that of the whole sequence",
        )
    _refuse_bare_blocks(mask, where)
    if query.shape[1] != key.shape[1]:
        if not given["enable_gqa"] or query.shape[1] % key.shape[1]:
            raise CaptureError(
                "flex_attention has different numbers of heads.",
                where=where,
                have=f"{query.shape[1]} query heads, {key.shape[1]} key heads",
                why="torch asks for enable_gqa=True, and for key heads that divide query heads",
                fix="pass enable_gqa=True",
            )
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = given["scale"] if given["scale"] is not None else query.shape[-1] ** -0.5
    scores = torch.matmul(query, key.transpose(-2, -1)).to(exact) * scale
    scores = _modified(recorder, scores, given["score_mod"], getattr(mask, "mask_mod", None))
    return _results(recorder, scores, value, given)


def _refuse_bare_blocks(mask: Any, where: str) -> None:
    """A BlockMask made of block indices alone: what it allows stands in its blocks only."""
    mod, blocks = getattr(mask, "mask_mod", None), getattr(mask, "kv_num_blocks", None)
    if blocks is None or getattr(mod, "__name__", "") != "noop_mask":
        return
    sizes, lengths = tuple(mask.BLOCK_SIZE), tuple(mask.seq_lengths)
    if any(size < length for size, length in zip(sizes, lengths, strict=True)):
        raise CaptureError(
            "a block mask has blocks and no mask_mod.",
            where=where,
            have=f"blocks of {sizes} for lengths {lengths}",
            why="which keys are read is found from mask_mod; blocks are not looked at",
            fix="pass mask_mod= to BlockMask.from_kv_blocks, or use create_block_mask",
        )


def _modified(recorder: Recorder, scores: torch.Tensor, score_mod: Any, mask_mod: Any) -> Any:
    sizes = scores.shape
    places = [
        torch.arange(size, device=scores.device).view([-1 if d == at else 1 for d in range(4)])
        for at, size in enumerate(sizes)
    ]
    roots = {recorder.node_for(x) for x in (scores, *places)}
    before = set(recorder.graph.nodes)
    allowed = None
    try:
        if score_mod is not None:
            scores = score_mod(scores, *places)
        if mask_mod is not None:
            allowed = mask_mod(*places)
    finally:  # what means something else for all positions may have made torch fail
        _check(recorder, [n for n in recorder.graph.nodes if n not in before], roots)
    for result, name in ((scores, "score_mod"), (allowed, "mask_mod")):
        if result is not None and torch.broadcast_shapes(result.shape, sizes) != sizes:
            raise _refused(recorder, f"{name} gives a tensor of {tuple(result.shape)}", sizes)
    if allowed is not None:
        scores = torch.where(allowed, scores, float("-inf"))
    return scores


def _check(recorder: Recorder, nodes: list[Node], roots: set[Node]) -> None:
    """A mod is written for one score; on all of them at once only some calls mean the same."""
    reached = set(roots)
    for node in nodes:
        if not any(each in reached for each in node.all_input_nodes):
            continue
        reached.add(node)
        problem = mod_violation(node)
        if problem:
            raise _refused(recorder, f"a mod calls {problem}", facts(node).meta.shape)


def mod_violation(node: Node) -> str:
    """What is wrong with a call in a mod; empty where it treats each position by itself."""
    name, known = short_name(node.target), facts(node)
    if len(known.meta.shape) > 4:
        return f"{name}, whose result has a dim of its own"
    if name in _LOOKUPS:
        index = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
        plain = all(isinstance(i, (Node, int)) for i in index)
        return "" if plain else f"{name} with slices"
    if name in _FACTORIES or not known.aten:
        return ""
    by_element = all(
        torch.Tag.pointwise in op.tags or op.overloadpacket in _UNTAGGED for op in known.aten
    )
    return "" if by_element else name


def _refused(recorder: Recorder, what: str, shape: Any) -> CaptureError:
    return CaptureError(
        f"flex_attention: {what}.",
        where=recorder.where(),
        have=f"a result of shape {tuple(shape)}",
        why="score_mod and mask_mod are evaluated for all positions at once, batch [B, 1, 1, 1], "
        "heads [1, H, 1, 1], queries [1, 1, S, 1] and keys [1, 1, 1, T]",
        fix="look tensors up with all positions in one index, table[b, q_idx], and use "
        "operations that treat each element by itself",
    )


def _results(recorder: Recorder, scores: Any, value: Any, given: dict[str, Any]) -> Any:
    aux = given.get("return_aux")
    wants_lse = bool(given.get("return_lse") or getattr(aux, "lse", False))
    stats = (("lse",) if wants_lse else ()) + (("max",) if getattr(aux, "max_scores", 0) else ())
    out = recorder.call(flex_weights, (scores, value), {"stats": stats} if stats else {})
    if aux is None:
        return tuple(out) if stats else out
    named = dict(zip(stats, out[1:], strict=True)) if stats else {}
    module = inspect.getmodule(type(aux))
    return (out[0] if stats else out), module.AuxOutput(  # type: ignore[union-attr]
        lse=named.get("lse"), max_scores=named.get("max")
    )
