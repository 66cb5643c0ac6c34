"""nn.Module and a call -> torch-level FX graph of the whole-sequence program."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from .._torch import FakeTensorMode
from ..errors import CaptureError
from ..graph import Facts, Origin, given, meta_of, set_facts
from ..tree import unflatten
from .bias import refuse_bias
from .bypass import patched
from .call import Call, name_of, read_call, refuse_opaque, state_key, state_text
from .ghost import Ghost, changed_attributes, make_ghost
from .kept import Made, refuse_kept
from .snapshot import Spy, Watch
from .template import Template
from .trace import Recorder
from .watch import ModuleCall, watch_modules

__all__ = [
    "Call",
    "Captured",
    "capture",
    "name_of",
    "read_call",
    "refuse_opaque",
    "state_key",
    "state_text",
]


@dataclass
class Captured:
    """The whole-sequence program of one call.

    Attributes:
        graph: placeholders for the call's tensors, get_attr for parameters, buffers and constants,
            one call_function for each torch-level call; the output node holds the results.
        template: how the results are put together.
        calls: the module calls, in order.
        writes: attributes of modules that forward sets to new tensors (buffers included), with the
            index of the result.
        sets: attributes that forward sets to other values.
        watch: the Python values that forward read from its modules: the program is valid for them
            alone.
    """

    graph: Graph
    template: Template
    calls: list[ModuleCall]
    writes: list[tuple[Origin, int]]
    sets: list[tuple[str, str, Any]]
    watch: Watch
    consts: dict[str, torch.Tensor]
    fake_mode: FakeTensorMode


def capture(call: Call) -> Captured:
    """Trace `call` without touching the live module, without data, without communication.

    Raises:
        CaptureError: the Python of the model reads a tensor's value or does what a program cannot
            repeat.
    """
    refuse_opaque(call)
    captured, made = _trace(call)
    refuse_kept(made, call.name)
    return captured


def _trace(call: Call) -> tuple[Captured, list[Made]]:
    """The program, and the tensors of the trace, none of which it holds."""
    fake_mode = FakeTensorMode()
    ghost = make_ghost(call.target, fake_mode) if isinstance(call.target, nn.Module) else None
    recorder = Recorder(fake_mode, ghost)
    for tensor in call.tensors:
        refuse_bias(tensor, lambda: call.name)
    fakes = iter([_fake_input(t, fake_mode) for t in call.tensors])
    leaves = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            fake = next(fakes)
            leaves.append(fake)
        else:
            leaves.append(leaf)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for number, fake in enumerate(tensors):
        recorder.add_input(fake, number)
    args, kwargs = unflatten(call.spec, leaves)
    run = call.target
    if ghost is not None:
        ghost.remember()
        watch_modules(recorder, ghost)
        run = ghost.module
    drawn = _python_random()
    Spy.active = reads = set()
    try:
        with fake_mode, patched(recorder), recorder.aten, recorder:
            result = run(*args, **kwargs)
    finally:
        Spy.active = None
    if _python_random() != drawn:
        raise CaptureError(
            "forward draws random numbers in Python (random or numpy.random).",
            where=call.name,
            have=call.describe(),
            why="the program is traced once: the number drawn then would be used at every call",
            fix="draw with torch, or pass the number to forward",
        )
    if ghost is not None:
        ghost.reads = reads
    captured = _finish(recorder, ghost, call.target, result, fake_mode)
    return captured, recorder.release()


def _fake_input(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(tensor.requires_grad)


def _finish(
    recorder: Recorder, ghost: Ghost | None, target: Any, result: Any, mode: FakeTensorMode
) -> Captured:
    template = Template(result)
    tensors = list(template.tensors)
    writes = [
        (origin, _place(tensors, recorder, key)) for origin, key in recorder.mutations.items()
    ]
    sets: list[tuple[str, str, Any]] = []
    for path, name, new in changed_attributes(ghost) if ghost else ():
        if isinstance(new, torch.Tensor) and id(new) in recorder.node_of:
            tensors.append(new)
            writes.append((Origin("attr", path, name), len(tensors) - 1))
            continue
        if Template(new).tensors:
            raise CaptureError(
                f"forward keeps tensors inside a {type(new).__name__} on self.",
                where=f"{path}.{name}".lstrip("."),
                have=given(Template(new).tensors),
                why="they are results of the program, which are put back only where they stand "
                "alone",
                fix="assign each tensor to an attribute of its own, or return it",
            )
        sets.append((path, name, new))
    if ghost is not None:
        for module in ghost.module.modules():
            path = ghost.paths.get(id(module), "")
            for name, buffer in module._buffers.items():
                if buffer is None or recorder.origin_of.get(id(buffer)) is not None:
                    continue
                if id(buffer) in recorder.node_of:
                    tensors.append(buffer)
                    writes.append((Origin("buffer", path, name), len(tensors) - 1))
    nodes = [recorder.node_for(recorder.as_fake(tensor)) for tensor in tensors]
    output = recorder.graph.output(tuple(nodes))
    set_facts(output, Facts(tuple(meta_of(t) for t in tensors), single=False))
    recorder.graph.lint()
    return Captured(
        recorder.graph,
        template.without_tensors(),
        recorder.calls,
        writes,
        sets,
        _watch(ghost, target),
        recorder.consts,
        mode,
    )


def _place(tensors: list[torch.Tensor], recorder: Recorder, key: int) -> int:
    tensors.append(next(t for t in recorder.alive if id(t) == key))
    return len(tensors) - 1


def _watch(ghost: Ghost | None, target: Any) -> Watch:
    """What the program depends on in Python: of a module, or of a plain function."""
    if ghost is not None:
        return ghost.watch()
    watch = Watch()
    watch.add_function(target)
    return watch


def _python_random() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators, to see whether forward has drawn from them."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    plain = tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
    return random.getstate(), plain
