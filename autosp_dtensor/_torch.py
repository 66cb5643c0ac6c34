"""Every private torch name that the package uses stands here.

CI runs torch 2.13.0. The tests at commit 93832ea were run on 2.11.0 and 2.14.1 as well, those that
need one process at commit 2dc21a7 on 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd import function as _function
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as _module
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

__all__ = [
    "NEEDS_DATA",
    "NON_REENTRANT",
    "CheckpointFunction",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FsdpParameter",
    "OpOverload",
    "PartOnDemand",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "UnsupportedOperatorException",
    "all_gather_single",
    "backward_under_modes",
    "compiled_from",
    "fake_store",
    "flatten_mesh",
    "fsdp_begin_backward",
    "fsdp_groups",
    "fsdp_hooks_alone",
    "fsdp_param_dtypes",
    "fsdp_parameters",
    "fsdp_policy",
    "function_apply",
    "functions_run_by",
    "has_backward_hooks_on_all",
    "hook_counts",
    "is_fsdp_hook",
    "memory_tracker",
    "module_hook_dicts",
    "neg_view",
    "no_torch_function",
    "once_differentiable",
    "original_class",
    "reduce_scatter_single",
    "tree_map",
    "unset_fake_temporarily",
    "user_hooks",
]

# What an operation on tensors without data raises that cannot do without.
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def module_hook_dicts() -> tuple[str, ...]:
    """Names of the dicts in which nn.Module keeps call hooks."""
    return _HOOK_DICTS


def is_fsdp_hook(hook: Any) -> bool:
    """Whether FSDP2 has put it there, on a module or a tensor. (Those of several modules that are
    one unit are functions around its methods.)
    """
    while hook is not None:
        if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


def user_hooks(module: nn.Module, store: str) -> list[tuple[Any, bool]]:
    """(hook, whether it takes kwargs) of one hook dict, without FSDP2's own."""
    with_kwargs = getattr(module, f"{store}_with_kwargs", {})
    return [
        (hook, key in with_kwargs)
        for key, hook in getattr(module, store).items()
        if not is_fsdp_hook(hook)
    ]


def fsdp_hooks_alone(module: nn.Module) -> dict[str, Any]:
    """A module's hook dicts without the user's hooks; empty if the user has put none there."""
    if not any(hook_counts(module)):
        return {}
    kept = {}
    for store in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = getattr(module, store)
        kept[store] = type(hooks)((key, hook) for key, hook in hooks.items() if is_fsdp_hook(hook))
    return kept


def hook_counts(module: nn.Module) -> tuple[int, int, int]:
    """How many forward-pre, forward and backward hooks of the user's a module has."""
    own = module.__dict__
    if not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ):
        return (0, 0, 0)
    return (
        len(user_hooks(module, "_forward_pre_hooks")),
        len(user_hooks(module, "_forward_hooks")),
        len(module._backward_hooks) + len(module._backward_pre_hooks),
    )


def has_backward_hooks_on_all() -> bool:
    """Whether register_module_full_backward_hook or its kin has put a hook on every module."""
    return bool(_module._global_backward_hooks or _module._global_backward_pre_hooks)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class before FSDP2 put its own in front; a class that cannot be copied otherwise."""
    cls = type(module)
    if isinstance(module, FSDPModule):
        return cls.__mro__[getattr(cls, "_orig_cls_mro_index", 2)]
    return cls


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module that torch.compile wrapped, for what it gave back; None for any other module."""
    inner = module._modules.get("_orig_mod")
    return inner if type(module).__name__ == "OptimizedModule" else None


def fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of one module (torch 2.11 has one per state, 2.13 a list)."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    if many is not None:
        return list(many)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def fsdp_policy(module: nn.Module) -> Any:
    """The MixedPrecisionPolicy that FSDP2 applies when the module is called, or None."""
    return module._get_fsdp_state()._mp_policy if isinstance(module, FSDPModule) else None


def fsdp_begin_backward(module: nn.Module) -> None:
    """What FSDP2 does when backward comes to a result of the module: gather, and see to the end.
    For results that autograd reaches past the module's own.
    """
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._pre_backward(torch.empty(0))


def fsdp_param_dtypes(model: nn.Module) -> Iterator[tuple[int, str, torch.dtype]]:
    """(id of module, parameter name, dtype in forward) of every parameter that FSDP2 manages."""
    for module in model.modules():
        for group in fsdp_groups(module):
            for managed in group.fsdp_params:
                if getattr(managed, "is_dtensor", False):
                    continue  # sharded before FSDP2 came: a tensor-parallel parameter
                dtype = managed.mp_policy.param_dtype or managed.sharded_param.dtype
                if not managed.sharded_param.dtype.is_floating_point:
                    dtype = managed.sharded_param.dtype
                info = managed._module_info
                yield id(info.module), info.param_name, dtype
                for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    yield id(shared), name, dtype


@dataclass(frozen=True)
class FsdpParameter:
    """One parameter of a module that FSDP2 manages.

    part: this rank's. tensors: what the module may hold for it, its part or the whole. gathered,
    reduced: bytes of the whole in forward, and of its gradient as it is reduced.
    """

    part: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    gathered: int
    reduced: int


def fsdp_parameters(module: nn.Module) -> list[FsdpParameter]:
    """What FSDP2 manages together with this module."""
    found = []
    for group in fsdp_groups(module):
        for managed in group.fsdp_params:
            part, policy = managed.sharded_param, managed.mp_policy
            whole = getattr(managed, "_unsharded_param", None)
            count = managed._orig_size.numel()
            dtype = policy.param_dtype or part.dtype
            reduced = (policy.reduce_dtype or dtype).itemsize * part.requires_grad
            tensors = (part,) if whole is None else (part, whole)
            found.append(FsdpParameter(part, tensors, count * dtype.itemsize, count * reduced))
    return found


# torch 2.13 renamed both and warns about the old names, which are all that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Public, but declared as if `ctx` were positional only, which Function.backward's is not.
once_differentiable: Any = _function.once_differentiable


def flatten_mesh(mesh: Any, names: tuple[str, ...], name: str) -> Any:
    """Several axes of a mesh as one; torch keeps it and gives the same one again."""
    return mesh[names]._flatten(name)


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view that is read as its negative, as `.imag` of a conjugate is."""
    return torch.ops.aten._neg_view.default(tensor)


def no_torch_function() -> Any:
    """Inside, no __torch_function__ is called, modes included."""
    return torch._C.DisableTorchFunction()


def function_apply(cls: Any) -> Callable[..., Any]:
    """torch's own apply of a Function, also where its class wraps another around it."""
    return torch.autograd.Function.__dict__["apply"].__get__(None, cls)


@contextlib.contextmanager
def functions_run_by(instead: Callable[..., Any], when: Callable[[], bool]) -> Iterator[None]:
    """Inside, what a Function's apply gives is `instead(cls, apply, args)`, where `when()` holds.

    An apply kept from before (`f = MyFunction.apply`) is reached too. Since torch 2.14 that is a C
    method, which nothing can replace, so what it calls is: it makes the Function's context, then
    calls its forward, which is exchanged in between. What C puts around the results then (a
    gradient edge) is only for fake tensors, whose gradient nobody takes.
    """
    exchanged: list[Callable[[], None]] = []
    contexts: Any = _function.BackwardCFunction

    def context_made(context: Any) -> None:
        if not when():
            return
        cls = type(context)._forward_cls
        given = {name: cls.__dict__.get(name) for name in ("forward", "setup_context")}
        takes_context = cls.setup_context is torch.autograd.Function.setup_context
        grad = torch.is_grad_enabled()  # C calls forward without

        def restore() -> None:
            exchanged.remove(restore)
            for name, own in given.items():
                if own is not None:
                    setattr(cls, name, own)
                elif name in cls.__dict__:
                    delattr(cls, name)

        def forward(*args: Any) -> Any:
            restore()
            with torch.set_grad_enabled(grad):
                result = instead(cls, function_apply(cls), args[1:] if takes_context else args)
            every = result if isinstance(result, tuple) else (result,)
            context.mark_non_differentiable(
                *(t for t in every if isinstance(t, torch.Tensor) and not t.requires_grad)
            )
            return result

        exchanged.append(restore)
        cls.forward = staticmethod(forward)
        if not takes_context:
            cls.setup_context = staticmethod(lambda *_: None)

    contexts.__init__ = context_made
    try:
        yield
    finally:
        del contexts.__init__
        for restore in reversed(exchanged):
            restore()


# What checkpoint(use_reentrant=False) runs, looked up by name. torch 2.14 left the old name to
# other callers.
_GENERATOR = "_checkpoint_without_reentrant_generator"
NON_REENTRANT = next(
    name for name in (f"{_GENERATOR}_impl", _GENERATOR) if hasattr(checkpoint, name)
)


def backward_under_modes(loss: torch.Tensor) -> None:
    """`loss.backward()`, in which a TorchFunctionMode goes on; the public call leaves it."""
    run: Any = torch.autograd.graph._engine_run_backward
    ones = (torch.ones_like(loss),)
    run((loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def fake_store() -> Any:
    """The store of a fake process group: only plans need one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def memory_tracker(
    model: nn.Module,
    optimizer: Any,
    see: Callable[[dict[Any, int]], None],
    counts: Callable[[], bool],
    own: Mapping[str, Callable[[], bool]],
) -> Any:
    """FSDP2's memory tracker, which calls `see` with the live bytes by kind after each operation.
    While `counts()` is false, what is made takes no memory. While a function of `own` is true, what
    is made is of the kind of its name, until `as_value` is called with it.

    torch's own keeps peaks of every module, which takes more time than the operations do.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType

    class Tracker(FSDPMemTracker):
        def _track(self, reftype: Any, t: torch.Tensor) -> None:
            if counts():
                kind: Any = next((name for name, made in own.items() if made()), reftype)
                super()._track(kind, t)

        def as_value(self, t: torch.Tensor) -> None:
            """From now on it is of the kind that torch gives to what is made now."""
            backward = self._mod_tracker.is_bw and not self._in_ac
            if t.untyped_storage() in self._WINFO:
                kind = _FSDPRefType.TEMP if backward else _FSDPRefType.ACT
                self._update_and_maybe_create_winfos(t, kind)

        def _update_peak_stats(self, peak_state: Any) -> None:
            for each in self._curr_mem_snap.values():
                see(each)  # type: ignore[arg-type]

    tracker = Tracker(model, optimizer)  # type: ignore[arg-type]
    tracker._ref_class = [*_FSDPRefType, *own]  # type: ignore[assignment]
    return tracker


class PartOnDemand(DTensor):
    """A DTensor that asks `local()` for its part. DTensor's own code reads `_local_tensor`, here a
    property, and hands subclasses to dispatch.
    """

    @classmethod
    def shown_as(cls, shown: DTensor) -> tuple[Any, torch.Size]:
        """One that looks like another, whose data it never reads; and the shape of its part."""
        made = cls(shown._local_tensor, shown._spec, requires_grad=False)  # type: ignore[call-arg]
        return made, shown._local_tensor.shape

    def local(self) -> torch.Tensor:
        """The part."""
        raise NotImplementedError

    @property
    def _local_tensor(self) -> Any:
        return self.local()

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:  # pyright: ignore
        """DTensor's constructor sets what stands in for the part."""
