"""What stands in the place of `model.forward`: finds or builds a call's program, and runs it."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import unset_fake_temporarily
from ..capture import Call, name_of, read_call, state_key, state_text
from ..checkpoint import Host
from .agree import Agreement
from .border import placement_on
from .build import build, check_devices, sequence_length
from .compile import Options
from .program import Program

__all__ = ["Forward"]

log = logging.getLogger("autosp_dtensor")
_MANY = 16


def _for_nobody(saved: Any) -> Any:
    """Nothing that is run without data has a backward; an output that is saved as it is would keep
    itself, its graph and the whole trace alive."""


class Forward:
    """Callable like the forward it replaces. One per parallelized module or function."""

    is_autosp_forward = True

    def __init__(
        self,
        target: nn.Module | Callable[..., Any],
        mesh: DeviceMesh,
        gradient_mesh: DeviceMesh,
        options: Options,
    ):
        self.target = target
        self.mesh = mesh
        self.gradient_mesh = gradient_mesh
        self.options = options
        self.agreement = Agreement(mesh, name_of(target))
        self.programs: dict[Any, list[Program]] = defaultdict(list)
        self.last: Program | None = None
        self.host = Host(options.host, mesh.device_type) if options.host else None
        self._compared = False
        self._texts: dict[tuple[Any, ...], str] = {}
        self.original_attribute = (
            target.__dict__.get("forward") if isinstance(target, nn.Module) else None
        )
        self.__name__ = getattr(target, "__name__", "forward")
        self.__doc__ = getattr(target, "forward", target).__doc__
        self.__wrapped__ = target.forward if isinstance(target, nn.Module) else target

    def original(self) -> Callable[..., Any]:
        """The user's own forward, unsharded."""
        if not isinstance(self.target, nn.Module):
            return self.target
        if self.original_attribute is not None:
            return self.original_attribute
        return functools.partial(type(self.target).forward, self.target)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = read_call(self.target, args, kwargs, functools.partial(placement_on, self.mesh))
        state = state_key(self.target) if isinstance(self.target, nn.Module) else ()
        found = self._cached(call, state)
        unsharded = self._runs_unsharded(call)
        if self.options.check_ranks and self.mesh.size() > 1:
            cached = "traced before" if found is not None else "new"
            known = f"{self._state_text(state)}, {cached}"
            inputs = [] if unsharded else call.whole()  # each rank's own, where nothing is sent
            self.agreement.on_call(call.describe(), known, inputs)
        if unsharded:
            return self.original()(*args, **kwargs)
        program = found or self.program(call, state)
        seed = 0
        if program.random:
            with unset_fake_temporarily():  # in a plan too: any number
                seed = self.agreement.seed(int(torch.randint(2**62, (), dtype=torch.int64)))
        self.last = program
        return program(call.tensors, seed)

    def _runs_unsharded(self, call: Call) -> bool:
        """Without gradient, what cannot be split (a cache, one token) runs whole on every rank."""
        if torch.is_grad_enabled():
            return False
        length = sequence_length(call, self.options)
        return call.opaque is not None or length is None or length < self.mesh.size()

    def _state_text(self, state: tuple[Any, ...]) -> str:
        """The module's state as text, equal on ranks that agree; made once for each state."""
        if state not in self._texts:
            self._texts[state] = state_text(state)
        return self._texts[state]

    def _cached(self, call: Call, state: tuple[Any, ...]) -> Program | None:
        """The program of a call, if it was traced before and is still valid."""
        for program in self.programs.get((call.key, state), ()):
            if program.valid():
                return program
        return None

    def program(self, call: Call, state: tuple[Any, ...]) -> Program:
        """Build the program of a call."""
        key = (call.key, state)
        try:
            live = self.target if isinstance(self.target, nn.Module) else None
            check_devices(call, live, self.mesh)
            # A plan runs on tensors without data. The user's hooks on saved tensors (a checkpoint
            # around the call) are for what runs, not for the trace.
            with unset_fake_temporarily(), saved_tensors_hooks(_for_nobody, _for_nobody):
                program = build(call, self.mesh, self.options, self.host)
        except Exception as error:
            if self.options.check_ranks:
                self.agreement.on_failure(error)  # peers are told, so that they do not wait
            raise
        if self.options.check_ranks:
            self._compare(call, program)
        self.programs[key].append(program)
        count = sum(len(programs) for programs in self.programs.values())
        if count % _MANY == 0:
            log.warning(
                "%d programs traced for one module; each new shape or Python value is traced "
                "once: pad lengths to a few sizes, pass numbers that change (a count, a scale) "
                "as tensors",
                count,
            )
        return program

    def _compare(self, call: Call, program: Program) -> None:
        """A new program: all ranks have built the same one, from the same data and parameters."""
        self.agreement.on_text(program.text(), call.describe())
        self.agreement.on_first_call()
        constants = list(program.captured.consts.values())
        self.agreement.on_outside(constants)
        self._compare_parameters()

    def _compare_parameters(self) -> None:
        """Once: whole parameters and buffers (FSDP2's shards are not) are the same on all ranks."""
        if self._compared or not isinstance(self.target, nn.Module):
            return
        self._compared = True
        states = [*self.target.named_parameters(), *self.target.named_buffers()]
        self.agreement.on_parameters((n, t) for n, t in states if not isinstance(t, DTensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """A copied module is parallelized as well: same mesh, its own programs."""
        copied = Forward.__new__(Forward)
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        copied.target = memo.get(id(self.target), self.target)
        copied.programs = defaultdict(list)
        copied.last = None
        return copied
