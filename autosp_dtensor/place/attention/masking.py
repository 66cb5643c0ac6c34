"""Attention masks: said by the kernel's argument, made tile by tile, or used as they are."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ...graph import arg_nodes, exact, facts
from ..insert import add_call, bind
from ..masks import (
    Pattern,
    ReadState,
    Run,
    Runs,
    TileMask,
    kernel_for,
    prove_runs,
    recognize,
    tile_mask,
    tile_scores,
    tiled_attention,
)

__all__ = ["MaskSearch", "by_runs", "noted", "plain_or_tiled", "whole_leaves"]

log = logging.getLogger("autosp_dtensor")
_LARGE_MASK = 1 << 20
_NAMES = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)

Tiles = tuple[TileMask, list[Node]]


class MaskSearch:
    """What is known of the masks of one graph; equal expressions are one object.

    So layers with the same mask stay equal, and tiles are looked for once.
    """

    def __init__(self, read: ReadState | None) -> None:
        self.read = read
        self._patterns: dict[Node, Pattern | None] = {}
        self._tiles: dict[Node, Tiles | None] = {}
        self._runs: dict[Node, tuple[Run, ...] | None] = {}
        self._same: dict[Any, TileMask] = {}
        self._told: set[Node] = set()

    def pattern(self, mask: Node) -> Pattern | None:
        """What the mask allows, if kernels have a word for it."""
        if mask not in self._patterns:
            self._patterns[mask] = recognize(mask, self.read)
        return self._patterns[mask]

    def tiles(self, mask: Node) -> Tiles | None:
        """The mask as an expression and what it is made of."""
        if mask not in self._tiles:
            self._tiles[mask] = self._shared(tile_mask(mask))
        return self._tiles[mask]

    def runs(self, mask: Node) -> tuple[Run, ...] | None:
        """The mask as runs of queries, where no data says them."""
        if mask not in self._runs:
            self._runs[mask] = prove_runs(mask, self.read)
        return self._runs[mask]

    def score_tiles(self, scores: Node, product: Node) -> Tiles | None:
        """Scores as an expression of queries times keys."""
        return self._shared(tile_scores(scores, product))

    def warn(self, node: Node, masks: list[Node]) -> None:
        """Of large masks that attention at a node takes as they are: once of each, if layers share
        it."""
        for mask in masks:
            meta, given = facts(mask).meta, _as_given(mask)
            if meta.nbytes < _LARGE_MASK or given in self._told:
                continue
            self._told.add(given)
            log.warning(
                "attention at %s takes a mask of %.1f MiB as it is, whole on every rank",
                facts(node).source,
                meta.nbytes / 2**20,
            )

    def _shared(self, found: Tiles | None) -> Tiles | None:
        if found is None:
            return None
        return self._same.setdefault(_signature(found[0]), found[0]), found[1]


def _signature(mask: TileMask) -> Any:
    number = {node: k for k, node in enumerate(mask.root.graph.nodes)}

    def of(node: Node) -> Any:
        called = node.target if node.op == "call_function" else node.op
        args = exact((node.args, node.kwargs), lambda used: ("node", number[used]))
        return called, args, facts(node).outs

    return number[mask.root], mask.product is None, tuple(of(node) for node in number)


def plain_or_tiled(graph: Graph, node: Node, masks: MaskSearch) -> Node:
    """One scaled_dot_product_attention with its mask in the best form; gives what stays."""
    given = bind(node, _NAMES)
    node.args = (given.pop("query"), given.pop("key"), given.pop("value"))
    node.kwargs = given  # rules count on this order
    mask = given.get("attn_mask")
    if not isinstance(mask, Node) or given.get("is_causal"):
        return noted(node, f"sdpa: {'is_causal' if given.get('is_causal') else 'no mask'}")
    pattern = masks.pattern(mask)
    if pattern is not None:  # what built the mask is dead code now
        node.kwargs = {**given, "attn_mask": None, "is_causal": pattern is Pattern.CAUSAL}
        what = "causal" if pattern is Pattern.CAUSAL else "to allow all"
        return noted(node, f"sdpa: its mask is proved {what}")
    if facts(mask).meta.shape[-2] == 1:
        if not _kernel_for(node, arg_nodes(node)[:3], bool(given.get("dropout_p")))[0]:
            return noted(node, "sdpa: a mask of keys alone")
        mask = _for_each_query(graph, node, mask)
    found = masks.tiles(mask) if _has_own_rows(node) else None
    if found is None:
        masks.warn(node, [mask])
        return noted(node, "sdpa: the mask as it is given")
    expression, leaves = found
    masks.warn(node, whole_leaves(leaves, mask))
    options = {k: given[k] for k in ("enable_gqa", "dropout_p") if given.get(k)}
    if given.get("scale") is not None:  # 0 is a scale
        options["scale"] = given["scale"]
    dropout = bool(given.get("dropout_p"))
    runs, note = by_runs(node, arg_nodes(node)[:3], mask, expression, masks, dropout)
    with graph.inserting_before(node):
        options["mask"] = expression
        if runs is not None:
            options["runs"] = runs
        args = (*node.args, *leaves)
        tiled = add_call(graph, node, tiled_attention, args, options, facts(node).meta)
    tiled.meta["autosp"] = facts(tiled).having(random=facts(node).random, note=note)
    node.replace_all_uses_with(tiled)
    graph.erase_node(node)
    return tiled


def by_runs(
    node: Node,
    operands: tuple[Node, ...],
    mask: Node | None,
    expression: TileMask,
    search: MaskSearch,
    dropout: bool,
) -> tuple[Runs | None, str]:
    """Whether a variable-length kernel may run attention, and a note of what runs it and why.

    mask: to be proved in the trace; None: to be looked for while the program runs.
    """
    if expression.trained:
        return None, "tiles: the mask is trained"
    kernel, why = _kernel_for(node, operands, dropout)
    if not kernel:
        return None, f"tiles: {why}"
    known = None if mask is None else search.runs(mask)
    if known is None:
        note = f"{kernel} where the mask is runs of keys in the data, else tiles"
        return Runs(kernel=kernel), note
    if not known:
        return None, "tiles: the mask is no runs of keys, alike for rows and heads"
    windows = sorted({(run.before, run.after) for run in known})
    text = ", ".join(map(str, windows[:2])) + (" ..." if len(windows) > 2 else "")
    count = "1 run" if len(known) == 1 else f"{len(known)} runs"
    return Runs(known, kernel=kernel), f"{kernel}: {count} of keys by windows {text}, proved"


def _kernel_for(node: Node, operands: tuple[Node, ...], dropout: bool) -> tuple[str, str]:
    query, key, value = (facts(each).meta for each in operands)
    return kernel_for(query, key, value, facts(node).meta.dtype, dropout)


def _for_each_query(graph: Graph, node: Node, mask: Node) -> Node:
    """A mask [.., 1, T] as [.., S, T], which nothing ever holds."""
    *lead, _, keys = facts(mask).meta.shape
    shape = (*lead, facts(node).meta.shape[-2], keys)
    meta = replace(facts(mask).meta, shape=shape)
    with graph.inserting_before(node):
        return add_call(graph, node, torch.Tensor.expand, (mask, *shape), {}, meta)


def whole_leaves(leaves: list[Node], mask: Node) -> list[Node]:
    """What a mask [.., S, T] is made of that has as many entries for each pair."""
    plane = facts(mask).meta.shape[-2:]
    return [leaf for leaf in leaves if facts(leaf).meta.shape[-2:] == plane]


def _as_given(mask: Node) -> Node:
    """What a mask is a view, a cast, the opposite of: each layer may make its own."""
    while mask.op == "call_function":
        tensors = mask.all_input_nodes
        plane = facts(mask).meta.shape[-2:]
        if len(tensors) != 1 or facts(tensors[0]).meta.shape[-2:] != plane:
            break
        mask = tensors[0]
    return mask


def noted(node: Node, note: str) -> Node:
    """The node, with a note of what runs it and why."""
    node.meta["autosp"] = facts(node).having(note=note)
    return node


def _has_own_rows(node: Node) -> bool:
    """Whether queries, keys and values have batch rows of their own, and queries all heads."""
    whole = facts(node).meta.shape
    query, key, value = (facts(each).meta.shape for each in arg_nodes(node)[:3])
    return (
        len(whole) in (3, 4)
        and query[:-2] == whole[:-2]
        and key[:-3] == value[:-3] == whole[:-3]
        and key[-3] == value[-3]
    )
