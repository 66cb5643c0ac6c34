"""A copy of a module without memory and hooks, which is run in its place while tracing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch import (
    FakeTensorMode,
    TorchFunctionMode,
    compiled_from,
    fsdp_param_dtypes,
    module_hook_dicts,
    original_class,
)
from ..errors import CaptureError, MeshError
from ..graph import Origin
from .bias import refuse_bias
from .snapshot import Watch, contents, contents_now, spied_class, tensors_now

__all__ = ["Ghost", "changed_attributes", "make_ghost"]

log = logging.getLogger(__name__)
_UNWATCHED = {"_parameters", "_buffers", "_modules", "training", "forward", *module_hook_dicts()}


@dataclass
class Ghost:
    """The copy, and where each of its fake tensors stands in the live module."""

    module: nn.Module
    live: nn.Module
    origins: dict[int, Origin] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=dict)
    attributes: dict[int, dict[str, Any]] = field(default_factory=dict)
    inner: list[tuple[Any, Any, Any, str, str]] = field(default_factory=list)
    reads: set[tuple[int, str]] = field(default_factory=set)

    def remember(self) -> None:
        """Note the contents of lists, dicts and simple objects that the modules hold."""
        seen: set[int] = set()
        for module in self.module.modules():
            path = self.paths.get(id(module), "")
            for name, value in module.__dict__.items():
                if name in _OWN or name in module_hook_dicts():
                    continue
                self.inner.extend(
                    (each, items, tensors_now(each), path, name)
                    for each, items in contents(value, seen)
                )

    def watch(self) -> Watch:
        """The live attributes that forward has read, with the values that they have."""
        watch = Watch()
        live = dict(self.live.named_modules())
        for shell_id, name in sorted(
            self.reads, key=lambda read: (self.paths.get(read[0], ""), read[1])
        ):
            path = self.paths.get(shell_id)
            if path is not None and name not in _UNWATCHED and not name.startswith("__"):
                watch.add(live[path], name)
        for cls in {type(module) for module in self.live.modules()}:
            watch.add_function(getattr(cls, "forward", None), cls)
        return watch

    def own(self, fake: torch.Tensor, origin: Origin) -> torch.Tensor:
        self.origins[id(fake)] = origin
        self.tensors.append(fake)
        return fake


def make_ghost(live: nn.Module, fake_mode: FakeTensorMode) -> Ghost:
    """Copy `live`: same classes and attributes; parameters, buffers and plain tensors become fakes.

    A parameter that FSDP2 shards becomes a fake of its global shape, in the dtype it has inside
    forward.
    """
    memo: dict[int, Any] = {}
    ghost = Ghost(live, live)
    pairs = [(path, module, _shell(module)) for path, module in live.named_modules()]
    for path, module, shell in pairs:
        memo[id(module)] = shell
        ghost.paths[id(shell)] = path
    for _, module, _ in reversed(pairs):  # torch.compile's wrapper: the module inside, as it is
        inner = compiled_from(module)
        if inner is not None:
            memo[id(module)] = memo[id(inner)]
    states = _States(ghost, memo, fake_mode)
    for path, module, shell in pairs:
        own = shell.__dict__
        for kind, store in (("param", "_parameters"), ("buffer", "_buffers")):
            own[store] = {
                name: states.fake_of(module, Origin(kind, path, name), tensor)
                for name, tensor in module.__dict__[store].items()
            }
        own["_modules"] = {
            name: None if child is None else memo[id(child)]
            for name, child in module._modules.items()
        }
        for name in module_hook_dicts():
            if name in module.__dict__:
                own[name] = type(module.__dict__[name])()
    for path, module, shell in pairs:
        _copy_attributes(module, shell, path, memo, ghost, fake_mode)
    ghost.module = memo[id(live)]
    return ghost


class _States:
    """Fakes of the live module's parameters and buffers; one that is shared is made once."""

    def __init__(self, ghost: Ghost, memo: dict[int, Any], mode: FakeTensorMode) -> None:
        self.ghost, self.memo, self.mode = ghost, memo, mode
        self.dtypes = {(key, name): dtype for key, name, dtype in fsdp_param_dtypes(ghost.live)}
        self.fakes: dict[int, torch.Tensor] = {}

    def fake_of(
        self, module: nn.Module, origin: Origin, tensor: torch.Tensor | None
    ) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self.fakes:
            key, path = (id(module), origin.name), f"{origin.module}.{origin.name}"
            if isinstance(tensor, DTensor) and key not in self.dtypes:
                raise MeshError(
                    f"parameter {path} is a DTensor on {tensor.device_mesh}.",
                    where=path,
                    have=f"{tuple(tensor.shape)} {tensor.placements}",
                    why="its placement on that mesh is not FSDP2's, and programs are split over "
                    "sp alone",
                    fix="parallelize a model whose parameters are whole or sharded by fully_shard",
                )
            fake = _fake(tensor, self.dtypes.get(key, tensor.dtype), self.mode, path)
            self.fakes[id(tensor)] = self.ghost.own(fake, origin)
            self.memo[id(tensor)] = fake
        return self.fakes[id(tensor)]


def _shell(module: nn.Module) -> nn.Module:
    cls = spied_class(original_class(module))
    return cls.__new__(cls)


def _fake(
    tensor: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode, name: str
) -> torch.Tensor:
    refuse_bias(tensor, lambda: name)
    if isinstance(tensor, DTensor) and not isinstance(tensor, nn.Parameter):
        raise CaptureError(
            f"'{name}' is a DTensor that is neither a parameter nor an input.",
            where=name,
            have=f"{tuple(tensor.shape)} {tensor.placements} on {tensor.device_mesh}",
            why="its placement on its own mesh cannot be combined with the placement on sp",
            fix="keep it as a plain tensor, or pass it to forward",
        )
    with mode:
        fake = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        if not isinstance(tensor, DTensor) and tensor.layout is torch.strided:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device
            )
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        else:
            fake.requires_grad_(tensor.requires_grad)
    return fake


class _CopyTensors(TorchFunctionMode):
    """Turns the tensors that deepcopy meets into fakes, and notes the real ones."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.convert = convert

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.convert(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _copy_attributes(
    module: nn.Module,
    shell: nn.Module,
    path: str,
    memo: dict[int, Any],
    ghost: Ghost,
    mode: FakeTensorMode,
) -> None:
    skip = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", *module_hook_dicts()}
    forward: Any = module.__dict__.get("forward")
    if getattr(forward, "is_autosp_forward", False):  # ours: the ghost runs what stood there before
        skip.add("forward")
        original = forward.original_attribute
        if original is not None:
            shell.__dict__["forward"] = _deepcopy(original, memo, ghost, mode, path, "forward")
    before: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in skip:
            continue
        copied = _deepcopy(value, memo, ghost, mode, path, name)
        shell.__dict__[name] = copied
        before[name] = copied
    ghost.attributes[id(shell)] = before


def _deepcopy(
    value: Any, memo: dict[int, Any], ghost: Ghost, mode: FakeTensorMode, path: str, name: str
) -> Any:
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
        return value

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        fake = _fake(tensor, tensor.dtype, mode, f"{path}.{name}")
        direct = tensor is value
        origin = Origin("attr", path, name) if direct else Origin("const", path, name)
        ghost.own(fake, origin)
        if not direct:
            cast(Any, fake).autosp_real = tensor
        return fake

    try:
        with _CopyTensors(convert):
            return copy.deepcopy(value, memo)
    except CaptureError:
        raise
    except Exception as error:  # locks, process groups, file handles: share them
        log.debug("attribute %s.%s is shared with the ghost (%s)", path, name, error)
        return value


def changed_attributes(ghost: Ghost) -> Iterator[tuple[str, str, Any]]:
    """(module path, attribute, value now) of what forward assigned to `self`.

    Raises:
        CaptureError: forward changed a list, dict or set of a module in place.
    """
    yield from _changed_inside(ghost)
    shells = {id(module): module for module in ghost.module.modules()}
    for shell_id, before in ghost.attributes.items():
        shell = shells.get(shell_id)
        if shell is None:
            continue
        for name, value in shell.__dict__.items():
            if name in _OWN or name in module_hook_dicts():
                continue
            if before.get(name, _MISSING) is not value:
                yield ghost.paths[shell_id], name, value


def _changed_inside(ghost: Ghost) -> Iterator[tuple[str, str, Any]]:
    """Plain attributes of objects that modules hold, such as a config: "config.problem_type"."""
    shells = {ghost.paths[key]: key for key in ghost.attributes}
    for container, items, tensors, path, name in ghost.inner:
        now = contents_now(container)
        if tensors_now(container) != tensors:
            raise CaptureError(
                f"forward keeps a tensor in the {type(container).__name__} 'self.{name}'.",
                where=path or type(ghost.live).__name__,
                have=f"tensors under {sorted(map(str, tensors_now(container)))}",
                why="results of a program are put back only where they stand alone",
                fix="return the tensor from forward, or assign it to an attribute of its own: "
                "self.loss = loss",
            )
        if now == items:
            continue
        held = ghost.attributes[shells[path]].get(name) is container
        if not (held and isinstance(now, dict) and isinstance(items, dict)):
            raise CaptureError(
                f"forward changes the {type(container).__name__} 'self.{name}' in place.",
                where=path or type(ghost.live).__name__,
                have=f"after the trace, {_amount(now)}; before it, {_amount(items)}",
                why="a traced program runs without the model's Python, so the change would be made "
                "once instead of at every call",
                fix="return the value from forward, or assign a new object to the attribute",
            )
        for key, value in now.items():
            if items.get(key, _MISSING) != value:
                yield path, f"{name}.{key}", value


def _amount(items: Any) -> str:
    """How much `contents_now` found; what it found can differ by rank."""
    return f"{items[0] if isinstance(items, tuple) else len(items)} entries"


_OWN = {"_parameters", "_buffers", "_modules", "forward"}
_MISSING = object()
