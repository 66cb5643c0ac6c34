"""A DTensor whose values are made when something looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._torch import PartOnDemand, is_fsdp_hook, tree_map
from .errors import UsageError
from .source import call_site

__all__ = ["LazyDTensor"]


class LazyDTensor(PartOnDemand):
    """A DTensor whose local part is made when something first asks for it.

    It is an ordinary tensor to autograd; what lies below (dispatch, `to_local`) makes the part.
    """

    _made: torch.Tensor | None
    _make: Callable[[], torch.Tensor]
    _watched: bool
    _passed: bool
    recipe: Any
    local_shape: torch.Size

    @classmethod
    def like(
        cls, shown: DTensor, make: Callable[[], torch.Tensor], recipe: Any = None
    ) -> LazyDTensor:
        """shown: a DTensor without data (expanded from one number) of the same shape. recipe: for
        those who can do with what it is made of; its `key` is part of a program's.
        """
        lazy, lazy.local_shape = cls.shown_as(shown)
        lazy._made, lazy._make, lazy.recipe = None, make, recipe
        lazy._watched = lazy._passed = False
        return lazy

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], context: Any, size: Any, stride: Any
    ) -> LazyDTensor:
        """How torch.compile makes one again of its part: made, and of the same class as it met."""
        plain = PartOnDemand.__tensor_unflatten__(inner, context, size, stride)
        made = LazyDTensor.made_of(plain)
        made.requires_grad_(plain.requires_grad)
        return made

    @classmethod
    def made_of(cls, plain: DTensor) -> LazyDTensor:
        """One whose part is there."""
        part = plain._local_tensor
        made = cls.like(plain, lambda: part)
        made._made = part
        return made

    @property
    def pending(self) -> bool:
        """Whether its local part is still to be made."""
        return self._made is None

    @property
    def openable(self) -> bool:
        """Whether a program may make it itself; then no gradient comes to this tensor."""
        return self.pending and not self._watched and self.recipe is not None

    def opened(self) -> None:
        """A program has made it itself, for a gradient."""
        self._passed = True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of any tensor; another dtype of what is not made is not made, either. (FSDP2's
        `output_dtype`, and others around a model, cast all results, read or not.)
        """
        if self.pending and not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype):
            return self if args[0] == self.dtype else _Cast.apply(self, args[0])
        return super().to(*args, **kwargs)

    def float(self, *args: Any, **kwargs: Any) -> Any:
        """As `to`."""
        return super().float(*args, **kwargs) if args or kwargs else self.to(torch.float32)

    def register_hook(self, hook: Any) -> Any:
        """As of any tensor; what it is given to from now on leaves a gradient here."""
        if not is_fsdp_hook(hook):
            self._watch()
        return super().register_hook(hook)

    def retain_grad(self) -> None:
        """As of any tensor; what it is given to from now on leaves a gradient here."""
        self._watch()
        super().retain_grad()

    def _watch(self) -> None:
        if self._passed:
            raise UsageError(
                "a gradient is asked for at logits after a loss was made past them.",
                where=call_site("the hook"),
                have=f"a DTensor {tuple(self.shape)} whose values are not made",
                why="a parallelized loss makes wide results itself, by tiles; its gradient goes to "
                "what they are made of",
                fix="put hooks on logits, and retain_grad, before they are given to the loss",
            )
        self._watched = True

    def local(self) -> torch.Tensor:
        """Its local part, made once."""
        if self._made is None:
            self._made = self.part()
        return self._made

    def part(self) -> torch.Tensor:
        """Its local part, which is not kept for it."""
        if self._made is not None:
            return self._made
        with torch.no_grad():
            return self._make()

    def _plain(self) -> DTensor:
        return DTensor.from_local(
            self.local(),
            self.device_mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride(),
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Kept as the DTensor that it is once made: what makes it is this process's."""
        with torch.no_grad():
            plain = self._plain()
        return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(value: Any) -> Any:
            return value._plain() if isinstance(value, LazyDTensor) else value

        given = args
        args, kwargs = tree_map(real, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default and not given[0].pending:
            return cls.made_of(result)  # torch.compile asks that it stay what it is
        return result


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lazy: LazyDTensor, dtype: torch.dtype) -> LazyDTensor:
        ctx.dtype = lazy.dtype
        local = lazy.local_shape
        stand_in = torch.empty((), dtype=dtype, device=lazy.device).expand(local)
        shown = DTensor.from_local(
            stand_in,
            lazy.device_mesh,
            lazy.placements,
            run_check=False,
            shape=lazy.shape,
            stride=lazy.stride(),
        )
        cast = LazyDTensor.like(shown, lambda: lazy.part().to(dtype))
        if not dtype.is_floating_point:
            ctx.mark_non_differentiable(cast)
        return cast

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        return grads[0].to(ctx.dtype), None
