"""A call of the user's module or function: its tensors, and the key of its program."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch import fsdp_policy, hook_counts
from ..errors import CaptureError
from ..graph import describe, meta_of
from ..lazy_dtensor import LazyDTensor
from ..placement import Placement
from ..tree import Spec, flatten, paths
from .template import is_plain

__all__ = ["Call", "name_of", "read_call", "refuse_opaque", "state_key", "state_text"]


@dataclass
class Call:
    """One call, flattened.

    `tensors` are the tensor leaves in order, `constants` all other leaves, `key` what a traced
    program depends on, `opaque` the first argument that is neither (a cache object), which no
    program can be traced with.
    """

    target: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Spec
    leaves: list[Any]
    tensors: list[torch.Tensor] = field(default_factory=list)
    placements: list[Placement | None] = field(default_factory=list)
    opaque: Any = None
    key: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.target)

    def whole(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that each rank passes whole, under the names of their arguments."""
        positional, keywords = self.spec[2]
        named = zip([*paths(positional), *paths(keywords)], self.leaves, strict=True)
        tensors = [(name, leaf) for name, leaf in named if isinstance(leaf, torch.Tensor)]
        return [
            each for each, placed in zip(tensors, self.placements, strict=True) if placed is None
        ]

    def describe(self) -> str:
        """The key as text that is equal on ranks that make the same call."""
        parts: list[str] = []
        tensors = iter(self.placements)
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                placed = next(tensors)
                text = describe(meta_of(leaf), placed)
                text += f" on {leaf.device.type}" if leaf.device.type != "cpu" else ""
                text += " requires_grad" if leaf.requires_grad else ""
                pending = isinstance(leaf, LazyDTensor) and leaf.openable
                parts.append(text + (" not read yet" if pending else ""))
            elif is_plain(leaf):
                parts.append(repr(leaf))
            else:
                parts.append(getattr(leaf, "__qualname__", type(leaf).__qualname__))
        modes = [] if self.key[2][0] else ["no_grad"]
        autocast = (str(state) for state in self.key[2][2])
        text = ", ".join([*_labels(self.spec, iter(parts)), *modes, *autocast])
        return text or "no arguments"


def name_of(target: nn.Module | Callable[..., Any]) -> str:
    """The module's class, or the function's name."""
    if isinstance(target, nn.Module):
        return type(target).__name__
    return getattr(target, "__name__", type(target).__name__)


def read_call(
    target: nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    placement_of: Callable[[DTensor], Placement],
) -> Call:
    """Flatten the arguments and make the key: structure, metas, values, grad mode, autocast."""
    leaves, spec = flatten((args, kwargs))
    call = Call(target, args, kwargs, spec, leaves)
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            placed = placement_of(leaf) if isinstance(leaf, DTensor) else None
            call.tensors.append(leaf)
            call.placements.append(placed)
            recipe = None
            if isinstance(leaf, LazyDTensor) and leaf.openable:
                recipe = leaf.recipe.key
            parts.append(
                (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, placed, recipe)
            )
        elif is_plain(leaf):
            parts.append((type(leaf), leaf))
        elif callable(leaf) and hasattr(leaf, "__qualname__"):
            parts.append(leaf)
        elif call.opaque is None:
            call.opaque = leaf
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast())
    call.key = (spec, tuple(parts), modes)
    return call


def _labels(spec: Spec, parts: Iterator[str]) -> list[str]:
    """`name=value` for keywords, values alone for positional arguments; structure in brackets."""

    def text(node: Spec) -> str:
        if node[0] == "leaf":
            return next(parts)
        kind, _, children = node
        inner = ", ".join(text(child) for child in children)
        return f"{getattr(kind, '__name__', kind)}({inner})"

    positional, keywords = spec[2]
    found = [text(child) for child in positional[2]]
    found += [f"{name}={text(child)}" for name, child in zip(keywords[1], keywords[2], strict=True)]
    return found


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
        if torch.is_autocast_enabled(kind)
    )


def state_key(model: nn.Module) -> tuple[Any, ...]:
    """What a program depends on in the module itself: its modules and their parameters' metas.

    A module swapped in later (an adapter), FSDP2 applied later, a hook added, a parameter frozen:
    each gives a new key.
    """
    parts: list[Any] = []
    for module in model.modules():
        own = module.__dict__
        policy = fsdp_policy(module)
        parts.append((id(module), module.training, type(module), policy, hook_counts(module)))
        for store in (own["_parameters"], own["_buffers"]):
            for name, tensor in store.items():
                if tensor is not None:
                    parts.append(
                        (name, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
                    )
    return tuple(parts)


def state_text(state: tuple[Any, ...]) -> str:
    """The state key as a short text without addresses: modes, counts, a digest of the rest."""
    modules = [part for part in state if isinstance(part[0], int)]
    tensors = [part for part in state if isinstance(part[0], str)]
    training = sum(part[1] for part in modules)
    trained = sum(part[4] for part in tensors)
    rest = [(part[1], part[2].__qualname__, str(part[3]), part[4]) for part in modules]
    digest = zlib.crc32(repr((rest, tensors)).encode())
    mode = (
        "train mode" if training == len(modules) else "eval mode" if not training else "mixed modes"
    )
    return f"{mode}, {trained} of {len(tensors)} parameters and buffers trained, state {digest:08x}"


def refuse_opaque(call: Call) -> None:
    if call.opaque is not None:
        raise CaptureError(
            f"an argument of type {type(call.opaque).__name__} cannot be traced.",
            where=call.name,
            have=call.describe(),
            why="forward may read and change it, and a program is traced once",
            fix="pass tensors, numbers, functions, or lists, dicts and dataclasses of them; in "
            "training no cache (use_cache=False); under torch.no_grad() such calls run unsharded",
        )
