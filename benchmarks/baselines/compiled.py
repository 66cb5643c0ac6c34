"""What torch.compile does to memory, without its kernels: a block's forward and backward are traced
as one graph, and AOTAutograd's min-cut decides what is kept and what is computed again.

Two things stand in for Inductor, which needs the GPU that it compiles for. Its decompositions are
used, so that the cut sees what it would. And it fuses chains of elementwise operations and
reductions into one kernel each: `Fused` runs the same operations, but only what an unfusable
operation or the graph's result reads is counted as memory. That is the least that fusing could
leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint

from autosp_dtensor.plan.measure import uncounted

__all__ = ["Fused", "compile_blocks", "compiled"]

_REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "var_mean", "argmax", "prod", "any"}
_VIEWS_AND_MADE = {
    "view", "reshape", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze",
    "squeeze", "slice", "select", "split", "split_with_sizes", "alias", "detach", "full",
    "full_like", "zeros", "zeros_like", "ones_like", "empty", "iota", "arange", "constant_pad_nd",
    "cat", "slice_scatter", "select_scatter", "gather", "clone", "_to_copy", "convert_element_type",
    "scalar_tensor", "where", "lift_fresh_copy", "as_strided",
    "scatter",  # of a constant into zeros, as a loss does: Inductor makes it elementwise
}  # fmt: skip


def _fusable(node: Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function"  # operator.getitem
    name = target.name().rpartition("::")[2].partition(".")[0]
    pointwise = torch.Tag.pointwise in target.tags
    return pointwise or name in _REDUCTIONS or name in _VIEWS_AND_MADE


class Fused(Interpreter):
    """Runs a graph; what only fused operations read takes no memory."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self._inner = {
            node
            for node in module.graph.nodes
            if _fusable(node) and all(_fusable(user) for user in node.users)
        }

    def run_node(self, n: Node) -> Any:
        with uncounted() if n in self._inner else contextlib.nullcontext():
            return super().run_node(n)


def _compiler(module: GraphModule, _: Any) -> Callable[..., Any]:
    runner = Fused(module)

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()  # so that a value is freed at its last use
        return runner.run(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors as torch.compile would partition it."""
    return aot_function(
        function,
        fw_compiler=_compiler,
        bw_compiler=_compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def compile_blocks(model: Any, full: bool = False) -> None:
    """Each block's forward, and the loss, in place; one graph serves all blocks.

    full: each block runs again in backward, all of it.
    """
    shared: dict[str, Callable[..., Any]] = {}
    for block in model.model.layers:
        _compile_block(block, shared, full)
    plain = model.loss_function

    def loss(logits: Any, labels: Any, vocab_size: int, **options: Any) -> Any:
        tensors = {k: v for k, v in options.items() if isinstance(v, torch.Tensor)}
        names = [k for k in ("num_items_in_batch", "shift_labels") if k in tensors]

        def call(logits: Any, labels: Any, *rest: Any) -> Any:
            return plain(logits, labels, vocab_size, **dict(zip(names, rest, strict=True)))

        if "loss" not in shared:
            shared["loss"] = compiled(call)
        return shared["loss"](logits, labels, *(tensors[name] for name in names))

    model.loss_function = loss


def _compile_block(block: nn.Module, shared: dict[str, Callable[..., Any]], full: bool) -> None:
    forward = block.forward

    def call(hidden: Any, *, position_embeddings: Any, **_: Any) -> Any:
        names, values = zip(*block.named_parameters(), strict=True)
        if "block" not in shared:
            shared["block"] = compiled(_functional(block, forward, names))
        given = (hidden, *position_embeddings, *values)
        if full:
            return checkpoint(shared["block"], *given, use_reentrant=False)
        return shared["block"](*given)

    block.forward = call  # type: ignore[method-assign]


def _functional(block: nn.Module, forward: Callable[..., Any], names: tuple[str, ...]) -> Any:
    """The block as a function of what it is given and its parameters."""
    owners = [(block.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names]

    def call(hidden: Any, cos: Any, sin: Any, *values: Any) -> Any:
        before = [owner._parameters[name] for owner, name in owners]
        try:
            for (owner, name), value in zip(owners, values, strict=True):
                owner._parameters[name] = value
            return forward(hidden, position_embeddings=(cos, sin), attention_mask=None)
        finally:
            for (owner, name), value in zip(owners, before, strict=True):
                owner._parameters[name] = value

    return call
