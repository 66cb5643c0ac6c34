"""Run a ghost on fake whole-sequence inputs and record every torch-level call as one FX node."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchFunctionMode,
    UnsupportedOperatorException,
    no_torch_function,
)
from ..errors import CaptureError
from ..graph import Facts, Meta, Origin, Scope, facts, given, meta_of, set_facts
from ..source import user_line
from .aliasing import Memory, memory_of
from .atenlog import AtenLog
from .bias import Bias, refuse_bias, with_plain_mask
from .bypass import looked_into
from .ghost import Ghost
from .kept import Made, made_in
from .refuse import (
    READS,
    refuse_detached_write,
    refuse_effects,
    refuse_foreign_write,
    refuse_method,
    refuse_result,
    refuse_stale,
    refused_writes,
    value_read,
)
from .targets import (
    Opaque,
    OutOfPlace,
    UnderAutocast,
    draws,
    inplace_argument,
    is_inplace,
    plain_target,
)
from .template import plain_number
from .watch import ModuleCall

__all__ = ["Recorder"]


def _autocast_state(kind: str) -> tuple[bool, Any]:
    """(enabled, dtype) for a device type; the dtype counts only where enabled."""
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return (False, None)
    return (True, torch.get_autocast_dtype(kind))


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
        self.aten = AtenLog()
        self.memory = Memory()
        self._checkpoints = 0
        self._depth = 0
        self._grad_outside = torch.is_grad_enabled()
        self._owners: dict[int, Origin] = {}
        self._detached_nodes: dict[Node, Node] = {}
        self._ambient = {kind: _autocast_state(kind) for kind in ("cpu", "cuda")}

    @property
    def is_inside_call(self) -> bool:
        """Whether a torch-level call is running: what it calls in turn is part of it."""
        return self._depth > 0

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
        self.memory.made(tensor)

    def node_for(self, tensor: torch.Tensor) -> Node:
        """The node that computes `tensor`; parameters, buffers, constants get it on first use."""
        node = self.node_of.get(id(tensor))
        if node is None:
            origin = self.origin_of.get(id(tensor))
            if origin is None:
                raise CaptureError(
                    f"a tensor {tuple(tensor.shape)} was made where the tracer could not see it.",
                    where=self.where(),
                    have=given(tensor),
                    why="it comes from a function transform or an extension that bypasses "
                    "torch's Python calls",
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
        self._bring_up_to_date(tensor)
        return self.node_of[id(tensor)]

    def _bring_up_to_date(self, tensor: torch.Tensor) -> None:
        """x[i].copy_(y) becomes x[i] = y, where x is read next."""
        if not self.memory.is_stale(tensor):
            return
        for part in self.memory.parts_to_set(tensor):
            args = part.base, part.index, part.view
            with torch.enable_grad():  # x may be read under no_grad first
                self.node_of[id(part.base)] = self._call(
                    OutOfPlace(torch.Tensor.__setitem__), args, {}, [part.base], (), single=True
                )
        refuse_stale(tensor, self.memory.is_stale(tensor), self.where)

    def as_fake(self, value: Any) -> Any:
        """Tensors from outside the trace (globals, closures) become constants."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        refuse_bias(value, self.where)
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
        if func is torch.nn.functional.multi_head_attention_forward:
            with looked_into(), self:  # its parts have rules; as one call it has none
                return func(*args, **kwargs)
        if Bias in types:
            args, kwargs = with_plain_mask(self, func, args, kwargs)
        refuse_method(func, args, self.where)
        args, kwargs = map_aggregate((args, kwargs), self.as_fake)
        inplace = inplace_argument(func, args, kwargs)
        self.memory.settle(_leaves((args, kwargs)))
        start = len(self.aten.ops)
        if name in READS or (name == "__format__" and args[1:] and args[1]):
            raise value_read(func, self.where(), given(args, kwargs))
        self._depth += 1
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            dynamic = isinstance(error, DynamicOutputShapeException)
            have = given(args, kwargs)
            raise value_read(func, self.where(), have, dynamic=dynamic) from error
        except UnsupportedOperatorException as error:
            raise CaptureError(
                f"{error.func} cannot run on tensors without data.",
                where=self.where(),
                have=given(args, kwargs),
                why="its output shape is not known before it runs",
                fix="register a fake implementation (torch.library.register_fake)",
            ) from error
        finally:
            self._depth -= 1
        ops = tuple(self.aten.ops[start:])
        del self.aten.ops[start:]
        if inplace is not None:
            self._record_inplace(func, *inplace, ops, wrapped=False)
        else:
            self.record(func, args, kwargs, result, ops)
        return result

    def record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        ops: tuple[Any, ...] = (),
        *,
        random: bool = False,
    ) -> None:
        refuse_effects(func, args, kwargs, self.where)
        if is_inplace(func) and args and isinstance(args[0], torch.Tensor):
            self._record_inplace(func, args, kwargs, ops)
            return
        outs = [t for t in _leaves(result) if isinstance(t, torch.Tensor)]
        if not outs or all(id(t) in self.node_of for t in outs):
            return  # a plain value, or the very same tensor given back (x.contiguous())
        if isinstance(result, torch.Tensor) and id(result) in self.origin_of:
            return
        node = self._call(func, args, kwargs, outs, ops, single=isinstance(result, torch.Tensor))
        if random:
            set_facts(node, facts(node).having(random=True))
        if isinstance(result, torch.Tensor):
            self._remember(result, node)
            if func is torch.Tensor.__getitem__:
                self.memory.indexed(args[0], args[1], result)
            return
        refuse_result(func, result, outs, self.where)
        for index, element in enumerate(result):
            if not isinstance(element, torch.Tensor):
                continue
            item = self.graph.call_function(operator.getitem, (node, index))
            set_facts(
                item,
                Facts((meta_of(element),), scope=tuple(self.scopes), source=self.where()),
            )
            self._remember(element, item)
        self.memory.made_disjoint(getattr(func, "__name__", ""), outs)

    def _record_inplace(self, func, args, kwargs, ops, *, wrapped: bool = True) -> None:
        target = args[0]
        origin = self.origin_of.get(id(target))
        refuse_foreign_write(target, origin, self._owner(target), self.where)
        refuse_detached_write(target, func, self.where)
        if len(args) > 2 and isinstance(args[2], torch.Tensor):
            self.memory.set_back(target, args[2])  # y[i] += x: y[i] is written, then set
        node = self._call(
            OutOfPlace(func) if wrapped else func, args, kwargs, [target], ops, single=True
        )
        self.node_of[id(target)] = node
        self.memory.written(target)
        if origin is not None:
            self.mutations[origin] = id(target)

    def _owner(self, tensor: torch.Tensor) -> Origin | None:
        """The parameter, buffer or input whose memory it shares (a view, .data, .detach())."""
        if not self._owners:
            for known in [*(self.ghost.tensors if self.ghost else ()), *self.alive]:
                origin = self.origin_of.get(id(known))
                if origin is not None:
                    self._owners[memory_of(known)] = origin
        return self._owners.get(memory_of(tensor))

    def _call(self, func, args, kwargs, outs, ops, *, single: bool) -> Node:
        number = (lambda v: v) if isinstance(func, Opaque) else plain_number
        node_args, node_kwargs = map_aggregate(
            (args, kwargs), lambda v: self.node_for(v) if isinstance(v, torch.Tensor) else number(v)
        )
        if self._grad_outside and not torch.is_grad_enabled():
            node_args, node_kwargs = map_aggregate((node_args, node_kwargs), self._detached)
        func = self._under_autocast(plain_target(func), outs)
        node = self.graph.call_function(func, node_args, node_kwargs)
        set_facts(
            node,
            Facts(
                tuple(meta_of(t) for t in outs),
                scope=tuple(self.scopes),
                source=self.where(),
                aten=ops,
                single=single,
                random=draws(func, args, kwargs, ops),
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
        node = self._detached_nodes.get(value)
        if node is None:
            node = self.graph.call_function(torch.Tensor.detach, (value,))
            meta = Meta(known.meta.shape, known.meta.dtype, known.meta.device, False)
            aten = (torch.ops.aten.detach.default,)
            own = Facts((meta,), scope=tuple(self.scopes), source=self.where(), aten=aten)
            set_facts(node, own)
            self._detached_nodes[value] = node
        return node

    def _under_autocast(self, func: Any, outs: list[torch.Tensor]) -> Any:
        """Calls under another autocast state than the program will run in carry theirs along."""
        kind = outs[0].device.type if outs else "cpu"
        state = _autocast_state(kind)
        if state == self._ambient.get(kind, state):
            return func
        return UnderAutocast(func, kind, state)

    # -- modules and checkpoints --------------------------------------------------------------

    def enter(self, path: str) -> None:
        """A module's call begins."""
        inside = any(self.calls[scope.call].checkpointed for scope in self.scopes)
        scope = Scope(path, len(self.calls))
        self.scopes.append(scope)
        self.calls.append(ModuleCall(scope, self._checkpoints > 0 and not inside))

    def leave(self, path: str) -> None:
        """A module's call ends, unless an error came before it began."""
        if self.scopes and self.scopes[-1].path == path:
            self.scopes.pop()

    @contextlib.contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Module calls inside are recomputed in backward."""
        self._checkpoints += 1
        try:
            yield
        finally:
            self._checkpoints -= 1

    def call(self, func, args, kwargs):
        """Call one of the package's own functions and record it as one node."""
        result = self._unseen(func, args, kwargs)
        self.record(func, args, kwargs, result)
        return result

    def _unseen(self, func, args, kwargs):
        start = len(self.aten.ops)
        self._depth += 1
        try:
            with no_torch_function():
                return func(*args, **kwargs)
        finally:
            self._depth -= 1
            del self.aten.ops[start:]

    def record_tap(self, tap: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self.opaque(tap, tap, tuple(tensors), {}, name=tap.__name__)

    def opaque(
        self, target, run, args, kwargs, name: str, fake=None, *, form: str = "", random=False
    ):
        """Run something not to be looked into, as one node; form: of an attention entry point."""
        args, kwargs = map_aggregate((args, kwargs), self.as_fake)
        with refused_writes(name, (args, kwargs), self.where):
            result = self._unseen(run, args, kwargs)
        opaque = Opaque(target, name, fake, form)
        opaque.single = isinstance(result, torch.Tensor)
        self.record(opaque, args, kwargs, result, random=random)
        return result

    def release(self) -> list[Made]:
        """Let go of all tensors of the trace; what can be told of them afterwards."""
        tensors = {id(t): t for t in (*(self.ghost.tensors if self.ghost else ()), *self.alive)}
        made = made_in(tensors.values(), self.node_of, self.origin_of)
        self.alive.clear()
        self.node_of.clear()
        self.ghost = None  # its hooks hold this recorder
        return made

    # -- where --------------------------------------------------------------------------------

    def where(self) -> str:
        """`layers.3.mlp (my_model.py:88)`: the module, and the first line of the user's code."""
        path = self.scopes[-1].path if self.scopes else ""
        line = user_line()
        return f"{path} ({line})" if path and line else path or line or "forward"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for element in value:
            yield from _leaves(element)
    else:
        yield value
