"""Groups of heads take turns: two are there at a time, and exchanges begin as soon as they can."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from autosp_dtensor.checkpoint.chains import Chain
from autosp_dtensor.checkpoint.kinds import is_attention
from autosp_dtensor.checkpoint.tiling import contract, sort_graph
from autosp_dtensor.graph import facts, short_name
from autosp_dtensor.lower import Region, Step, schedule
from autosp_dtensor.lower.schedule import is_exchange
from tests import simulate
from tests.checkpoint.stacked import Stacked
from tests.place.test_head_groups import (
    IDS,
    WIDTH,
    Layer,
    gqa,
    norm_of_heads,
    plain,
    sharing,
)
from tests.run.test_codegen import assert_ranks_give_the_whole
from tests.simulate import lowered

BODIES = {each.__name__: each for each in (plain, gqa, norm_of_heads, sharing)}


def model(body: Any) -> Stacked:
    return Stacked(lambda: Layer(body), WIDTH)


def region_of(body: Any, n: int) -> Region:
    program = lowered(model(body), (IDS,), n, tile=64)
    return program.root.calls[0].region


def places(order: list[Step]) -> dict[tuple[int, int], tuple[int, int]]:
    """When a turn's first operation runs, and its attention."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for at, (kind, node) in enumerate(order):
        turn = facts(node).turn
        if turn is not None and kind != "finish" and not is_exchange(node):
            begin, attention = found.get(turn, (at, at))
            found[turn] = begin, at if is_attention(node) else attention
    return found


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("body", BODIES)
def test_a_group_begins_behind_the_attention_of_the_one_before_the_last(body: str, n: int) -> None:
    found = places(schedule(region_of(BODIES[body], n).graph))
    assert {group for _, group in found} == {*range(8 // n)}
    for (number, group), (begin, _) in found.items():
        if group >= 2:
            assert begin > found[number, group - 2][1]
        if group >= 1 and n > 1:
            assert begin < found[number, group - 1][1], (
                "while the last one's exchange is on its way"
            )


@pytest.mark.parametrize("body", BODIES)
def test_exchanges_begin_before_the_attention_that_comes_next(body: str) -> None:
    order = schedule(region_of(BODIES[body], 2).graph)
    found = places(order)
    begun: dict[tuple[int, int], list[int]] = {turn: [] for turn in found}
    for at, (kind, node) in enumerate(order):
        turn = facts(node).turn
        if turn is not None and kind != "finish" and is_exchange(node):
            begun[turn].append(at)
    for (number, group), (begin, attention) in found.items():
        *there, back = begun[number, group]
        assert there and begin < there[0] and there[-1] < attention < back
        if (number, group + 1) in found:
            assert back < found[number, group + 1][1]
        if (number, group + 2) in found:
            assert begun[number, group + 1][-2] < found[number, group + 2][0]


@pytest.mark.parametrize("body", BODIES)
def test_exchanges_of_groups_are_apart(body: str) -> None:
    """Queries, keys and values of one group are one exchange; of two, two."""
    for node in region_of(BODIES[body], 2).graph.nodes:
        if is_exchange(node):
            assert len({facts(each).turn for each in node.all_input_nodes}) == 1


class Packed(nn.Module):
    """Queries, keys and values of one product: made whole, and cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 8, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def test_exchanges_of_what_is_there_already_wait_for_their_turn() -> None:
    program = lowered(Stacked(Packed, WIDTH), (IDS,), 2, tile=64)
    order = schedule(program.root.calls[0].region.graph)
    first = next(at for at, (_, node) in enumerate(order) if is_attention(node))
    early = {facts(node).turn for kind, node in order[:first] if is_exchange(node)}
    assert early == {(0, 0), (0, 1)}


def merged(region: Region, early: int, late: int) -> None:
    """Norms of two groups' queries become one tile: the early group needs what the late one has."""
    norms = [n for n in region.graph.nodes if short_name(n.target) == "rms_norm"]
    chosen = tuple(n for n in norms if facts(n).turn in ((0, early), (0, late)))
    inputs = tuple(dict.fromkeys(x for n in chosen for x in n.all_input_nodes))
    assert len(chosen) == 2
    contract(region.graph, Chain(chosen, inputs, chosen, 1, 1), 2)
    sort_graph(region.graph)


@pytest.fixture(params=[(0, 2), (0, 3), (1, 3), (2, 3)], ids=str)
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    def tile_free(root: Region, *_: Any, **__: Any) -> None:
        for region in dict.fromkeys(call.region for call in root.calls):
            merged(region, *request.param)

    monkeypatch.setattr(simulate, "tile_free", tile_free)
    return request.param


def test_groups_that_need_each_other_wait_for_nothing(tiled: tuple[int, int]) -> None:
    """The later group's queries run before its turn; all runs once, after what it takes."""
    graph = region_of(norm_of_heads, 2).graph
    order = schedule(graph)
    done = {node for node in graph.nodes if node.op == "placeholder"}
    for kind, node in order:
        assert kind == "finish" or {*node.all_input_nodes} <= done
        if kind != "start":
            assert node not in done
            done.add(node)
    assert {node for node in graph.nodes if node.op != "output"} == done
    early, late = tiled
    found = places(order)
    assert found[0, late][0] < found[0, early][1]


def test_they_give_the_values_of_the_whole(tiled: tuple[int, int]) -> None:
    """On two threads, whose exchanges have to meet, forward and backward."""
    ran = assert_ranks_give_the_whole(model(norm_of_heads), (IDS,), 2, tile=64)
    assert sum(short_name(node.target) == "tiles x2" for node in ran.program.nodes()) == 2


@pytest.mark.parametrize("n", [1, 2, 4])
def test_generated_code_of_groups_gives_the_whole(n: int) -> None:
    ran = assert_ranks_give_the_whole(model(plain), (IDS,), n, tile=64)
    assert sum(is_attention(node) for node in ran.program.nodes()) == 2 * 8 // n
