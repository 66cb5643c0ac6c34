"""A built program: the stages' results, bound to this rank and to the live module."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import checkpoint

from .._torch import fsdp_hooks_alone, fsdp_policy
from ..capture import Captured
from ..capture.tap import Tap
from ..checkpoint import Choice, Frame, Host, Later, Policy, Recompute, meets_others, needed
from ..errors import PlacementError, UsageError
from ..graph import Meta, Origin, describe, facts, result_nodes
from ..lower import Call as RegionCall
from ..lower import Collective, Drawn, Region
from ..lower.collectives import scale_grad
from ..place.masks import forget_bands
from ..placement import Placement, Shard, chunk_sizes
from .border import as_dtensor, to_local
from .codegen import Link, compile_part, compile_region
from .constants import Constants
from .lazy import begins_backward, lazy_dtensor, opened
from .states import state_reader

__all__ = ["Program"]


@dataclass
class Program:
    """Runs one call. `placed` and `root` are what `explain` prints."""

    captured: Captured
    placed: Graph
    flat: Graph
    root: Region
    mesh: DeviceMesh
    live: nn.Module | None
    constants: Constants
    policy: Policy = field(default_factory=Policy)
    random: bool = False
    distinct: int = 0
    grad: bool = True
    host: Host | None = None  # that values wait on
    _run: Callable[..., tuple[Any, ...]] | None = None
    _results: list[Any] = field(default_factory=list)
    opened: frozenset[int] = frozenset()  # inputs that the program makes of what they are made of
    result_names: list[str] = field(default_factory=list)

    def bind(self) -> None:
        """Compile every region for this rank."""
        link = Link(self.mesh.get_group(), self.mesh.get_local_rank(), self.mesh.size(), self._tap)
        binder = _Binder(self, link)
        self.random = any(isinstance(node.target, Drawn) for node, _ in self.nodes())
        self._run = binder.bind(self.root, "")
        self.distinct = len(binder.shared) - 1
        output = next(n for n in self.placed.nodes if n.op == "output")
        known = facts(output)
        self._results = list(zip(known.outs, known.placements, strict=True))
        self.result_names = [facts(node).source for node in result_nodes(output)]

    def nodes(self) -> Iterator[tuple[Node, int]]:
        """Every operation of the program, with how often it stands there."""
        counts: Counter[Region] = Counter(region for _, region in self.root.walk())
        for region, count in counts.items():
            for node in region.graph.nodes:
                if node.op == "call_function" and not isinstance(node.target, RegionCall):
                    yield node, count

    def _tap(
        self, tap: Tap, placements: tuple[Placement, ...], metas: tuple[Meta, ...]
    ) -> Callable[..., Any]:
        """The user's hooks of one module call, on DTensors."""
        assert self.live is not None
        module = self.live.get_submodule(tap.path)
        n = self.mesh.size()

        def shown(local: torch.Tensor, placement: Placement, meta: Meta) -> torch.Tensor:
            if not isinstance(placement, Shard):
                return local
            if placement != Shard(placement.dim, chunk_sizes(meta.shape[placement.dim], n)):
                raise PlacementError(
                    f"a hook on {tap.path} is given a value that DTensor cannot describe.",
                    where=tap.place(),
                    have=describe(meta, placement),
                    why="its rows are not the chunks that DTensor's Shard means",
                    fix="put the hook on a module whose inputs and results are "
                    "[batch, sequence, ...]",
                )
            if meta.requires_grad and n > 1:
                local = scale_grad(float(n), local)
            return as_dtensor(local, self.mesh, meta, placement)

        def back(value: torch.Tensor, placement: Placement) -> torch.Tensor:
            if not isinstance(placement, Shard):
                return value.full_tensor() if isinstance(value, DTensor) else value
            if not isinstance(value, DTensor):
                raise UsageError(
                    f"a hook on {tap.path} returned a plain tensor for a value split over sp.",
                    where=tap.place(),
                    have=f"a plain tensor {tuple(value.shape)} for a value placed {placement}",
                    why="which part of the whole it is cannot be known",
                    fix="compute on the DTensor that the hook is given, or return None",
                )
            value = value.redistribute(placements=[TorchShard(placement.dim)])
            local = to_local(value)
            return scale_grad(1.0 / n, local) if local.requires_grad and n > 1 else local

        def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = [shown(*each) for each in zip(tensors, placements, metas, strict=True)]
            given = tap.run(module, values)
            return tuple(back(v, p) for v, p in zip(given, placements, strict=False))

        return call

    def __call__(self, tensors: list[torch.Tensor], seed: int) -> Any:
        """Run on the call's tensors; give back what the module's forward would."""
        assert self._run is not None
        forget_bands()
        given = [to_local(t) for k, t in enumerate(tensors) if k not in self.opened]
        lazy: list[Any] = [tensors[k] for k in sorted(self.opened)]
        with opened(lazy) as made_of:
            values = list(self._run(seed, *given, *made_of))
            around = dict.fromkeys(m for each in lazy for m in each.recipe.around)
            values = begins_backward(list(around), values)
        for index, (meta, placement) in enumerate(self._results):
            value = values[index]
            if isinstance(value, Later):
                assert isinstance(placement, Shard)
                where = self.result_names[index]
                values[index] = lazy_dtensor(value, self.mesh, meta, placement, self.live, where)
            elif isinstance(placement, Shard):
                values[index] = as_dtensor(value, self.mesh, meta, placement)
        captured = self.captured
        count = len(captured.template.tensors)
        for origin, index in captured.writes:
            _write(self.live, origin, values[index])
        for path, name, value in captured.sets:
            assert self.live is not None
            owner: Any = self.live.get_submodule(path)
            *inner, last = name.split(".")  # "config.problem_type": an attribute's own attribute
            for part in inner:
                owner = getattr(owner, part)
            setattr(owner, last, value)
        return captured.template.fill(values[:count])

    def text(self) -> str:
        """What ranks must agree on, as text: the order of collectives and draws, all operations.

        The order of local operations may differ: Python iterates over sets of strings in another
        order in each process, and some models trace so.
        """
        ordered, rest = [], []
        for node, count in self.nodes():
            known = facts(node)
            name = (
                node.target
                if isinstance(node.target, str)
                else getattr(node.target, "__name__", "call")
            )
            constants = map_aggregate(
                (node.args, node.kwargs), lambda v: "%" if isinstance(v, Node) else v
            )
            moves, tokens = (getattr(node.target, each, "") for each in ("moves", "tokens"))
            row = f"{name} {moves} {tokens} {constants} {known.outs} {known.placements} x{count}"
            sends = isinstance(node.target, Collective) and node.target.sends
            (ordered if sends or isinstance(node.target, Drawn) else rest).append(row)
        return _ADDRESS.sub("", "\n".join([*ordered, *sorted(rest), *self._sent_again()]))

    def _sent_again(self) -> Iterator[str]:
        """Collectives that backward runs again, in order."""
        left = Counter(region for _, region in self.root.walk())
        for path, region in self.root.walk():
            left[region] -= 1
            choice = self.policy.of_call(region, left[region])
            for k, node in enumerate(region.graph.nodes if choice else ()):
                target = node.target
                if choice and isinstance(target, Collective) and target.sends:
                    for number, stage in enumerate(choice.stages.each):
                        if k in stage.again:
                            yield f"again in {path}, {number}: {target.kind} {target.moves}"

    def valid(self) -> bool:
        """Whether what forward read of its modules' Python still has the value it had."""
        return self.captured.watch.holds() and self.constants.unchanged()


class _Binder:
    """Gives every call of a region its parameters, and what must happen around it."""

    def __init__(self, program: Program, link: Link) -> None:
        self.program, self.link = program, link
        self.shared: dict[Any, Callable[..., Any]] = {}
        self.compiled: dict[Region, Callable[..., Any]] = {}
        self.again: dict[tuple[Region, Choice], Any] = {}
        self.left = Counter(region for _, region in program.root.walk())  # calls still to be bound

    def bind(self, region: Region, base: str) -> Callable[..., tuple[Any, ...]]:
        """The region's function with states read from the live modules under `base`."""
        self.left[region] -= 1
        choice = self.program.policy.of_call(region, self.left[region])
        if region not in self.compiled:
            self.compiled[region] = compile_region(region, self.link, self.shared)
        function = self.compiled[region]
        children = [self._call(call, base) for call in region.calls]
        program = self.program
        states = [
            state_reader(program.live, _under(origin, base), program.captured.consts)
            for origin in region.states
        ]

        def run(seed: int, *inputs: Any) -> tuple[Any, ...]:
            return function(seed, children, *[read() for read in states], *inputs)

        if choice is None:
            return run
        marked, recompute, numbers = self._recomputed(region, choice)

        written = [
            state_reader(program.live, origin, program.captured.consts)
            for origin, _ in program.captured.writes
            if origin.kind == "buffer"
        ]

        def run_in_part_again(seed: int, *inputs: Any) -> tuple[Any, ...]:
            if not torch.is_grad_enabled():
                return run(seed, *inputs)
            changing = {id(read()) for read in written}  # backward needs them as they are now
            own = [v.clone() if id(v) in changing else v for v in (read() for read in states)]
            values = [*own, *inputs]
            frame = Frame(recompute, seed, dict(zip(numbers, values, strict=True)), program.host)
            with frame.saving():
                results = marked(seed, children, frame, *values)
            return frame.results(results)

        return run_in_part_again

    def _recomputed(self, region: Region, choice: Choice) -> Any:
        """(the function that tells a frame what runs, how to run parts again, its inputs)."""
        if (region, choice) not in self.again:
            keep, stages = choice.keep, choice.stages
            nodes = list(region.graph.nodes)
            met = {k for k, node in enumerate(nodes) if meets_others(node)}
            sends = tuple(stage.again & met for stage in stages.each)

            def part(stage: int, wanted: frozenset[int]) -> Any:
                there = stages.hold | stages.left_before(stage)
                asked = wanted | sends[stage] | stages.each[stage].leaves
                again, _ = needed(nodes, there, asked)
                return compile_part(region, self.link, self.shared, again)

            @functools.cache
            def local(stage: int, at: int) -> bool:
                there = stages.left_before(stage)
                if at in there:
                    return True
                return needed(nodes, stages.hold | there, (at,))[0] & met <= sends[stage]

            made = Recompute(keep, stages, part, sends, local, choice.moves, choice.fetch)
            marked = compile_region(region, self.link, self.shared, marked=True, cuts=made.begins)
            numbers = [k for k, node in enumerate(nodes) if node.op == "placeholder"]
            self.again[region, choice] = marked, made, numbers
        return self.again[region, choice]

    def _call(self, call: RegionCall, base: str) -> Callable[..., tuple[Any, ...]]:
        path = f"{base}.{call.path}" if base else call.path
        run = self.bind(call.region, path if call.rebased else base)
        live = self.program.live
        assert live is not None
        module = live.get_submodule(path)
        if fsdp_policy(module) is not None:
            run = _through_module(module, run)
        return _checkpointed(run) if self.program.captured.calls[call.number].checkpointed else run


def _under(origin: Origin, base: str) -> Origin:
    if not base or origin.kind not in ("param", "buffer", "attr"):
        return origin
    return Origin(origin.kind, f"{base}.{origin.module}" if origin.module else base, origin.name)


_MISSING = object()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _through_module(
    module: nn.Module, run: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """Call the live module, its forward the region, so that FSDP2 unshards and reshards around it.

    The user's own hooks are left out: they run as taps, on DTensors, not on the region's flat local
    values.
    """

    policy = fsdp_policy(module)
    takes = policy.param_dtype if policy.cast_forward_inputs else None

    def forward(seed: int, *values: Any) -> Any:
        results = list(run(seed, *(v.value if isinstance(v, _Passed) else v for v in values)))
        cast = [k for k, each in enumerate(results) if _is_cast(each, policy.output_dtype)]
        begun = begins_backward([module], [results[k] for k in cast])
        for k, each in zip(cast, begun, strict=True):
            results[k] = _Passed(each)
        return tuple(results)

    def call(seed: int, *inputs: Any) -> tuple[Any, ...]:
        own = module.__dict__
        changed = {
            "forward": lambda *values: forward(seed, *values),
            "_compiled_call_impl": None,  # module.compile() must not compile the region's call
            **fsdp_hooks_alone(module),
        }
        previous = {name: own.get(name, _MISSING) for name in changed}
        own.update(changed)
        try:
            results = module(*(_Passed(v) if _is_cast(v, takes) else v for v in inputs))
        finally:
            for name, value in previous.items():
                if value is _MISSING:
                    del own[name]
                else:
                    own[name] = value
        return tuple(r.value if isinstance(r, _Passed) else r for r in results)

    return call


class _Passed:
    """A value that FSDP2 is not to see: it would cast it, which the program does where it is due,
    and not to what a module takes or gives past its arguments.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_cast(value: Any, dtype: torch.dtype | None) -> bool:
    if dtype is None or not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and value.dtype != dtype


def _checkpointed(run: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """What the model wraps in torch.utils.checkpoint is recomputed in backward here as well."""

    def call(seed: int, *inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return run(seed, *inputs)
        return checkpoint(run, seed, *inputs, use_reentrant=False, preserve_rng_state=False)

    return call


def _write(live: nn.Module | None, origin: Origin, value: Any) -> None:
    """Carry out a change of state that forward made."""
    assert live is not None
    module = live.get_submodule(origin.module)
    if origin.kind == "buffer" and isinstance(module._buffers.get(origin.name), torch.Tensor):
        old = module._buffers[origin.name]
        assert old is not None
        if old.shape == value.shape and old.dtype == value.dtype:
            with torch.no_grad():
                old.copy_(value.detach())
            return
        module._buffers[origin.name] = value
        return
    setattr(module, origin.name, value)
