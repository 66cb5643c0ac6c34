"""The lowered graph: one for all ranks, checked, with the gradients of one device at its border."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosp_dtensor as autosp
from autosp_dtensor.api import forward_of
from autosp_dtensor.graph import facts
from autosp_dtensor.lower import Collective
from autosp_dtensor.place.attention import heads
from autosp_dtensor.place.rule import Local, Slot
from autosp_dtensor.place.rules import along, views
from autosp_dtensor.place.table import _BY_NAME
from autosp_dtensor.placement import Partial, PerRank, Replicate, Shard
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.run.fake_group import fake_mesh
from tests.simulate import Lowered, Ranks, assert_program_equals_whole, lowered

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def table() -> Tensor:
    drawn = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.requires_grad_()


# -- one graph for all ranks -----------------------------------------------------------------------


def _text(rank: int, n: int, model: nn.Module, *args: Any) -> str:
    with fake_mesh(n, rank=rank) as mesh:
        autosp.parallelize(model, mesh, check_ranks=False)
        try:
            model(*args)
            return forward_of(model).last.text()
        finally:
            del model.__dict__["forward"]


@pytest.mark.parametrize("n", [2, 3])
def test_program_prints_the_same_on_every_rank(n: int) -> None:
    model = ModelT(TConfig(layers=2))
    ids = ids_of_t(2, 13)
    texts = [_text(rank, n, model, ids, ids) for rank in range(n)]
    assert texts == [texts[0]] * n
    assert "all_to_all" in texts[0] and " at 0x" not in texts[0]


def test_program_of_another_length_prints_differently() -> None:
    model = ModelT(TConfig(layers=1))
    assert _text(0, 2, model, ids_of_t(2, 12)) != _text(0, 2, model, ids_of_t(2, 14))


def test_sizes_that_differ_by_rank_are_listed_for_all(table: Tensor) -> None:
    program = lowered(lambda ids: F.embedding(ids, table)[:, 1:8].flatten(0, 1), (IDS,), 3)
    (flatten,) = program.named("reshape")
    assert flatten.args[1][0] == PerRank((6, 8, 0))
    (cut,) = [node for node in program.named("getitem") if isinstance(node.args[1], tuple)]
    assert cut.args[1][1] == slice(PerRank((1, 0, 0)), PerRank((4, 4, 0)), 1)


def test_equal_sizes_are_plain_numbers(table: Tensor) -> None:
    program = lowered(lambda ids: F.embedding(ids, table).flatten(0, 1), (IDS,), 3)
    (flatten,) = program.named("reshape")
    assert flatten.args[1] == (8, 8)


def test_one_rank_has_no_collective_and_no_slice() -> None:
    ids = ids_of_t(2, 13)
    program = assert_program_equals_whole(ModelT(TConfig(layers=1)), (ids, ids), 1)
    assert not any(isinstance(node.target, Collective) for node in program.nodes())


# -- gradients at the border -----------------------------------------------------------------------


def _border(program: Lowered) -> list[tuple[str, float]]:
    return [
        (node.target.kind, node.target.factor)
        for node in program.nodes()
        if isinstance(node.target, Collective) and node.target.kind in ("scale_grad", "mean_grad")
    ]


def test_split_result_multiplies_its_gradient_by_n(table: Tensor) -> None:
    program = assert_program_equals_whole(lambda ids: F.embedding(ids, table) * 2, (IDS,), 3)
    assert _border(program) == [("scale_grad", 3.0)]


def test_whole_result_does_not(table: Tensor) -> None:
    program = assert_program_equals_whole(lambda ids: F.embedding(ids, table).sum(), (IDS,), 3)
    assert _border(program) == []


def test_result_without_gradient_does_not(table: Tensor) -> None:
    program = assert_program_equals_whole(
        lambda ids: F.embedding(ids, table).detach() * 2, (IDS,), 3
    )
    assert _border(program) == []


def test_input_that_asks_for_a_gradient_gets_the_mean_of_all_ranks() -> None:
    x = torch.randn(2, 12, 8, dtype=torch.float64, requires_grad=True)
    program = assert_program_equals_whole(lambda x: x.softmax(-1).sum(), (x,), 3)
    assert _border(program) == [("mean_grad", 3)]


def test_input_without_gradient_has_no_border() -> None:
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    assert _border(lowered(lambda x: x.softmax(-1).sum(), (x,), 3)) == []


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _parts(n: int) -> dict[str, Any]:
    """q, k and v as DTensors, split along the sequence."""
    sizes = tuple(13 // n + (r < 13 % n) for r in range(n))
    args = tuple(torch.randn(2, 13, 4, 6, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    return {"args": args, "n": n, "sharded": {k: Shard(1, sizes) for k in range(3)}}


@pytest.mark.parametrize("n", [2, 3])
def test_factors_of_attention_alone_on_dtensors_cancel(n: int) -> None:
    assert _border(assert_program_equals_whole(_attention, **_parts(n))) == []


def test_factors_stay_where_something_else_gets_a_gradient_or_gives_one() -> None:
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    given = _parts(3)
    each = [("scale_grad", 1 / 3)] * 3

    def with_weight(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v) * weight

    def with_loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = _attention(q, k, v)
        return out, out.sum()

    def loss_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v).sum()

    for call in (with_weight, with_loss):
        border = _border(assert_program_equals_whole(call, **given))
        assert sorted(border) == [*each, ("scale_grad", 3.0)]
    assert _border(assert_program_equals_whole(loss_alone, **given)) == each
    whole = given | {"sharded": {0: given["sharded"][0], 1: given["sharded"][1]}}
    border = _border(assert_program_equals_whole(_attention, **whole))
    assert sorted(border) == [("mean_grad", 3), *each[:2], ("scale_grad", 3.0)]


# -- the check -------------------------------------------------------------------------------------


def test_rewrite_that_forgets_to_localize_a_size_is_caught(
    table: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole_size(self: Any, op: Any, option: Any) -> Local:
        return Local(torch.reshape, (Slot(0), op.outs[0].shape))

    def call(ids: Tensor) -> Tensor:
        return F.embedding(ids, table).flatten(0, 1)

    assert_program_equals_whole(call, (IDS,), 2)
    monkeypatch.setattr(views.ReshapeRule, "localize", whole_size)
    with pytest.raises((AssertionError, RuntimeError), match=r"shape|size"):
        lowered(call, (IDS,), 2)


def test_rewrite_to_a_wrong_shape_is_caught_with_the_line(
    table: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_row_less(op: Any, option: Any) -> Local:
        return Local(lambda x: F.rms_norm(x, (8,))[:, 1:], (Slot(0),))

    monkeypatch.setattr(_BY_NAME["rms_norm"], "_localize", one_row_less)

    def call(ids: Tensor) -> Tensor:
        return F.rms_norm(F.embedding(ids, table), (8,))

    with pytest.raises(AssertionError) as caught:
        lowered(call, (IDS,), 2)
    line = call.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"test_graph.py:{line}: local <lambda> gives (2, 5, 8) torch.float64 on rank 0, the "
        "placement S(1:6) of f64[2, 12, 8] says (2, 6, 8)"
    )


def test_rewrite_to_another_dtype_is_caught(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def single(op: Any, option: Any) -> Local:
        return Local(lambda x: F.rms_norm(x.float(), (8,)), (Slot(0),))

    monkeypatch.setattr(_BY_NAME["rms_norm"], "_localize", single)
    with pytest.raises(AssertionError, match=r"torch\.float32 on rank 0"):
        lowered(lambda ids: F.rms_norm(F.embedding(ids, table), (8,)), (IDS,), 2)


def test_rewrite_that_is_wrong_on_the_last_rank_alone_is_caught(
    table: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_less(op: Any, option: Any) -> Local:
        return Local(lambda x, k: F.rms_norm(x, (8,))[:, k:], (Slot(0), PerRank((0, 0, 1))))

    monkeypatch.setattr(_BY_NAME["rms_norm"], "_localize", last_less)
    with pytest.raises(AssertionError, match="on rank 2"):
        lowered(lambda ids: F.rms_norm(F.embedding(ids, table), (8,)), (IDS,), 3)


def test_simulation_sees_a_rule_that_claims_too_much(
    table: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes are right, numbers are not: what the check cannot see, these tests do."""
    monkeypatch.setitem(_BY_NAME, "cumsum", along.along(9, -1))
    with pytest.raises(AssertionError, match="not close"):
        assert_program_equals_whole(
            lambda ids: F.embedding(ids, table).cumsum(-2), (IDS,), 2, gradients=False
        )


def test_simulation_sees_a_wrong_gradient(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(self: Any, op: Any, form: Any, option: Any) -> Local:
        return Local(lambda *t: F.scaled_dot_product_attention(t[0].detach(), *t[1:]),
                     tuple(Slot(k) for k in range(3)))  # fmt: skip

    def call(ids: Tensor) -> Tensor:
        x = F.embedding(ids, table).unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x * 2, x)

    assert_program_equals_whole(call, (IDS,), 2)
    monkeypatch.setattr(heads.Heads, "localize", detached)
    with pytest.raises(AssertionError, match="gradient of const_0"):
        assert_program_equals_whole(call, (IDS,), 2)


# -- random numbers --------------------------------------------------------------------------------


def _drawn(call: Any, n: int, seed: int) -> list[Tensor]:
    program = lowered(call, (IDS,), n)
    (parts,) = Ranks(n, program.state, seed).run(program.root, [[IDS] * n])
    return parts


def test_tokens_of_different_ranks_are_dropped_independently(table: Tensor) -> None:
    first, second = _drawn(lambda ids: F.dropout(F.embedding(ids, table) ** 0, 0.5), 2, seed=7)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)


def test_values_on_every_rank_are_drawn_alike(table: Tensor) -> None:
    parts = _drawn(
        lambda ids: torch.rand(4) + F.embedding(ids, table).detach().sum() * 0, 3, seed=7
    )
    assert all(torch.equal(part, parts[0]) for part in parts)


def test_calls_with_another_seed_draw_anew_and_with_the_same_seed_alike(table: Tensor) -> None:
    def call(ids: Tensor) -> Tensor:
        return F.dropout(F.embedding(ids, table) ** 0, 0.5)

    first, again, other = (_drawn(call, 2, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_two_draws_of_one_call_differ(table: Tensor) -> None:
    def call(ids: Tensor) -> Tensor:
        x = F.embedding(ids, table) ** 0
        return torch.stack([F.dropout(x, 0.5), F.dropout(x, 0.5)])

    for part in _drawn(call, 2, 1):
        assert not torch.equal(part[0], part[1])


def test_the_users_generator_is_left_alone(table: Tensor) -> None:
    state = torch.get_rng_state()
    _drawn(lambda ids: F.dropout(F.embedding(ids, table), 0.5), 2, 1)
    assert torch.equal(torch.get_rng_state(), state)


# -- exchanges -------------------------------------------------------------------------------------


def test_exchanges_that_feed_one_operation_are_one(table: Tensor) -> None:
    def call(ids: Tensor) -> Tensor:
        x = F.embedding(ids, table).unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x * 2, x.exp())

    program = assert_program_equals_whole(call, (IDS,), 4)
    exchanges = [moves for kind, moves in program.collectives() if kind == "all_to_all"]
    assert [len(moves) for moves in exchanges] == [3, 1]  # there, and the result back to tokens


def test_exchange_that_two_operations_share_is_made_once(table: Tensor) -> None:
    def call(ids: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(ids[:1], table)
        return x.cumsum(1).sum(), x.cummax(1).values.sum()

    program = assert_program_equals_whole(call, (IDS,), 4)
    assert program.kinds().count("all_to_all") == 1


def test_partial_sums_are_added_once(table: Tensor) -> None:
    def call(ids: Tensor) -> tuple[Tensor, Tensor]:
        total = F.embedding(ids, table).sum((0, 1))
        return total * 2, total.exp()

    program = assert_program_equals_whole(call, (IDS,), 3)
    assert program.collectives() == [("all_reduce", ((Partial(), Replicate()),))]


def test_result_is_in_the_chunks_of_torch() -> None:
    """A DTensor can say no other: 7 tokens on 3 ranks are 3, 3, 1."""
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    program = assert_program_equals_whole(lambda x: x.softmax(-1), (x,), 3)
    output = next(node for node in program.flat.nodes if node.op == "output")
    assert facts(output).placements == (Shard(1, (3, 3, 1)),)
