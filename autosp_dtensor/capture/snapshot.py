"""Python values that forward reads from its modules: what they were, and whether they still are."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .template import is_plain

__all__ = ["Spy", "Watch", "contents", "contents_now", "spied_class", "tensors_now"]

_DEPTH = 4
_MANY = 256


class Spy:
    """Notes which attributes of ghosts are read while it is active."""

    active: set[tuple[int, str]] | None = None


def spied_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass that behaves like `cls` and tells the spy what is read from its instances."""
    if cls not in _SPIED:

        def read(self: Any, name: str) -> Any:
            if Spy.active is not None:
                Spy.active.add((id(self), name))
            return cls.__getattribute__(self, name)

        body = {
            "__getattribute__": read,
            "__class__": property(lambda self: cls),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        _SPIED[cls] = type(cls.__name__, (cls,), body)
    return _SPIED[cls]


_SPIED: dict[type[nn.Module], type[nn.Module]] = {}


class Watch:
    """Attributes of live modules with the values that a program was traced with."""

    def __init__(self) -> None:
        self._direct: list[tuple[nn.Module, str, Any]] = []
        self._same: list[tuple[nn.Module, str, Any]] = []
        self._inner: list[tuple[Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._bound: list[tuple[dict[str, Any], str, Any]] = []
        self._functions: dict[tuple[int, type | None], Any] = {}
        self._seen: set[int] = set()

    def add(self, module: nn.Module, name: str) -> None:
        """Watch one attribute, unless it cannot change a program (tensors, modules, methods)."""
        value = getattr(module, name, _MISSING)
        if value is _MISSING or is_plain(value):
            self._direct.append((module, name, value))
        elif name in module.__dict__ and not isinstance(value, (torch.Tensor, nn.Module)):
            self._same.append((module, name, value))
            self._inner.extend(contents(value, self._seen))
        elif name not in module.__dict__:  # a container of the class
            self._inner.extend(contents(value, self._seen))

    def add_function(self, function: Any, owner: type | None = None) -> None:
        """Watch the globals and closure variables that a function names: plain values, and lists,
        dicts and simple objects of them; and those of what it calls in its own module and class.
        """
        code = getattr(function, "__code__", None)
        if code is None or (id(function), owner) in self._functions:
            return
        self._functions[id(function), owner] = function  # others may share its code
        names = function.__globals__
        for name in code.co_names:
            if name in names:
                self._add_global(names, name, function.__module__)
            for called in (names.get(name), getattr(owner, name, None)):
                near = getattr(called, "__module__", None) == function.__module__
                if near and isinstance(called, types.FunctionType):
                    self.add_function(called, owner)
        self._add_cells(function)

    def _add_cells(self, function: Any) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if is_plain(value):
                self._cells.append((cell, value))

    def _add_global(self, names: dict[str, Any], name: str, module: str) -> None:
        value = names[name]
        if is_plain(value):
            self._globals.append((names, name, value))
        elif _is_simple(value, module):
            self._bound.append((names, name, value))
            self._inner.extend(contents(value, self._seen, _DEPTH - 2))

    def holds(self) -> bool:
        """Whether everything still has the value it had."""
        for module, name, old in self._direct:
            now = getattr(module, name, _MISSING)
            if now is not old and (type(now) is not type(old) or now != old):
                return False
        if any(scope.get(name) != old for scope, name, old in self._globals):
            return False
        if any(cell.cell_contents != old for cell, old in self._cells):
            return False
        if any(scope.get(name) is not old for scope, name, old in self._bound):
            return False
        if any(module.__dict__.get(name) is not value for module, name, value in self._same):
            return False
        return all(contents_now(container) == items for container, items in self._inner)


_MISSING = object()


def contents(value: Any, seen: set[int], depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """(container, its plain items) of a value made of lists, dicts, sets and simple objects."""
    if depth > _DEPTH or id(value) in seen or not _is_container(value):
        return
    seen.add(id(value))
    yield value, contents_now(value)
    for child in _children(value):
        yield from contents(child, seen, depth + 1)


def _is_simple(value: Any, module: str) -> bool:
    """A small collection, or an object of a class from where the function is."""
    if isinstance(value, (list, dict, set, tuple)):
        return len(value) <= _MANY
    near = getattr(type(value), "__module__", "").split(".")[0] in (module.split(".")[0], "types")
    return near and _is_container(value)


def _is_container(value: Any) -> bool:
    if isinstance(value, (list, dict, set, tuple)):
        return True
    opaque = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
    if isinstance(value, opaque) or is_plain(value) or callable(value):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith("torch")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, set, tuple)):
        return list(value)
    return list(vars(value).values())


def tensors_now(value: Any) -> dict[Any, int]:
    """Which tensors a dict or object holds; lists and sets tell by `contents_now`."""
    if isinstance(value, (list, set, tuple)):
        return {}
    items = value if isinstance(value, dict) else vars(value)
    return {key: id(item) for key, item in items.items() if isinstance(item, torch.Tensor)}


def contents_now(value: Any) -> Any:
    """What can be compared cheaply: plain values by place, and how many entries there are."""
    if isinstance(value, dict):
        return len(value), {k: v for k, v in value.items() if is_plain(v)}
    if isinstance(value, (list, tuple)):
        return len(value), [v if is_plain(v) else id(v) for v in value]
    if isinstance(value, set):
        return len(value), {v for v in value if is_plain(v)}
    return {k: v for k, v in vars(value).items() if is_plain(v)}
