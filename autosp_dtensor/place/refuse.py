"""What a user is told of an operation that has no rule, and of a gradient of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import PlacementError, UsageError
from ..graph import Meta, describe
from ..placement import Placement
from ..source import call_site

__all__ = ["Refusals", "first_gradient_alone"]

Backward = Callable[..., Any]


_RUN_AGAIN = "their backward runs forward once more, part by part, and keeps nothing of it"


def first_gradient_alone(
    what: str, fix: str, why: str = _RUN_AGAIN
) -> Callable[[Backward], Backward]:
    """For a Function's backward that is neither linear nor differentiable itself. (torch's
    `once_differentiable` lets it pass where the gradient that comes in is a constant.)

    Raises:
        UsageError: gradients of its gradients may be asked for; they would be wrong silently, as
            autograd would take what it gives for constants.
    """

    def around(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *incoming: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *incoming)
            raise UsageError(
                f"gradients of gradients do not go through {what}.",
                where=call_site("backward"),
                have="create_graph=True",
                why=why,
                fix=fix,
            )

        return run

    return around


class Refusals:
    """Collects operations without a rule, so that one error names them all."""

    def __init__(self, axis_size: int) -> None:
        self.axis_size = axis_size
        self.first: PlacementError | None = None
        self.places: list[str] = []

    def add(
        self,
        target: Callable[..., Any],
        name: str,
        source: str,
        tensors: Sequence[tuple[Meta, Placement]],
    ) -> None:
        full = _full_name(target)
        error = PlacementError(
            f"{full} has no rule for a value split over mesh axis 'sp' (size {self.axis_size}).",
            where=f"{source}, {name}",
            have=[f"arg {k} {describe(*each)}" for k, each in enumerate(tensors)] or "no tensors",
            why="each rank holds a part of the sequence, and it is not known whether the operation "
            "reads across parts",
            fix=f'register one: autosp.register_rule({full}, "{_example(tensors)}"), '
            "with [] around dims that it reads whole",
        )
        self.places.append(f"{name} at {source}")
        self.first = self.first or error

    def raise_if_any(self) -> None:
        """Raise the first refusal, with the places of all others."""
        if self.first is None:
            return
        first = self.first
        others = sorted(set(self.places[1:]) - {self.places[0]})
        have = [first.have] if isinstance(first.have, str) else list(first.have or ())
        more = [f"also  {text}" for text in others[:10]]
        raise PlacementError(
            first.what, where=first.where, have=[*have, *more], why=first.why, fix=first.fix
        )


def _full_name(target: Callable[..., Any]) -> str:
    inner: Any = getattr(target, "func", target)
    if isinstance(getattr(torch.Tensor, getattr(inner, "__name__", ""), None), type(inner)):
        return f"torch.Tensor.{inner.__name__}"
    module = getattr(inner, "__module__", None) or "torch"
    name = getattr(inner, "__name__", str(inner))
    return f"{module}.{name}" if module.startswith("torch") else name


def _example(tensors: Sequence[tuple[Meta, Placement]]) -> str:
    """Letters of its own for each tensor: dims of equal names are split together."""
    letters = iter("abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    terms = [" ".join(next(letters, "z") for _ in meta.shape) or "()" for meta, _ in tensors]
    return ", ".join(terms) + " -> ..."
