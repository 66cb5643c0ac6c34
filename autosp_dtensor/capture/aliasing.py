"""Which traced tensors share memory, so that a write through one view is seen in the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Memory", "Part", "memory_of"]

_DISJOINT = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit"}


@dataclass
class _Version:
    """How often a piece of memory was written to, through which tensor last, and after how many
    writes through others."""

    count: int = 0
    writer: int = 0
    since: int = 0


@dataclass
class Part:
    """`view` is `base[index]`."""

    base: torch.Tensor
    index: Any
    view: torch.Tensor


class Memory:
    """Versions of the memory behind traced tensors."""

    def __init__(self) -> None:
        self._versions: dict[int, _Version] = {}
        self._seen: dict[int, int] = {}
        self._family: dict[int, int] = {}
        self._parts: dict[int, Part] = {}
        self._written: set[int] = set()

    def made(self, tensor: torch.Tensor) -> None:
        """A tensor with a node of its own came to be."""
        self._seen[id(tensor)] = self._version(tensor).count

    def made_disjoint(self, name: str, tensors: list[torch.Tensor]) -> None:
        """The parts that split and its kin give share memory, but no element."""
        if name in _DISJOINT and tensors:
            self._family.update((id(tensor), id(tensors[0])) for tensor in tensors)

    def indexed(self, base: torch.Tensor, index: Any, view: torch.Tensor) -> None:
        """view = base[index]: what is written to the one can be set in the other."""
        each = index if isinstance(index, tuple) else (index,)
        if all(i is None or i is ... or type(i) in (int, slice) for i in each):
            self._parts[id(view)] = Part(base, index, view)

    def written(self, tensor: torch.Tensor) -> None:
        version = self._version(tensor)
        if version.writer != id(tensor):
            version.since = version.count
        version.count += 1
        version.writer = id(tensor)
        self._written.add(memory_of(tensor))
        self._seen[id(tensor)] = version.count

    def settle(self, values: Iterable[Any]) -> None:
        """After a write, autograd makes the history of a view anew where it is read. So it does
        here, and not among the operations of the next call."""
        if not self._written:
            return
        for value in values:
            if isinstance(value, torch.Tensor) and memory_of(value) in self._written:
                _ = value.grad_fn

    def set_back(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor[i] = value`, where value is the view that wrote last: nothing else changed."""
        version = self._version(tensor)
        if version.writer == id(value) and version is self._version(value):
            self._seen[id(tensor)] = version.count

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether the memory was written to through another view since this tensor was made."""
        version = self._version(tensor)
        if version.count == self._seen[id(tensor)] or version.writer == id(tensor):
            return False
        family = self._family.get(id(tensor))
        return family is None or family != self._family.get(version.writer)

    def parts_to_set(self, tensor: torch.Tensor) -> list[Part]:
        """What is to be set, in order, so that a stale tensor is up to date: all writes since it
        was read went through one part of it, or a part of a part. Empty where that is not so."""
        version, parts = self._version(tensor), []
        part = self._parts.get(version.writer)
        while part is not None and self._seen.get(id(part.base), -1) >= version.since:
            parts.append(part)
            if part.base is tensor:
                self._seen.update((id(each.base), version.count) for each in parts)
                return parts
            part = self._parts.get(id(part.base))
        return []

    def _version(self, tensor: torch.Tensor) -> _Version:
        return self._versions.setdefault(memory_of(tensor), _Version())


def memory_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)
