"""Run a ghost on fake whole-sequence inputs and record every torch-level call as one FX node."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .._torch import (
    NON_REENTRANT,
    CheckpointFunction,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    TorchFunctionMode,
    UnsupportedOperatorException,
    fsdp_policy,
    hook_counts,
    no_torch_function,
)
from ..errors import CaptureError
from ..graph import Facts, Meta, Origin, Scope, set_facts, short_name
from ..tree import flatten, unflatten
from .ghost import Ghost
from .tap import tapped

__all__ = ["ModuleCall", "Opaque", "OutOfPlace", "Recorder", "active_recorder", "meta_of"]

_ACTIVE: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)


def active_recorder() -> Recorder | None:
    """The recorder of the trace that is going on, if any."""
    return _ACTIVE.get()


def meta_of(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclass
class ModuleCall:
    """One call of a module while tracing: its arguments and result, with fakes for tensors."""

    scope: Scope
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    checkpointed: bool = False


class OutOfPlace:
    """An in-place call recorded as one that returns a new tensor: `x.mul_(y)` as `x = mul(x, y)`.

    The caller's later reads of x get the new node, so order and aliasing need no care further on.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.__name__ = short_name(func).rstrip("_")

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = x.clone()
        self.func(x, *args, **kwargs)
        return x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutOfPlace) and other.func == self.func

    def __hash__(self) -> int:
        return hash((OutOfPlace, self.func))


class _AtenLog(TorchDispatchMode):
    """Notes which ATen operations one torch-level call is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "prim":
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


@dataclass
class _Version:
    """Who last wrote to a piece of memory, and when."""

    count: int = 0
    writer: int = 0


_INPLACE_OPERATORS = {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__ipow__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__setitem__",
    "__imod__",
}
_REFUSED = {
    "register_hook": "a hook on an intermediate value runs in Python at every backward",
    "retain_grad": "the gradient of an intermediate value is not kept by a traced program",
    "backward": "backward inside forward is not part of a traced program",
    "set_": "it replaces the memory of a tensor",
}
_DISJOINT = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit"}


class Recorder(TorchFunctionMode):
    """Records torch calls into `graph` while the ghost runs.

    Holds afterwards: each node has `Facts` with global metas, the module calls it stands in, its
    source line and the ATen operations it is made of; no node is in place.
    """

    def __init__(self, fake_mode: FakeTensorMode, ghost: Ghost | None) -> None:
        self.fake_mode = fake_mode
        self.ghost = ghost
        self.graph = Graph()
        self.node_of: dict[int, Node] = {}
        self.alive: list[Any] = []
        self.scopes: list[Scope] = []
        self.calls: list[ModuleCall] = []
        self.mutations: dict[Origin, int] = {}
        self.consts: dict[str, torch.Tensor] = {}
        self.origin_of: dict[int, Origin] = dict(ghost.origins) if ghost else {}
        self.aten = _AtenLog()
        self._versions: dict[int, _Version] = {}
        self._read_version: dict[int, int] = {}
        self._siblings: dict[int, int] = {}
        self._checkpoint_depth = 0
        self.saw_checkpoint = False
        self._opaque_depth = 0

    # -- values -------------------------------------------------------------------------------

    def add_input(self, tensor: torch.Tensor, number: int) -> None:
        origin = Origin("input", name=str(number))
        node = self.graph.placeholder(f"input_{number}")
        set_facts(node, Facts((meta_of(tensor),), origin=origin))
        self.origin_of[id(tensor)] = origin
        self._remember(tensor, node)

    def _remember(self, tensor: torch.Tensor, node: Node) -> None:
        self.node_of[id(tensor)] = node
        self.alive.append(tensor)
        self._read_version[id(tensor)] = self._version(tensor).count

    def _version(self, tensor: torch.Tensor) -> _Version:
        return self._versions.setdefault(_memory(tensor), _Version())

    def node_for(self, tensor: torch.Tensor) -> Node:
        """The node that computes `tensor`; parameters, buffers and constants get theirs on first use."""
        node = self.node_of.get(id(tensor))
        if node is None:
            origin = self.origin_of.get(id(tensor))
            if origin is None:
                raise CaptureError(
                    f"a tensor {tuple(tensor.shape)} was made where the tracer could not see it.",
                    where=self.where(),
                    why="it comes from a function transform or an extension that bypasses torch's Python calls",
                    fix="register the function that makes it: autosp.register_rule(fn, ...)",
                )
            if origin.kind == "const" and origin.name not in self.consts:
                key = f"const_{len(self.consts)}"
                self.consts[key] = getattr(tensor, "autosp_real", tensor)
                origin = Origin("const", name=key)
                self.origin_of[id(tensor)] = origin
            node = self.graph.get_attr(f"{origin.module}.{origin.name}".lstrip("."))
            set_facts(
                node,
                Facts((meta_of(tensor),), scope=tuple(self.scopes), origin=origin),
            )
            self._remember(tensor, node)
        self._check_alias(tensor)
        return node

    def _check_alias(self, tensor: torch.Tensor) -> None:
        version = self._version(tensor)
        if version.count == self._read_version[id(tensor)] or version.writer == id(tensor):
            return
        family = self._siblings.get(id(tensor))
        if family is not None and family == self._siblings.get(version.writer):
            return
        raise CaptureError(
            "a tensor is read after its memory was changed through another view.",
            where=self.where(),
            why="the traced program has no views of one memory: shards do not alias",
            fix="use the out-of-place form of the operation that writes (x = x + 1 for x.add_(1))",
        )

    def as_fake(self, value: Any) -> Any:
        """Tensors from outside the trace (globals, closures) become constants."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        for name, real in self.consts.items():
            if real is value:
                return next(
                    t for t in self.alive if self.origin_of.get(id(t)) == Origin("const", name=name)
                )
        with no_torch_function():
            fake = self.fake_mode.from_tensor(value, static_shapes=True)
        name = f"const_{len(self.consts)}"
        self.consts[name] = value
        self.origin_of[id(fake)] = Origin("const", name=name)
        self.alive.extend((fake, value))
        return fake

    # -- calls --------------------------------------------------------------------------------

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _REFUSED:
            raise CaptureError(
                f"forward calls {name}() on a tensor.",
                where=self.where(),
                why=_REFUSED[name],
                fix="move it out of forward, or exclude this module from the traced model",
            )
        args, kwargs = map_aggregate((args, kwargs), self.as_fake)  # type: ignore[misc]
        if kwargs.get("inplace") is True and name in _INPLACE_ARGUMENT:
            kwargs = {**kwargs, "inplace": False}
        start = len(self.aten.ops)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.value_read(func, error) from error
        except UnsupportedOperatorException as error:
            raise CaptureError(
                f"{error.func} cannot run on tensors without data.",
                where=self.where(),
                why="its output shape is not known before it runs",
                fix="register a fake implementation (torch.library.register_fake)",
            ) from error
        ops = tuple(self.aten.ops[start:])
        del self.aten.ops[start:]
        self.record(func, args, kwargs, result, ops)
        return result

    def value_read(self, func: Any, error: Exception) -> CaptureError:
        dynamic = isinstance(error, DynamicOutputShapeException)
        what = "a shape depends on" if dynamic else "Python reads"
        return CaptureError(
            f"{what} the value of a tensor: {short_name(func)}().",
            where=self.where(),
            why="the program is traced once, without data, and must be the same on every rank",
            fix="use torch.where or a mask of fixed shape instead, or pass the value to forward as a Python number",
        )

    def record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        ops: tuple[Any, ...] = (),
    ) -> None:
        name = getattr(func, "__name__", "")
        inplace = name in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
        if kwargs.get("out") is not None:
            raise CaptureError(
                f"{short_name(func)} writes to out=.",
                where=self.where(),
                why="the traced program has no views of one memory",
                fix="assign the result instead",
            )
        if inplace and args and isinstance(args[0], torch.Tensor):
            self._record_inplace(func, args, kwargs, ops)
            return
        outs = [t for t in _leaves(result) if isinstance(t, torch.Tensor)]
        if not outs or all(id(t) in self.node_of for t in outs):
            return  # a plain value, or the very same tensor given back (x.contiguous(), x.to(x.dtype))
        if isinstance(result, torch.Tensor) and id(result) in self.origin_of:
            return
        node = self._call(func, args, kwargs, outs, ops, single=isinstance(result, torch.Tensor))
        if isinstance(result, torch.Tensor):
            self._remember(result, node)
            return
        if not isinstance(result, (tuple, list)):
            raise CaptureError(
                f"{short_name(func)} returns a {type(result).__name__}.",
                where=self.where(),
                why="only tensors and tuples of tensors can be placed",
                fix="register a rule for the function around it: autosp.register_rule(fn, ...)",
            )
        family = len(self.alive) if name in _DISJOINT else None
        for index, element in enumerate(result):
            if not isinstance(element, torch.Tensor):
                continue
            item = self.graph.call_function(operator.getitem, (node, index))
            set_facts(
                item,
                Facts((meta_of(element),), scope=tuple(self.scopes), source=self.where()),
            )
            self._remember(element, item)
            if family is not None:
                self._siblings[id(element)] = family

    def _record_inplace(self, func, args, kwargs, ops) -> None:
        target = args[0]
        origin = self.origin_of.get(id(target))
        if origin is None and tensor_owner(target, self.origin_of) is not None:
            origin = tensor_owner(target, self.origin_of)
            raise CaptureError(
                f"forward writes to a part of {origin.module}.{origin.name} in place.",
                where=self.where(),
                why="a change of state is carried out after the program, as one assignment",
                fix="write the whole tensor: self.buffer.copy_(new)",
            )
        if origin is not None and origin.kind != "buffer":
            raise CaptureError(
                f"forward changes {origin.kind} {origin.module}.{origin.name} in place.".replace(
                    " .", " "
                ),
                where=self.where(),
                why="an input or parameter belongs to the caller; ranks would change their own copies",
                fix="work on a copy: x = x.clone()",
            )
        node = self._call(OutOfPlace(func), args, kwargs, [target], ops, single=True)
        self.node_of[id(target)] = node
        version = self._version(target)
        version.count += 1
        version.writer = id(target)
        self._read_version[id(target)] = version.count
        if origin is not None:
            self.mutations[origin] = id(target)

    def _call(self, func, args, kwargs, outs, ops, *, single: bool) -> Node:
        node_args, node_kwargs = map_aggregate(
            (args, kwargs), lambda v: self.node_for(v) if isinstance(v, torch.Tensor) else v
        )  # type: ignore[misc]
        if not torch.is_grad_enabled():
            node_args, node_kwargs = map_aggregate((node_args, node_kwargs), self._detached)  # type: ignore[misc]
        func = _plain_target(func)
        node = self.graph.call_function(func, node_args, node_kwargs)
        set_facts(
            node,
            Facts(
                tuple(meta_of(t) for t in outs),
                scope=tuple(self.scopes),
                source=self.where(),
                aten=ops,
                single=single,
                random=_draws(func, args, kwargs, ops),
            ),
        )
        return node

    def _detached(self, value: Any) -> Any:
        """Under no_grad an op sees its inputs detached; the program has no grad-mode switches."""
        if not isinstance(value, Node):
            return value
        known: Facts = value.meta["autosp"]
        if not known.single or not known.meta.requires_grad:
            return value
        key = ("detached", value)
        node = self._cache.get(key)
        if node is None:
            node = self.graph.call_function(torch.Tensor.detach, (value,))
            meta = Meta(known.meta.shape, known.meta.dtype, known.meta.device, False)
            set_facts(
                node,
                Facts(
                    (meta,),
                    scope=tuple(self.scopes),
                    source=self.where(),
                    aten=(torch.ops.aten.detach.default,),
                ),
            )
            self._cache[key] = node
        return node

    @property
    def _cache(self) -> dict[Any, Node]:
        return self.__dict__.setdefault("_detached_nodes", {})

    # -- modules ------------------------------------------------------------------------------

    def watch_modules(self) -> None:
        """Note which module call each node stands in; do FSDP2's casts, so that the dtypes in the trace are right."""
        assert self.ghost is not None
        live = dict(self.ghost.live.named_modules())
        for module in self.ghost.module.modules():
            path = self.ghost.paths.get(id(module))
            if path is None:
                continue
            before, after, backward = hook_counts(live[path])
            if backward and path:
                raise CaptureError(
                    "a module has a backward hook.",
                    where=path,
                    why="its gradients arrive in a traced program, not at the module's own call",
                    fix="use tensor hooks on parameters, or remove the hook",
                )
            policy = fsdp_policy(live[path])
            module.register_forward_pre_hook(
                self._enter(path, policy, bool(before)), with_kwargs=True
            )
            module.register_forward_hook(self._leave(policy, bool(after)), always_call=True)

    def _enter(self, path: str, policy: Any, hooked: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if hooked and path:  # the root's own hooks run around the program
                args, kwargs = tapped(path, "before", (args, kwargs), None, self._record_tap)
            if policy is not None and policy.param_dtype and policy.cast_forward_inputs and path:
                args, kwargs = _cast((args, kwargs), policy.param_dtype)
            scope = Scope(path, len(self.calls))
            self.scopes.append(scope)
            self.calls.append(
                ModuleCall(scope, args, kwargs, checkpointed=self._outermost_checkpointed())
            )
            return args, kwargs

        return hook

    def _leave(self, policy: Any, hooked: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self.scopes:
                return output
            scope = self.scopes.pop()
            call = self.calls[scope.call]
            if policy is not None and policy.output_dtype and scope.path:
                output = _cast(output, policy.output_dtype)
            if hooked and scope.path:
                output = tapped(
                    scope.path, "after", (call.args, call.kwargs), output, self._record_tap
                )
            return output

        return hook

    def _outermost_checkpointed(self) -> bool:
        """Whether the call that starts now is the first module under a checkpoint."""
        around = any(self.calls[scope.call].checkpointed for scope in self.scopes[:-1])
        return self._checkpoint_depth > 0 and not around

    def _record_tap(self, tap: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self.opaque(tap, tap, tuple(tensors), {}, name=tap.__name__)

    # -- what bypasses __torch_function__ -----------------------------------------------------

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """While tracing: autograd.Function.apply is one opaque node, checkpoint runs its function plainly."""
        apply = torch.autograd.Function.__dict__.get("apply")
        non_reentrant = getattr(torch.utils.checkpoint, NON_REENTRANT)
        recorder = self

        def recorded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction:
                return recorder._run_checkpointed(args[0], args[2:])
            original = apply.__func__  # type: ignore[union-attr]
            run = functools.partial(original, cls)
            return recorder.opaque(cls.apply, run, args, kwargs, name=cls.__name__)

        def recorded_non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
            recorder.saw_checkpoint = True
            recorder._checkpoint_depth += 1
            yield
            recorder._checkpoint_depth -= 1

        torch.autograd.Function.apply = classmethod(recorded_apply)  # type: ignore[method-assign, assignment]
        setattr(torch.utils.checkpoint, NON_REENTRANT, recorded_non_reentrant)
        token = _ACTIVE.set(self)
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            _ACTIVE.reset(token)
            if apply is None:
                del torch.autograd.Function.apply
            else:
                torch.autograd.Function.apply = apply  # type: ignore[method-assign, assignment]
            setattr(torch.utils.checkpoint, NON_REENTRANT, non_reentrant)

    def _run_checkpointed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.saw_checkpoint = True
        self._checkpoint_depth += 1
        try:
            return function(*args)
        finally:
            self._checkpoint_depth -= 1

    def opaque(self, target, run, args, kwargs, name: str):
        """Run something that is not to be looked into, and record it as one node."""
        args, kwargs = map_aggregate((args, kwargs), self.as_fake)  # type: ignore[misc]
        start = len(self.aten.ops)
        with no_torch_function():
            result = run(*args, **kwargs)
        del self.aten.ops[start:]
        self.record(Opaque(target, name), args, kwargs, result)
        return result

    # -- where --------------------------------------------------------------------------------

    def where(self) -> str:
        """`layers.3.mlp (my_model.py:88)`: the module and the first line outside torch and this package."""
        path = self.scopes[-1].path if self.scopes else ""
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not any(part in file for part in _HIDDEN):
                line = f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
                return f"{path} ({line})" if path else line
            frame = frame.f_back  # type: ignore[assignment]
        return path


class Opaque:
    """A function recorded as one node without being looked into."""

    def __init__(self, target: Callable[..., Any], name: str) -> None:
        self.target = target
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.target == self.target

    def __hash__(self) -> int:
        return hash((Opaque, self.target))


_HIDDEN = (
    "/torch/",
    "autosp_dtensor/",
    "/einops/",
    "<frozen",
    "/contextlib.py",
    "<string>",
    "<@beartype",
)
_INPLACE_ARGUMENT = {
    "relu", "silu", "dropout", "gelu", "elu", "celu", "selu", "leaky_relu", "hardtanh", "relu6", "hardswish",
    "hardsigmoid", "mish", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "threshold", "rrelu",
}  # fmt: skip


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ops: tuple[Any, ...]) -> bool:
    """Whether a call draws random numbers. ATen tags attention as random whatever its dropout is."""
    if short_name(func) == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)


def _memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def tensor_owner(tensor: torch.Tensor, origins: dict[int, Origin]) -> Origin | None:
    """The parameter, buffer or input that `tensor` is a view of."""
    base = tensor._base
    return None if base is None else origins.get(id(base))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for element in value:
            yield from _leaves(element)
    else:
        yield value


def _plain_target(func: Callable[..., Any]) -> Callable[..., Any]:
    """Property getters (`x.mT`) are method-wrappers; the named functions behind them are what rules know."""
    if getattr(func, "__name__", "") != "__get__":
        return func
    name = short_name(func)
    return _PROPERTIES.get(name, func)


def _transpose_last(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-2, -1)


def _reverse_dims(x: torch.Tensor) -> torch.Tensor:
    return x.permute(*range(x.dim() - 1, -1, -1))


_transpose_last.__name__ = "mT"
_reverse_dims.__name__ = "T"
_PROPERTIES = {
    "data": torch.Tensor.detach,
    "mT": _transpose_last,
    "T": _reverse_dims,
    "real": torch.real,
    "imag": torch.imag,
}


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """What FSDP2's cast_forward_inputs does, as traced operations."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value

    leaves, spec = flatten(tree)
    return unflatten(spec, [cast(leaf) for leaf in leaves])
