"""torch.nn.attention.bias: causal masks that are said by two lengths, [S, T], and hold no data.

As tensors they have memory that nobody fills, so a trace must never take one for a mask.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..errors import CaptureError
from ..graph import given, short_name

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["Bias", "handlers", "made_by_class", "refuse_bias", "with_plain_mask"]

_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()


@dataclass(frozen=True)
class Bias:
    """What causal_upper_left and causal_lower_right give in a trace. diagonal: of the last key that
    query 0 reads; None: where both begin at 0, which `is_causal` says."""

    queries: int
    keys: int
    diagonal: int | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the recorder takes it out of a call first")


def handlers() -> dict[str, Callable[..., Any]]:
    """A handler for each dotted path."""
    made = {"causal_upper_left": _upper_left, "causal_lower_right": _lower_right}
    return {f"torch.nn.attention.bias.{name}": handler for name, handler in made.items()}


def _upper_left(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> Bias:
    queries, keys = bound.arguments["size"]
    return Bias(queries, keys, None)


def _lower_right(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> Bias:
    queries, keys = bound.arguments["size"]
    return Bias(queries, keys, keys - queries or None)


@contextlib.contextmanager
def made_by_class(active: Callable[[], Recorder | None]) -> Iterator[None]:
    """While it lasts, `CausalBias(variant, S, T)` in a trace gives what the two functions give."""
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or "__new__" in vars(module.CausalBias):  # there already: a trace in a trace
        yield
        return
    kind: Any = module.CausalBias
    original = kind.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return original(cls, *args, **kwargs)
        named = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
        variant, queries, keys = (named[k] for k in ("variant", "seq_len_q", "seq_len_kv"))
        if not isinstance(variant, module.CausalVariant):
            got = type(variant).__name__
            raise AssertionError(f"variant must be a CausalVariant, got {got}")  # as torch says
        upper = variant is module.CausalVariant.UPPER_LEFT
        return Bias(queries, keys, None if upper else keys - queries or None)

    kind.__new__ = new
    try:
        yield
    finally:
        del kind.__new__


def with_plain_mask(
    recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of attention with a mask that is recorded like any other, or `is_causal`."""
    named = dict(zip(_NAMES, args, strict=False)) | kwargs
    bias = named.get("attn_mask")
    if func is not F.scaled_dot_product_attention or not isinstance(bias, Bias):
        raise CaptureError(
            f"{short_name(func)} is given a causal bias of torch.nn.attention.bias.",
            where=recorder.where(),
            have=given(args, kwargs),
            why="it holds no data: scaled_dot_product_attention alone reads its lengths",
            fix="make the mask itself: torch.ones(S, T, dtype=torch.bool).tril(T - S)",
        )
    if named.get("is_causal"):
        raise ValueError("CausalBias should not be used with causal=True")  # as torch says
    if bias.diagonal is None:
        return (), {**named, "attn_mask": None, "is_causal": True}
    device = named["query"].device
    with recorder:
        mask = torch.ones(bias.queries, bias.keys, dtype=torch.bool, device=device)
        return (), {**named, "attn_mask": mask.tril(bias.diagonal)}


def refuse_bias(tensor: Any, where: Callable[[], str]) -> None:
    """One that was made outside of forward."""
    module = sys.modules.get("torch.nn.attention.bias")  # slow to import, and seldom used
    if module is not None and isinstance(tensor, module.CausalBias):
        raise CaptureError(
            "a causal bias of torch.nn.attention.bias was made outside of forward.",
            where=where(),
            have=f"{tensor.variant.name.lower()}, {tensor.seq_len_q} x {tensor.seq_len_kv}",
            why="it is a tensor that holds no data, and its lengths are not looked at in each call",
            fix="call causal_upper_left or causal_lower_right in forward; it costs nothing there",
        )
