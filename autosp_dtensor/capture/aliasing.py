"""Which traced tensors share memory, so that a write through one view is seen in the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Memory", "memory_of"]

_DISJOINT = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit"}


@dataclass
class _Version:
    """How often a piece of memory was written to, and through which tensor last."""

    count: int = 0
    writer: int = 0


class Memory:
    """Versions of the memory behind traced tensors."""

    def __init__(self) -> None:
        self._versions: dict[int, _Version] = {}
        self._seen: dict[int, int] = {}
        self._family: dict[int, int] = {}

    def made(self, tensor: torch.Tensor) -> None:
        """A tensor with a node of its own came to be."""
        self._seen[id(tensor)] = self._version(tensor).count

    def made_disjoint(self, name: str, tensors: list[torch.Tensor]) -> None:
        """The parts that split and its kin give share memory, but no element."""
        if name in _DISJOINT and tensors:
            self._family.update((id(tensor), id(tensors[0])) for tensor in tensors)

    def written(self, tensor: torch.Tensor) -> None:
        version = self._version(tensor)
        version.count += 1
        version.writer = id(tensor)
        self._seen[id(tensor)] = version.count

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

    def _version(self, tensor: torch.Tensor) -> _Version:
        return self._versions.setdefault(memory_of(tensor), _Version())


def memory_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)
