"""A DTensor whose values are made when something looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._torch import is_fsdp_hook, tree_map
from .errors import UsageError
from .source import call_site

__all__ = ["LazyDTensor"]


class LazyDTensor(DTensor):
    """A DTensor whose local part is made when something first asks for it.

    It is an ordinary tensor to autograd; what lies below (dispatch, `to_local`) makes the part.
    DTensor's own code reads `_local_tensor`, here a property, and hands subclasses to dispatch.
    """

    _made: torch.Tensor | None
    _make: Callable[[], torch.Tensor]
    _watched: bool
    _passed: bool
    recipe: Any

    @classmethod
    def like(
        cls, shown: DTensor, make: Callable[[], torch.Tensor], recipe: Any = None
    ) -> LazyDTensor:
        """shown: a DTensor without data (expanded from one number) of the same shape. recipe: for
        those who can do with what it is made of; its `key` is part of a program's.
        """
        lazy = cls(shown._local_tensor, shown._spec, requires_grad=False)  # type: ignore[call-arg]
        lazy._made, lazy._make, lazy.recipe = None, make, recipe
        lazy._watched = lazy._passed = False
        return lazy

    @property
    def pending(self) -> bool:
        """Whether its local part is still to be made."""
        return self._made is None

    @property
    def openable(self) -> bool:
        """Whether a program may make it itself; then no gradient comes to this tensor."""
        return self.pending and not self._watched

    def opened(self) -> None:
        """A program has made it itself, for a gradient."""
        self._passed = True

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

    @property
    def _local_tensor(self) -> Any:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        return self._made

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:  # pyright: ignore
        """DTensor's constructor sets what stands in for the part."""

    def _plain(self) -> DTensor:
        return DTensor.from_local(
            self._local_tensor,
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

        args, kwargs = tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)
