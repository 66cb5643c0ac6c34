"""Attention written by hand (product, softmax, product) becomes one call.

Only where the result stays the same up to rounding. If the masks are proved causal or empty, the
call is scaled_dot_product_attention; else scores are made, changed as the model does, and used
strip by strip. Scores [.., S, T] then exist nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ...capture.flex import flex_weights
from ...capture.targets import UnderAutocast
from ...graph import facts, set_facts, short_name
from ..insert import bind
from ..masks import Pattern, Softmax, tiled_attention
from .groups import merge_groups
from .masking import MaskSearch, by_runs, noted, whole_leaves
from .products import Product, as_product, split_baddbmm
from .scores import CASTS, ScoreMask, Scores, walk_back

__all__ = ["fuse_attention"]


def fuse_attention(graph: Graph, masks: MaskSearch) -> Graph:
    """Rewrite each hand-written attention that qualifies; values change by rounding."""
    split_baddbmm(graph)
    merge_groups(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = short_name(node.target)
        if name == "softmax" and _is_last_dim(node):
            found = _by_hand(node)
        elif node.target is flex_weights:
            found = _by_flex(node)
        else:
            continue
        plain = None if found is None else _plain_scores(found)
        if found is not None and not _as_kernel(graph, found, plain, masks):
            _as_strips(graph, found, plain, masks)
    graph.lint()
    return graph


@dataclass(frozen=True)
class _Attention:
    """What makes weights of scores, and what is made with them.

    at: the node that takes scores. casts: of weights. dtype: that softmax is asked to work in.
    sink: [.., H, S, 1], one more score of each query, whose weight is dropped.
    """

    scores: Any
    at: Node
    after: Product
    casts: list[Node] = field(default_factory=list)
    dropout_p: float = 0.0
    dtype: torch.dtype | None = None
    stats: tuple[str, ...] = ()
    sink: Node | None = None


def _by_hand(softmax: Node) -> _Attention | None:
    casts: list[Node] = []
    scores, sink = _sink_beside(_without_greatest(softmax.args[0]))
    final, dropout_p = _walk_forward(softmax, casts, sink is not None)
    if final is None or isinstance(softmax.target, UnderAutocast):
        return None
    after = as_product(final)
    if after is None or after.left is not _last(softmax, final):
        return None
    dtype: Any = softmax.kwargs.get("dtype")
    return _Attention(scores, softmax, after, casts, dropout_p, dtype, sink=sink)


def _without_greatest(scores: Any) -> Any:
    """x of x - x.max(-1, keepdim=True): softmax is the same without it."""
    if not isinstance(scores, Node) or short_name(scores.target) != "sub" or scores.kwargs:
        return scores
    x, greatest = scores.args[0], scores.args[1]
    while isinstance(greatest, Node) and short_name(greatest.target) in ("getitem", "detach"):
        if short_name(greatest.target) == "getitem" and greatest.args[1] != 0:
            return scores
        greatest = greatest.args[0]
    if not isinstance(greatest, Node) or short_name(greatest.target) not in ("max", "amax"):
        return scores
    given = bind(greatest, ("input", "dim", "keepdim"))
    rank = len(facts(scores).meta.shape)
    plain = given.get("dim") in (-1, rank - 1) and given.get("keepdim") is True
    return x if plain and given["input"] is x else scores


def _sink_beside(scores: Any) -> tuple[Any, Node | None]:
    """(scores, sink) of cat([scores, sink], -1), where the sink is one column."""
    if not isinstance(scores, Node) or short_name(scores.target) not in ("cat", "concat"):
        return scores, None
    given = bind(scores, ("tensors", "dim"))
    parts: Any = given["tensors"]
    if given.get("dim") not in (-1, len(facts(scores).meta.shape) - 1) or len(parts) != 2:
        return scores, None
    inner, sink = parts
    if facts(sink).meta.shape[-1] != 1 or len(facts(sink).meta.shape) != 4:
        return scores, None
    return inner, sink


def _before_expand(sink: Node) -> Node:
    """What was expanded to all batch rows and queries."""
    while short_name(sink.target) in ("expand", "broadcast_to") and sink.op == "call_function":
        source = sink.args[0]
        if not isinstance(source, Node) or len(facts(source).meta.shape) != 4:
            break
        sink = source
    return sink


def _by_flex(node: Node) -> _Attention:
    scores, value = node.args
    assert isinstance(scores, Node) and isinstance(value, Node)
    stats: Any = node.kwargs.get("stats", ())
    return _Attention(scores, node, Product(node, scores, value), stats=stats)


def _last(softmax: Node, final: Node) -> Any:
    """What the last product takes as weights."""
    node = softmax
    while final not in node.users:
        (node,) = node.users
    return node


def _plain_scores(found: _Attention) -> tuple[Scores, Product] | None:
    """Scores that are a product, scaled and masked, and nothing else."""
    scores = None if found.stats or found.sink else walk_back(found.scores)
    before = None if scores is None else as_product(scores.product)
    if scores is None or before is None or not before.is_plain or scores.scale <= 0:
        return None
    if facts(before.node).meta.shape != facts(found.scores).meta.shape:
        return None  # a mask that has more heads or rows than the product
    return scores, before


def _as_kernel(
    graph: Graph, found: _Attention, plain: tuple[Scores, Product] | None, masks: MaskSearch
) -> bool:
    """One scaled_dot_product_attention, where its arguments say all of it."""
    if plain is None:
        return False
    scores, before = plain
    patterns = [masks.pattern(mask.node) for mask in scores.masks]
    known_masks = all(pattern is not None for pattern in patterns)
    if not known_masks and not _by_mask(scores.masks, masks):
        return False
    options: dict[str, Any] = {
        "dropout_p": found.dropout_p,
        "is_causal": known_masks and Pattern.CAUSAL in patterns,
        "scale": scores.scale,
    }
    final = found.after.node
    with graph.inserting_before(final):
        operands = _operands(graph, before, found.after)
        if operands is None or _rounds_more(found, scores, operands[0]):
            return False
        if not known_masks:
            options["attn_mask"] = _all_allowed(graph, scores.masks)
        if _is_shared(*operands[:2]):
            options["enable_gqa"] = True
        _replace(graph, found, F.scaled_dot_product_attention, operands, (), options)
    return True


def _rounds_more(found: _Attention, scores: Scores, query: Node) -> bool:
    softmax = () if found.at is found.after.node else (found.at,)
    return _in_fewer_bits(query, [*softmax, *scores.casts, *found.casts])


def _as_strips(
    graph: Graph, found: _Attention, plain: tuple[Scores, Product] | None, masks: MaskSearch
) -> None:
    """Scores that no kernel knows: made, changed as the model does, and used strip by strip."""
    before = _only_product(found.scores)
    if before is None or not before.is_plain or not _is_private(before.node, found.at):
        return
    if isinstance(found.after.node.target, UnderAutocast):
        return
    tiles = masks.score_tiles(found.scores, before.node)
    if tiles is None:
        return
    weights = facts(found.casts[-1]).meta.dtype if found.casts else None
    options: dict[str, Any] = {
        "mask": tiles[0],
        "softmax": Softmax(found.dtype, weights, found.stats),
    }
    with graph.inserting_before(found.after.node):
        operands = _operands(graph, before, found.after)
        if operands is None:
            return
        if _is_shared(*operands[:2]):
            options["enable_gqa"] = True
        if found.dropout_p:
            options["dropout_p"] = found.dropout_p
        leaves = tuple(tiles[1])
        masks.warn(found.after.node, whole_leaves(tiles[1], found.scores))
        if found.sink is not None:
            leaves, options["sink"] = (*leaves, _before_expand(found.sink)), True
        note = "strips: the model changes scores before softmax"
        if plain is not None and not _rounds_more(found, plain[0], operands[0]):
            # Masked by a finite number: alike, while each query reads some key.
            dropout = bool(found.dropout_p)
            runs, note = by_runs(found.after.node, operands, None, tiles[0], masks, dropout)
            if runs is not None:
                options["runs"] = replace(runs, scale=plain[0].scale)
        noted(_replace(graph, found, tiled_attention, operands, leaves, options), note)


def _operands(graph: Graph, before: Product, after: Product) -> tuple[Node, Node, Node] | None:
    """Queries, keys and values [.., H, S, D]; None where no kernel takes them together."""
    given = before.left, before.right, after.right
    q, k, v = (facts(n).meta for n in given)
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        return None
    query, key, value = before.left_last(graph), before.right_last(graph), after.right_rows(graph)
    q, k, v = (facts(n).meta.shape for n in (query, key, value))
    if not (len(q) == len(k) == len(v) and len(q) in (3, 4)) or k[:-2] != v[:-2]:
        return None
    return (query, key, value) if q[:-2] == k[:-2] or _is_shared(query, key) else None


def _replace(
    graph: Graph,
    found: _Attention,
    target: Any,
    operands: tuple[Node, Node, Node],
    leaves: tuple[Node, ...],
    options: dict[str, Any],
) -> Node:
    final = found.after.node
    fused = graph.call_function(target, (*operands, *leaves), options)
    q, v = facts(operands[0]).meta.shape, facts(operands[2]).meta.shape
    meta = replace(facts(final).meta, shape=(*q[:-1], v[-1]))
    outs = (meta, *facts(final).outs[1:])
    set_facts(fused, replace(facts(final), outs=outs, random=found.dropout_p > 0, aten=()))
    final.replace_all_uses_with(found.after.in_order(graph, fused))
    return fused


def _only_product(scores: Any) -> Product | None:
    """The one product of two matrices that scores [.., S, T] are made of."""
    if not isinstance(scores, Node) or len(facts(scores).meta.shape) not in (3, 4):
        return None
    plane = facts(scores).meta.shape[-2:]
    found: list[Product] = []
    seen: set[Node] = set()
    todo = [scores]
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function" or not facts(node).single:
            continue
        seen.add(node)
        if facts(node).meta.shape[-2:] != plane:
            continue
        product = as_product(node)
        if product is None:
            todo.extend(node.all_input_nodes)
        elif facts(node).meta.shape == facts(scores).meta.shape:
            found.append(product)
    return found[0] if len(found) == 1 else None


def _is_private(product: Node, at: Node) -> bool:
    """Whether scores are used for softmax alone, on whatever way."""
    todo, seen = [product], set()
    while todo:
        node = todo.pop()
        if node in seen or node is at:
            continue
        seen.add(node)
        if node.op == "output" or (node is not product and as_product(node) is not None):
            return False
        if node > at:  # past softmax's argument there is nothing but softmax
            return False
        todo.extend(node.users)
    return True


def _by_mask(found: list[ScoreMask], masks: MaskSearch) -> bool:
    """Whether kernels that are given the masks weigh keys as the model does."""
    if any(masks.tiles(mask.node) is None for mask in found):
        return False
    if all(_forbids_wholly(mask) for mask in found):
        return True
    if len(found) > 1:
        return False
    runs, queries = masks.runs(found[0].node), facts(found[0].node).meta.shape[-2]
    return bool(runs) and sum(run.bottom - run.top for run in runs) == queries


def _forbids_wholly(mask: ScoreMask) -> bool:
    """-inf where not allowed. With a finite fill a query that may read nothing weighs all keys
    alike, and kernels get its gradient wrong (torch 2.13, CPU: log-sum-exp absorbs the count).
    """
    return mask.fill == float("-inf")


def _all_allowed(graph: Graph, masks: list[ScoreMask]) -> Node:
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


def _in_fewer_bits(query: Node, floats: list[Node]) -> bool:
    """Whether something between is computed less exactly than the queries are given."""
    dtypes = [facts(n).meta.dtype for n in floats]
    least = torch.finfo(facts(query).meta.dtype).bits
    return not all(d.is_floating_point and torch.finfo(d).bits >= least for d in dtypes)


def _is_shared(query: Node, key: Node) -> bool:
    """One key head for all query heads, by broadcasting."""
    q, k = facts(query).meta.shape, facts(key).meta.shape
    return len(q) == 4 and k[-3] == 1 and q[-3] > 1 and q[:-3] == k[:-3]


def _walk_forward(
    softmax: Node, casts: list[Node], sink: bool = False
) -> tuple[Node | None, float]:
    """(product with the values, dropout probability), from softmax through casts and dropout."""
    node, probability = softmax, 0.0
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not user.args or node not in user.args:
            return None, 0.0
        name = short_name(user.target)
        if as_product(user) is not None:
            return (None if sink else user), probability
        if user.args[0] is not node:
            return None, 0.0
        if sink and name == "getitem":
            if user.args[1] != (Ellipsis, slice(None, -1, None)):
                return None, 0.0
            sink = False
            node = user
            continue
        if name == "dropout":
            training = user.args[2] if len(user.args) > 2 else user.kwargs.get("training", True)
            rate: Any = user.args[1] if len(user.args) > 1 else user.kwargs.get("p", 0.5)
            probability = float(rate) if training else 0.0
        elif name in CASTS:
            casts.append(user)
        else:
            return None, 0.0
        node = user
    return None, 0.0
