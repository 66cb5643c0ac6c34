"""Token-wise operations that make wide values between narrow ones: an MLP, logits and their loss.

An operation is token-wise where its placement says so: a rule that lets it run on a rank's tokens
lets it run on some of those. Wide is what is wider than the values between modules. Nothing here
knows what a module is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..autocast import autocast_state
from ..capture.tap import Tap
from ..capture.targets import Opaque
from ..graph import facts, short_name
from ..place.attention.rule import AttentionRule
from ..place.rule import Option
from ..placement import Partial, Replicate, Shard
from .grow import grow, join
from .operands import is_part, local_bytes, operands, placements_of
from .tiled import takes_fp16

__all__ = [
    "WIDER",
    "Chain",
    "find_chains",
    "is_convex",
    "is_token_wise",
    "members_of",
    "producers",
    "takes_as_made",
    "unit_of",
    "wide_of",
]

# Values as wide as those between modules differ in bytes by a norm's statistics at most.
WIDER = 1.05
# They read a wide value and make one inside, whatever they give back.
_WIDE_INSIDE = {"cross_entropy", "log_softmax", "softmax", "logsumexp", "nll_loss"}


@dataclass(frozen=True)
class Chain:
    """Operations that can run on some tokens at a time.

    inputs: what they take; those that are sharded are taken by tokens, others whole. outputs: what
    others take of them: values by tokens, or sums over tokens. bytes: of the wide values, on the
    first rank. narrow: bytes of the outputs.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    bytes: int
    narrow: int

    @property
    def reduces(self) -> bool:
        """Whether nothing as long as the sequence and wide comes out, as of a loss."""
        return self.narrow * 64 <= self.bytes

    @property
    def sums_once(self) -> bool:
        """Whether one sum, a single number, is all that has a gradient: tiles can make that when
        they run, without a second run in backward. fp16 is scaled for its gradients, and waits.
        """
        trained = [facts(node) for node in self.outputs if facts(node).meta.requires_grad]
        if len(trained) != 1 or isinstance(trained[0].placement, Shard):
            return False
        kinds = {facts(node).meta.device.type for node in self.inputs}
        state = autocast_state(next(iter(kinds)))
        dtypes = (facts(node).meta.dtype for node in self.inputs)
        return trained[0].meta.numel == 1 and not takes_fp16(dtypes, state)


def is_token_wise(node: Node) -> tuple[int, ...] | None:
    """The tokens of each rank that an operation works on, each by itself; None: it does not."""
    known = facts(node)
    if is_part(node):
        return is_token_wise(node.all_input_nodes[0])
    if node.op != "call_function" or known.option is None or known.random:
        return None
    if isinstance(node.target, Opaque) and isinstance(node.target.func, Tap):
        return None
    option = known.option[1]
    if type(option) is not Option or known.rule is None or isinstance(known.rule, AttentionRule):
        return None  # attention costs too much to run twice
    cut = [p for p in (*option.ins, *option.outs) if type(p) is Shard]
    plain = all(type(p) in (Shard, Replicate) for p in option.ins)
    gives = all(type(p) in (Shard, Partial) for p in option.outs)
    sizes = {p.sizes for p in cut}
    if not plain or not gives or len(sizes) != 1:
        return None
    if not any(type(p) is Shard for p in option.ins):
        return None
    return next(iter(sizes))


def find_chains(
    graph: Graph,
    least: int,
    base: Callable[[Node], Node | None],
    kept: frozenset[Node] = frozenset(),
) -> Iterator[Chain]:
    """Chains whose wide values take `least` bytes or more, those of one graph apart.

    base: the operation that made the memory of a node's result. kept: what is not to join a chain.
    """
    for sizes in dict.fromkeys(s for s in map(is_token_wise, graph.nodes) if s is not None):
        members = members_of(graph, sizes)
        unit = unit_of(graph, members, sizes)
        if not unit:
            continue
        joining = members - kept
        groups = [
            _closed(group, members, unit)
            for group in _connected(wide_of(members, unit, least))
            if sum(map(_most_bytes, group)) >= least
        ]
        grown = [
            grow(nodes, joining) for nodes in groups if nodes and _chain(nodes, members, unit, base)
        ]
        for nodes in join(grown, joining):
            chain = _chain(nodes, members, unit, base)
            if chain is not None and chain.bytes >= max(least, 1):
                yield chain


def _most_bytes(node: Node) -> int:
    """No less than what it adds to a chain's bytes."""
    return local_bytes(node) + max(map(local_bytes, node.all_input_nodes), default=0)


def members_of(graph: Graph, sizes: tuple[int, ...]) -> set[Node]:
    """The operations that work on these tokens, each by itself."""
    return {node for node in graph.nodes if is_token_wise(node) == sizes}


def wide_of(members: set[Node], unit: float, least: int) -> set[Node]:
    """Those that make something wider than the values between modules, or do so inside."""
    return {node for node in members if _is_wide(node, unit, least)}


def _is_wide(node: Node, unit: float, least: int) -> bool:
    if local_bytes(node) > unit * WIDER:
        return True
    if short_name(node.target) not in _WIDE_INSIDE:
        return False
    return max(map(local_bytes, node.all_input_nodes), default=0) >= max(least, unit)


def unit_of(graph: Graph, members: set[Node], sizes: tuple[int, ...]) -> int:
    """Bytes of the values between modules: the largest that no token-wise operation made of others.

    Those are a region's inputs, other regions' results, looked-up vectors, and what exchanges give.
    """
    largest = 0
    for node in graph.nodes:
        known = facts(node)
        if node.op == "output" or not known.single or not known.placements:
            continue
        if node.users and all(user.op == "output" for user in node.users):
            continue  # a result, however wide
        placed = known.placement
        if type(placed) is not Shard or placed.sizes != sizes:
            continue
        if not known.meta.dtype.is_floating_point:
            continue
        taken = node.all_input_nodes
        made = node in members and any(_is_float_part(u) or u in members for u in taken)
        if not made:
            largest = max(largest, local_bytes(node))
    return largest


def _is_float_part(node: Node) -> bool:
    known = facts(node)
    return isinstance(known.placement, Shard) and known.meta.dtype.is_floating_point


def _connected(nodes: set[Node]) -> Iterator[set[Node]]:
    """Groups of nodes that take each other's results."""
    left = set(nodes)
    for first in sorted(nodes):
        if first not in left:
            continue
        group, todo = set(), [first]
        while todo:
            node = todo.pop()
            if node not in left:
                continue
            left.discard(node)
            group.add(node)
            todo.extend(n for n in (*node.all_input_nodes, *node.users) if n in left)
        yield group


def _closed(group: set[Node], members: set[Node], unit: float) -> set[Node]:
    """Those that make wide values and all that take these; empty where anything else takes one."""
    nodes = set(group)
    for node in group:
        if local_bytes(node) > unit * WIDER:
            if any(user not in members for user in node.users):
                return set()
            nodes.update(node.users)
    return nodes | _between(nodes)


def _chain(
    nodes: set[Node], members: set[Node], unit: float, base: Callable[[Node], Node | None]
) -> Chain | None:
    """A chain, if it pays: what comes out is less than half of what is wide inside."""
    if not nodes | _between(nodes) <= members:
        return None
    if not all(takes_as_made(node, nodes) for node in nodes):
        return None
    order = tuple(sorted(nodes))
    inputs = dict.fromkeys(u for n in order for u in n.all_input_nodes if u not in nodes)
    outputs = tuple(n for n in order if any(user not in nodes for user in n.users))
    made = {base(n) for n in nodes if local_bytes(n) > unit * WIDER} & nodes
    inside = sum(map(local_bytes, (n for n in made if n is not None)))
    inside += sum(
        max(map(local_bytes, n.all_input_nodes))
        for n in nodes
        if short_name(n.target) in _WIDE_INSIDE
    )
    narrow = sum(map(local_bytes, outputs))
    if not outputs or narrow * 2 > inside or not all(facts(n).single for n in outputs):
        return None
    return Chain(order, tuple(inputs), outputs, inside, narrow)


def takes_as_made(node: Node, nodes: set[Node]) -> bool:
    """Whether a node takes others of a chain by tokens, as they are made."""
    if is_part(node):
        return node.all_input_nodes[0] in nodes
    return all(
        facts(each).placement == placed
        for each, placed in zip(operands(node), placements_of(node), strict=True)
        if each is not None and each in nodes
    )


def is_convex(chain: Chain) -> bool:
    """Whether nothing outside stands between its operations, as others may have put it there."""
    return not _between(set(chain.nodes))


def _between(nodes: set[Node]) -> set[Node]:
    """What is not among the nodes, but takes from them and is taken by them."""
    after = _reached(nodes, lambda n: n.users)
    before = _reached(nodes, lambda n: n.all_input_nodes)
    return (after & before) - nodes


def producers(nodes: Iterable[Node], within: set[Node]) -> set[Node]:
    """The nodes and all within a set that they are made of."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(n for n in node.all_input_nodes if n in within)
    return found


def _reached(nodes: set[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found: set[Node] = set()
    todo = [n for node in nodes for n in step(node)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(step(node))
    return found
