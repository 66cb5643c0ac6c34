"""What is known of a node: one frozen record under `node.meta["autosp"]`, from capture to run."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Node

from .placement import Partial, Placement, Shard
from .tree import flatten

__all__ = [
    "Facts",
    "Meta",
    "Origin",
    "Scope",
    "arg",
    "arg_nodes",
    "callee",
    "describe",
    "exact",
    "facts",
    "given",
    "meta_of",
    "parents",
    "result_nodes",
    "set_facts",
    "short_name",
]


@dataclass(frozen=True)
class Meta:
    """Shape (global), dtype, device and requires_grad of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def meta_of(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclass(frozen=True)
class Scope:
    """One call of one module: the path in the model and which call of the trace it is."""

    path: str
    call: int


def parents(path: str) -> list[str]:
    """Paths of the modules around one, from the outside in, without the root."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


@dataclass(frozen=True)
class Origin:
    """Where a value that no op computes comes from.

    kind: "input" (flat input number in `name`), "param", "buffer", "attr" (a plain tensor
    attribute), "const".
    """

    kind: str
    module: str = ""
    name: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything the stages know of a node; a stage adds to it with `dataclasses.replace`.

    note: how it is computed and why so, for whoever reads the program.
    turn: (attention, group of its heads) that it is computed for; a group waits for the one before
    the last.
    """

    outs: tuple[Meta, ...]
    scope: tuple[Scope, ...] = ()
    source: str = ""
    origin: Origin | None = None
    aten: tuple[Any, ...] = ()
    single: bool = True
    random: bool = False
    placements: tuple[Placement, ...] = ()
    homes: tuple[Shard | None, ...] = ()
    rule: Any = None
    option: Any = None
    bytes: int = 0
    note: str = ""
    turn: tuple[int, int] | None = None

    @property
    def meta(self) -> Meta:
        return self.outs[0]

    @property
    def placement(self) -> Placement:
        return self.placements[0]

    @property
    def home(self) -> Shard | None:
        return self.homes[0] if self.homes else None

    def having(self, **changes: Any) -> Facts:
        return replace(self, **changes)


def facts(node: Node) -> Facts:
    return node.meta["autosp"]


def set_facts(node: Node, value: Facts) -> None:
    node.meta["autosp"] = value


def arg(node: Node, index: int) -> Node:
    """The node that `node` takes as its index-th argument."""
    taken = node.args[index]
    assert isinstance(taken, Node), f"argument {index} of {node} is {taken!r}"
    return taken


def arg_nodes(node: Node) -> tuple[Node, ...]:
    """All arguments of a call that takes nodes alone (of a block, a region, an exchange)."""
    return cast(tuple[Node, ...], node.args)


def result_nodes(output: Node) -> tuple[Node, ...]:
    """What an output node returns."""
    return cast(tuple[Node, ...], output.args[0])


def callee(node: Node) -> Callable[..., Any]:
    """What a call_function node calls."""
    return cast(Callable[..., Any], node.target)


_PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis))
_SINGLE = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def exact(value: Any, of_node: Callable[[Node], Any] = lambda node: node) -> Any:
    """A key of an argument: equal keys only where a call does the same with either.

    Neither `repr` nor `==` of an object tells that (a config may leave fields out of both, an array
    shortens its text), so what is no number, text or container is equal to itself alone.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _SINGLE):
        return kind, value
    if isinstance(value, Node):
        return of_node(value)
    if isinstance(value, numbers.Number):  # -0.0 is not 0.0; numpy's are numbers, too
        return kind, repr(value)
    if isinstance(value, slice):
        return kind, *(exact(part, of_node) for part in (value.start, value.stop, value.step))
    if isinstance(value, list):  # of any kind: fx has its own
        return list, *(exact(each, of_node) for each in value)
    if kind in (tuple, torch.Size) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return kind, *(exact(each, of_node) for each in value)
    if isinstance(value, dict):
        return dict, *((exact(k), exact(each, of_node)) for k, each in value.items())
    if is_dataclass(kind) and kind.__dataclass_params__.frozen and hasattr(value, "__dict__"):  # pyright: ignore[reportAttributeAccessIssue]
        return kind, *((k, exact(each, of_node)) for k, each in vars(value).items())
    return _Itself(value)


class _Itself:
    """An object as a key: it alone, and kept, so that no other takes its place in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def describe(meta: Meta, placement: Placement | None = None) -> str:
    """`f32[2, 8, 4096@sp, 64]`: global sizes, `@sp` at the sharded dim; `partial(sp)`: a term."""
    sizes = [str(size) for size in meta.shape]
    if isinstance(placement, Shard):
        sizes[placement.dim] += "@sp"
    text = f"{_SHORT.get(meta.dtype, str(meta.dtype).removeprefix('torch.'))}[{', '.join(sizes)}]"
    return text + " partial(sp)" if isinstance(placement, Partial) else text


def given(*values: Any) -> list[str]:
    """The tensors among a call's arguments, as errors show them: `arg 0 f32[2, 16]`."""
    tensors = [leaf for leaf in flatten(values)[0] if isinstance(leaf, torch.Tensor)]
    rows = [f"arg {k} {describe(meta_of(tensor))}" for k, tensor in enumerate(tensors)]
    more = [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return [*rows[:_SHOWN], *more] or ["no tensor among the arguments"]


_SHOWN = 6


def short_name(target: Callable[..., Any] | str) -> str:
    """`add` for `torch.add`, `Tensor.__add__`, `Tensor.add_`: the name that rules are found by."""
    name = getattr(target, "__name__", str(target))
    if name == "__get__":
        name = getattr(getattr(target, "__self__", None), "__name__", name)
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_")
    return name
