"""All ranks of a lowered program in one process: an independent statement of what collectives do.

A value is a list with one local tensor for each rank. Local calls run once for each rank; a
collective joins the list into the whole and cuts it again, by index and in plain torch, so autograd
goes through the whole simulation, and nothing of `lower/collectives.py` or `lower/layout.py` is
used.

The convention of gradients needs no care: each rank's loss counts once, so the gradient of a shared
parameter is n times the mean over ranks of what each would hold.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from autosp_dtensor.capture import Captured, capture, read_call
from autosp_dtensor.checkpoint import Deferred, Tile, tile_free
from autosp_dtensor.graph import Origin, facts
from autosp_dtensor.lower import Call as RegionCall
from autosp_dtensor.lower import Collective, Drawn, Region, bound, cut_regions, lower
from autosp_dtensor.lower.random import Seeded
from autosp_dtensor.place import canonicalize, in_groups, place
from autosp_dtensor.placement import Placement, Replicate, Shard
from autosp_dtensor.run.build import block_paths, region_paths
from autosp_dtensor.run.constants import Constants
from autosp_dtensor.tree import flatten
from tests.pieces import cut, glue, positions

Locals = list[Any]
# Runs every comparison by tiles of so many tokens: AUTOSP_TEST_TILE=3 pytest tests/place
TILE = int(os.environ["AUTOSP_TEST_TILE"]) if "AUTOSP_TEST_TILE" in os.environ else None
# With AUTOSP_TEST_GROUPS=1 by groups of heads, too; tests that count attention's calls fail then.
GROUPS = TILE is None or "AUTOSP_TEST_GROUPS" in os.environ


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads would only wait for each other. Folders import it in their
    conftest.py."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- running -----------------------------------------------------------------------------------


def run_whole(graph: Graph, inputs: Sequence[Tensor], state: Callable[[Origin], Any]) -> dict:
    """The values of a captured graph, on one device."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = state(facts(node).origin)
        elif node.op == "call_function":
            args, kwargs = map_aggregate(
                (node.args, node.kwargs), lambda v: values[v] if isinstance(v, Node) else v
            )
            values[node] = node.target(*args, **kwargs)
    return values


class Ranks:
    """Runs regions on every rank. `state` gives a parameter, buffer or constant by its origin."""

    def __init__(self, n: int, state: Callable[[Origin], Any], seed: int = 0) -> None:
        self.n, self.state, self.seed = n, state, seed
        self.draws = 0
        self.ran: list[tuple[str, tuple[Any, ...]]] = []

    def run(self, region: Region, inputs: Sequence[Locals], base: str = "") -> list[Locals]:
        """The results of a region whose own state is under `base` in the model."""
        values: dict[Node, Locals] = {}
        states = [[self.state(_under(origin, base))] * self.n for origin in region.states]
        given = iter([*states, *inputs])
        calls = iter(region.calls)
        for node in region.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return [values[result] for result in node.args[0]]
            else:
                args = [values[a] for a in node.args if isinstance(a, Node)]
                values[node] = self._node(node, args, values, calls, base)
        raise AssertionError("a region has an output")

    def _node(self, node, args, values, calls, base) -> Locals:
        target: Any = node.target
        if isinstance(target, RegionCall):
            assert target is next(calls), "calls are listed in order"
            path = f"{base}.{target.path}".strip(".")
            given = self.run(target.region, args, path if target.rebased else base)
            return [tuple(each[rank] for each in given) for rank in range(self.n)]
        if isinstance(target, Collective):
            if target.sends:
                self.ran.append((target.kind, target.moves))
            return collective(target, args, self.n)
        self.draws += isinstance(target, Drawn)
        return [_call(node, values, rank, (self.seed, self.draws)) for rank in range(self.n)]


def _under(origin: Origin, base: str) -> Origin:
    if origin.kind not in ("param", "buffer", "attr"):
        return origin
    return Origin(origin.kind, f"{base}.{origin.module}".strip("."), origin.name)


def _call(node: Node, values: dict[Node, Locals], rank: int, draw: tuple[int, int]) -> Any:
    args, kwargs = map_aggregate(
        (node.args, node.kwargs), lambda v: values[v][rank] if isinstance(v, Node) else v
    )
    args, kwargs = bound(args, rank), bound(kwargs, rank)
    target: Any = node.target
    if isinstance(target, Deferred):
        (made,) = collective(
            Collective("scale_grad", factor=target.factor), [[target.tile.bind(rank)(*args)]], 1
        )
        return made
    if isinstance(target, Tile):
        target = target.bind(rank)
    if isinstance(target, Drawn):
        seed, number = draw
        drawn = Seeded(target.target, number, rank if target.sharded else None)
        return drawn(seed, *args, **kwargs)
    return target(*args, **kwargs)


def collective(what: Collective, args: list[Locals], n: int) -> Locals:
    """What a collective must do, said with the whole value."""
    if what.kind == "scale_grad":
        return [x.detach() + what.factor * (x - x.detach()) for x in args[0]]
    if what.kind == "mean_grad":
        mean = sum(x - x.detach() for x in args[0]) / n
        return [x.detach() + mean for x in args[0]]
    if what.kind == "slice":
        target = what.moves[0][1]
        return [x.index_select(target.dim, positions(target, r)) for r, x in enumerate(args[0])]
    moved = [
        cut(glue(parts, source), target, n)
        for parts, (source, target) in zip(args, what.moves, strict=True)
    ]
    if len(moved) == 1:
        return moved[0]
    return [tuple(each[rank] for each in moved) for rank in range(n)]


# -- programs ----------------------------------------------------------------------------------


@dataclass
class Lowered:
    """One call through capture, place, lower and regions, as `run/build.py` does it."""

    captured: Captured
    placed: Graph
    flat: Graph
    root: Region
    n: int
    live: nn.Module | None

    def state(self, origin: Origin) -> Any:
        if origin.kind == "const":
            return self.captured.consts[origin.name]
        assert self.live is not None
        return getattr(self.live.get_submodule(origin.module), origin.name)

    def nodes(self) -> list[Node]:
        """Operations in the order in which they run; a repeated block's as often as it runs."""
        return list(_operations(self.root))

    def collectives(self) -> list[tuple[str, tuple[tuple[Any, Any], ...]]]:
        """(kind, moves) of everything that sends in the forward pass, in order."""
        return [
            (node.target.kind, node.target.moves)
            for node in self.nodes()
            if isinstance(node.target, Collective)
            and node.target.sends
            and node.target.kind != "mean_grad"
        ]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.collectives()]

    def named(self, name: str) -> list[Node]:
        """Operations that call a function of this name."""
        return [node for node in self.nodes() if getattr(node.target, "__name__", "") == name]

    def largest(self) -> int:
        """Elements of the largest value that any rank computes."""
        sizes = [0]
        for node in self.nodes():
            known = facts(node)
            for meta, placement in zip(known.outs, known.placements, strict=True):
                count = meta.numel
                if isinstance(placement, Shard) and meta.shape[placement.dim]:
                    longest = placement.outer * max(placement.sizes)
                    count = count // meta.shape[placement.dim] * longest
                sizes.append(count)
        return max(sizes)


def _operations(region: Region) -> Iterator[Node]:
    for node in region.graph.nodes:
        if isinstance(node.target, RegionCall):
            yield from _operations(node.target.region)
        elif node.op == "call_function":
            yield node


def lowered(
    target: Any,
    args: tuple[Any, ...] = (),
    n: int = 2,
    seq_dim: int = 1,
    *,
    sharded: dict[int, Shard] | None = None,
    tile: int | None = None,
    groups: bool = True,
    **kwargs: Any,
) -> Lowered:
    """sharded: inputs, by number, that come as DTensors, and how they are split. tile: tokens of
    a tile; None: no tiles. groups: whether attention goes by groups of heads then, as it would."""
    call = read_call(target, args, kwargs, _no_dtensor)
    for number, shard in (sharded or {}).items():
        call.placements[number] = shard
    live = target if isinstance(target, nn.Module) else None
    captured = capture(call)
    written = frozenset(index for origin, index in captured.writes if origin.kind == "buffer")
    checkpointed = {each.scope.path for each in captured.calls if each.checkpointed}
    blocks, regions = block_paths(live), region_paths(live, checkpointed)
    graph = canonicalize(captured.graph, n, Constants(live).read)
    if tile is not None and groups and GROUPS:
        borders = frozenset(blocks) | frozenset(regions)
        graph = in_groups(graph, n, 1, borders) or graph
    placed = place(
        graph,
        n,
        list(call.placements),
        seq_dim,
        written,
        frozenset(blocks),
        frozenset(regions),
    )
    flat = lower(placed, n, captured.fake_mode)
    root = cut_regions(flat, regions)
    if tile is not None:
        tile_free(root, len(captured.template.tensors), tile, grad=True)
    return Lowered(captured, placed, flat, root, n, live)


def _no_dtensor(tensor: Any) -> Placement:
    raise AssertionError("these tests pass whole tensors")


def assert_program_equals_whole(
    target: Any,
    args: tuple[Any, ...] = (),
    n: int = 2,
    seq_dim: int = 1,
    *,
    gradients: bool = True,
    sharded: dict[int, Shard] | None = None,
    reference: Any = None,
    tile: int | None = TILE,
    groups: bool = True,
    close: dict[str, float] | None = None,
    **kwargs: Any,
) -> Lowered:
    """The split program gives the results, states and gradients of one device, on every rank.

    reference: what one device runs, where it is not the target itself. close: tolerances, where
    something inside is computed in less precision than the results have.
    """
    if reference is None:
        reference = copy.deepcopy(target) if isinstance(target, nn.Module) else target
    program = lowered(target, args, n, seq_dim, sharded=sharded, tile=tile, groups=groups, **kwargs)
    given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]

    # Each rank has its own copy, or part, of an input; parameters and constants are shared.
    inputs = [(sharded or {}).get(k, Replicate()) for k in range(len(given))]
    copies = [
        [part.detach().clone().requires_grad_(x.requires_grad) for part in cut(x, placement, n)]
        for x, placement in zip(given, inputs, strict=True)
    ]
    locals_ = Ranks(n, program.state).run(program.root, copies)
    output = next(node for node in program.flat.nodes if node.op == "output")
    placements = facts(output).placements
    glued = [glue(parts, p) for parts, p in zip(locals_, placements, strict=True)]
    count = len(program.captured.template.tensors)
    result = program.captured.template.fill(glued[:count])

    want = reference(*args, **kwargs)
    got_leaves, got_spec = flatten(result)
    want_leaves, want_spec = flatten(want)
    assert got_spec == want_spec
    torch.testing.assert_close(
        [x for x in got_leaves if isinstance(x, Tensor)],
        [x for x in want_leaves if isinstance(x, Tensor)],
        **(close or {}),
    )
    assert [x for x in got_leaves if not isinstance(x, Tensor)] == [
        x for x in want_leaves if not isinstance(x, Tensor)
    ]
    for origin, index in program.captured.writes:
        state = getattr(reference.get_submodule(origin.module), origin.name)
        torch.testing.assert_close(glued[index].detach(), state.detach())
    if gradients:
        results = locals_, placements, want_leaves, glued
        _assert_gradients(program, reference, given, copies, inputs, *results, close or {})
    return program


def _assert_gradients(
    program: Lowered,
    reference: Any,
    given: list[Tensor],
    copies: list[list[Tensor]],
    inputs: list[Placement],
    locals_: list[Locals],
    placements: Sequence[Placement],
    want_leaves: list[Any],
    glued: list[Tensor],
    close: dict[str, float],
) -> None:
    """Against random cotangents. A replicated result is a result of every rank; a split one is one
    DTensor, whose gradient comes in once."""
    n = program.n
    distinct = {id(t): k for k, t in enumerate(program.captured.template.tensors)}
    leaves = program.captured.template.leaves
    wanted = [
        (distinct[id(old)], new)
        for old, new in zip(leaves, want_leaves, strict=True)
        if isinstance(new, Tensor) and new.requires_grad
    ]
    for index, new in wanted:
        assert glued[index].requires_grad, f"result {index} lost its gradient"
        assert glued[index].dtype == new.dtype
    if not wanted:
        return
    generator = torch.Generator().manual_seed(5)
    split: Any = 0.0
    whole: Any = 0.0
    for index, new in wanted:
        weight = torch.randn(new.shape, generator=generator, dtype=torch.float64)
        sharded = isinstance(placements[index], Shard)
        parts = [glued[index]] if sharded else locals_[index]
        split = split + sum(_dot(part, weight) for part in parts)
        whole = whole + _dot(new, weight)
    # What a parameter or constant holds after backward is summed over ranks here: n times the mean.
    names, own, theirs = _trained(program, reference)
    asked = [k for k, x in enumerate(given) if x.requires_grad]
    flat_copies = [x for k in asked for x in copies[k]]
    got = torch.autograd.grad(split, [*own, *flat_copies], allow_unused=True)
    want = torch.autograd.grad(whole, [*theirs, *(given[k] for k in asked)], allow_unused=True)
    for name, a, b, x in zip(names, got, want, own, strict=False):
        a, b = (torch.zeros_like(x) if g is None else g for g in (a, b))
        torch.testing.assert_close(
            a / n, b, msg=lambda m, name=name: f"gradient of {name}: {m}", **close
        )
    for j, k in enumerate(asked):  # every rank holds the true gradient of what it was given
        true = want[len(own) + j]
        parts = cut(torch.zeros_like(given[k]) if true is None else true, inputs[k], n)
        for rank, b in enumerate(parts):
            a = got[len(own) + j * n + rank]
            torch.testing.assert_close(
                torch.zeros_like(b) if a is None else a,
                b,
                msg=lambda m, k=k, rank=rank: f"gradient of input {k} on rank {rank}: {m}",
            )


def _dot(value: Tensor, weight: Tensor) -> Tensor:
    if value.is_complex():
        return (torch.view_as_real(value) * weight[..., None]).sum()
    return (value.double() * weight).sum()


def _trained(program: Lowered, reference: Any) -> tuple[list[str], list[Tensor], list[Tensor]]:
    if program.live is None:
        consts = {k: c for k, c in program.captured.consts.items() if c.requires_grad}
        return list(consts), list(consts.values()), list(consts.values())
    own = {k: p for k, p in program.live.named_parameters() if p.requires_grad}
    theirs = dict(reference.named_parameters())
    return list(own), list(own.values()), [theirs[name] for name in own]
