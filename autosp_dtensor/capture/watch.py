"""Follow module calls while tracing: where each node stands, FSDP2's casts, the user's hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._torch import fsdp_policy, has_backward_hooks_on_all, hook_counts
from ..errors import CaptureError
from ..graph import Scope
from ..tree import flatten, unflatten
from .ghost import Ghost
from .refuse import refuse_recurrent
from .tap import tapped

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["ModuleCall", "watch_modules"]


@dataclass
class ModuleCall:
    """One call of a module; `checkpointed`: the outermost one under torch.utils.checkpoint."""

    scope: Scope
    checkpointed: bool = False


def watch_modules(recorder: Recorder, ghost: Ghost) -> None:
    """Put hooks on the ghost's modules.

    FSDP2 casts floating inputs and outputs when the live module is called; the ghost does the same
    as traced operations, so that the dtypes in the trace are those that will run.

    Raises:
        CaptureError: a module inside the model, or every module, has a backward hook.
    """
    if has_backward_hooks_on_all():
        raise CaptureError(
            "a backward hook is registered on all modules.",
            where=type(ghost.live).__name__,
            have="hooks of torch.nn.modules.module.register_module_full_backward_hook or its kin",
            why="gradients arrive in a traced program, not at the modules' own calls",
            fix="remove the hook, or use tensor hooks on parameters",
        )
    live = dict(ghost.live.named_modules())
    for module in ghost.module.modules():
        path = ghost.paths.get(id(module))
        if path is None:
            continue
        before, after, backward = hook_counts(live[path])
        if backward and path:
            raise CaptureError(
                "a module has a backward hook.",
                where=path,
                have=f"{backward} backward hooks on a {type(live[path]).__name__}",
                why="its gradients arrive in a traced program, not at the module's own call",
                fix="use tensor hooks on parameters, or remove the hook",
            )
        policy = fsdp_policy(live[path])
        enter = _enter(recorder, path, policy, bool(before))
        module.register_forward_pre_hook(enter, with_kwargs=True)
        leave = _leave(recorder, path, policy, bool(after))
        module.register_forward_hook(leave, with_kwargs=True, always_call=True)


def _enter(recorder: Recorder, path: str, policy: Any, hooked: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if hooked and path:  # the root's own hooks run around the program
            args, kwargs = tapped(path, "before", (args, kwargs), None, recorder.record_tap)
        if policy is not None and policy.param_dtype and policy.cast_forward_inputs and path:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        recorder.enter(path)
        refuse_recurrent(module, (args, kwargs), recorder.where)
        return args, kwargs

    return hook


def _leave(recorder: Recorder, path: str, policy: Any, hooked: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        recorder.leave(path)
        if policy is not None and policy.output_dtype and path:
            output = _cast(output, policy.output_dtype)
        if hooked and path:
            output = tapped(path, "after", (args, kwargs), output, recorder.record_tap)
        return output

    return hook


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value

    leaves, spec = flatten(tree)
    return unflatten(spec, [cast(leaf) for leaf in leaves])
