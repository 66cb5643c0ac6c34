"""What forward returned, as a template that is filled with the program's results at every call."""

from __future__ import annotations

import copy
import numbers
from typing import Any

import torch

from .._torch import TorchFunctionMode
from ..tree import Spec, flatten, unflatten

__all__ = ["Template", "is_plain", "plain_number"]


def is_plain(value: Any) -> bool:
    """Values that hold no tensor and cannot change: given back as they are."""
    return isinstance(
        value,
        (
            bool,
            int,
            float,
            complex,
            str,
            bytes,
            type(None),
            torch.dtype,
            torch.device,
            torch.Size,
            type,
        ),
    )


class _Collect(TorchFunctionMode):
    """Lets deepcopy pass over tensors, noting each."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            self.tensors.append(tensor)
            memo[id(tensor)] = tensor
            return tensor
        return func(*args, **(kwargs or {}))


class Template:
    """Structure of a result. `tensors` are its distinct tensors; `fill` puts others in their place.

    Objects that are no known container (a cache, a user's class) are copied with the tensors
    replaced.
    """

    def __init__(self, tree: Any) -> None:
        self.leaves: list[Any]
        self.spec: Spec
        self.leaves, self.spec = flatten(tree)
        self.tensors: list[torch.Tensor] = []
        self._objects: list[int] = []
        seen: set[int] = set()
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                found = [leaf]
            elif is_plain(leaf):
                continue
            else:
                found = _tensors_inside(leaf)
                if found:
                    self._objects.append(index)
            for tensor in found:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    self.tensors.append(tensor)

    def without_tensors(self) -> Template:
        """The same structure around stand-ins: the trace's tensors hold its whole gradient."""
        return Template(self.fill([torch.empty(0) for _ in self.tensors]))

    def fill(self, values: list[Any]) -> Any:
        """The result with `values` in the place of `tensors`, in the same order."""
        by_id = {id(old): new for old, new in zip(self.tensors, values, strict=True)}
        leaves = [by_id.get(id(leaf), leaf) for leaf in self.leaves]
        for index in self._objects:
            leaves[index] = copy.deepcopy(self.leaves[index], dict(by_id))
        return unflatten(self.spec, leaves)


def _tensors_inside(value: Any) -> list[torch.Tensor]:
    collect = _Collect()
    try:
        with collect:
            copy.deepcopy(value)
    except (
        Exception
    ):  # an object that cannot be copied is given back as it is; it can hold no result
        return []
    return collect.tensors


def plain_number(value: Any) -> Any:
    """torch takes numpy's numbers as Python's; rules ask for Python's."""
    numpy = isinstance(value, numbers.Number) and type(value).__module__ == "numpy"
    return value.item() if numpy else value  # pyright: ignore[reportAttributeAccessIssue]
