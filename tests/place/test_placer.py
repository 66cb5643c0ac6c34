"""Which collectives a program makes, and where its values are: asserted exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.errors import PlacementError
from autosp_dtensor.graph import describe, facts
from autosp_dtensor.placement import Cover, Partial, Replicate, Shard, chunk_sizes
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.simulate import Lowered, assert_program_equals_whole, lowered

R, P = Replicate(), Partial()
LOSS = ("all_reduce", ((P, R),))


def one_layer(n: int, length: int = 16, **config: Any) -> Lowered:
    ids = ids_of_t(2, length)
    return assert_program_equals_whole(ModelT(TConfig(layers=1, **config)), (ids, ids), n)


def there(n: int, *heads: int, dim: int = 2) -> tuple[str, Any]:
    """One exchange of several tensors, from 16 tokens to heads."""
    each = Shard(dim, (16 // n,) * n)
    return "all_to_all", tuple((each, Shard(1, (h // n,) * n)) for h in heads)


def back(n: int) -> tuple[str, Any]:
    """[B, S, heads * head size] from heads to tokens."""
    return "all_to_all", ((Shard(2, (32 // n,) * n), Shard(1, (16 // n,) * n)),)


@pytest.mark.parametrize("attention", ["sdpa", "tril"])
def test_block_with_sdpa_makes_two_exchanges(attention: str) -> None:
    """q, k and v travel together, k and v with the few heads that they have."""
    program = one_layer(2, attention=(attention,))
    assert program.collectives() == [there(2, 4, 2, 2), back(2), LOSS]


def test_heads_of_keys_go_to_the_ranks_that_read_them() -> None:
    program = one_layer(4)
    keys = Cover(1, (1, 1, 1, 1), starts=(0, 0, 1, 1), whole=2)
    tokens = Shard(2, (4,) * 4)
    exchange = ((tokens, Shard(1, (1,) * 4)), (tokens, keys), (tokens, keys))
    assert program.collectives() == [("all_to_all", exchange), back(4), LOSS]


@pytest.mark.parametrize("n", [2, 4])
def test_block_with_attention_by_hand_makes_two_exchanges(n: int) -> None:
    """Key heads that the model repeats are sent once, as with a kernel."""
    program = one_layer(n, attention=("matmul",))
    assert program.collectives() == one_layer(n, attention=("sdpa",)).collectives()


@pytest.mark.parametrize("n", [2, 4])
def test_block_with_a_window_by_hand_makes_no_gather(n: int) -> None:
    """Scores, softmax and the product with the values are local on heads."""
    program = one_layer(n, attention=("matmul",), window=5)
    assert set(program.kinds()) == {"all_to_all", "all_reduce"}
    moved = [move for kind, moves in program.collectives() for move in moves if kind != LOSS[0]]
    assert len(moved) == 4  # q, k, v, and the output


@pytest.mark.parametrize("attention", ["sdpa", "matmul", "einsum", "tril"])
@pytest.mark.parametrize(("n", "length"), [(2, 13), (3, 16), (4, 7), (3, 3), (5, 11)])
def test_lengths_and_heads_need_not_divide(attention: str, n: int, length: int) -> None:
    program = one_layer(n, length, attention=(attention,))
    assert ("all_gather" in program.kinds()) == (n > 4)  # only with more ranks than heads


@pytest.mark.parametrize("config", [{"window": 5}, {"qk_norm": "head"}, {"qk_norm": "hidden"}])
@pytest.mark.parametrize("n", [2, 3])
def test_variants_of_the_block_gather_nothing(config: dict[str, Any], n: int) -> None:
    assert "all_gather" not in one_layer(n, **config).kinds()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_blocks_do_the_same_one_after_another(n: int) -> None:
    ids = ids_of_t(2, 16)
    program = assert_program_equals_whole(ModelT(TConfig(layers=3)), (ids, ids), n)
    if n == 1:
        assert program.kinds() == []
        return
    assert program.kinds() == ["all_to_all"] * 6 + ["all_reduce"]
    attention = program.collectives()
    assert attention[:2] == attention[2:4] == attention[4:6]


# -- what is computed where ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("positions", ["rotary", "ntk", "mrope", "learned"])
def test_tables_of_positions_are_computed_for_this_rank_alone(positions: str, n: int) -> None:
    """Rotary cos and sin are floats of every token; no rank makes those of all."""
    length, kwargs = 16, {}
    ids = ids_of_t(2, length)
    if positions == "mrope":
        kwargs = {"position_ids": torch.arange(length).expand(3, 2, length)}
    model = ModelT(TConfig(layers=2, positions=positions))
    program = assert_program_equals_whole(model, (ids, ids), n, **kwargs)
    whole = [
        f"{node.name} {describe(known.meta, known.placement)}"
        for node in program.nodes()
        for known in [facts(node)]
        if known.meta.dtype.is_floating_point
        and length in known.meta.shape
        and not isinstance(known.placement, Shard)
    ]
    assert whole == []


class Table(nn.Module):
    """A table of cos and sin kept in a buffer and cut to the length, as GPT-J and others do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
        angles = torch.arange(32.0, dtype=torch.float64)[:, None] * torch.rand(8).double()
        self.register_buffer("cos", angles.cos())

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.cos[: ids.shape[1]]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_table_in_a_buffer_is_cut_where_it_is_used(n: int) -> None:
    program = assert_program_equals_whole(Table(), (torch.arange(13)[None] % 16,), n)
    assert program.kinds() == []


def _embed(*args: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(16, 8, dtype=torch.float64)


IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))

# What a function of embedded tokens [1, 12@sp, 8] sends, on 2 and on 3 ranks.
SENDS: dict[str, tuple[Any, list[str]]] = {
    "nothing for a norm": (lambda x: F.rms_norm(x, (8,)), []),
    "nothing for the start of a sequence": (lambda x: x[:, :6].square(), []),
    "nothing for every other token": (lambda x: x[:, ::2].square(), []),
    "nothing for a new dim": (lambda x: x[:, None].expand(-1, 3, -1, -1), []),
    "nothing for a matmul with weights": (lambda x: x @ torch.ones(8, 4).double(), []),
    "nothing to flatten tokens": (lambda x: x.flatten(0, 1).softmax(-1).unflatten(0, (1, 12)), []),
    "nothing to split heads": (lambda x: x.unflatten(-1, (4, 2)).transpose(1, 2).exp(), []),
    "nothing for a mask of ids": (lambda x: x * torch.arange(12).double()[None, :, None], []),
    "a sum for a mean over tokens": (lambda x: x.mean(1), ["all_reduce"]),
    "a sum for one token": (lambda x: x[:, -1], ["all_reduce"]),
    "a sum for a total": (lambda x: x.sum(), ["all_reduce"]),
    "a sum for a norm of all": (lambda x: x.square().sum().sqrt(), ["all_reduce"]),
    "an exchange for a cumulative sum": (lambda x: x.cumsum(1).sum(), ["all_to_all", "all_reduce"]),
    "a result that goes back to tokens": (lambda x: x.cumsum(1), ["all_to_all", "all_to_all"]),
    "an exchange there and back": (
        lambda x: F.rms_norm(x.cumsum(1), (8,)),
        ["all_to_all", "all_to_all"],
    ),
    "an exchange for a shift": (
        lambda x: F.rms_norm(x + F.pad(x, (0, 0, 1, 0))[:, :-1], (8,)),
        ["all_to_all", "all_to_all"],
    ),
    "an exchange for a causal convolution": (
        lambda x: F.conv1d(F.pad(x.mT, (2, 0)), torch.ones(8, 1, 3).double(), groups=8).mT,
        ["all_to_all"],
    ),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", SENDS)
def test_what_is_sent(name: str, n: int) -> None:
    embedding = _embed()
    call, kinds = SENDS[name]
    program = assert_program_equals_whole(lambda ids: call(embedding(ids)), (IDS[:1],), n)
    assert [kind for kind in program.kinds() if kind != "relayout"] == kinds
    if "nothing" not in name:
        return
    # The result of a slice is asked for in chunks of its own, by a move of rows at the very end.
    assert program.kinds() == kinds or "start" in name or "other" in name


def test_chunks_of_a_slice_are_made_where_the_result_is_given_back() -> None:
    embedding = _embed()
    program = assert_program_equals_whole(lambda ids: embedding(ids)[:, :6], (IDS,), 2)
    assert program.collectives() == [("relayout", ((Shard(1, (6, 0)), Shard(1, (3, 3))),))]


def test_integers_stay_whole() -> None:
    """Ids, labels, positions and masks are on every rank: a shift of labels needs no halo."""
    ids = ids_of_t(2, 16)
    program = lowered(ModelT(TConfig(layers=1, window=5)), (ids, ids), 2)
    for node in program.nodes():
        known = facts(node)
        if known.meta.dtype in (torch.int64, torch.bool) and node.target is not None:
            users = {facts(user).meta.dtype for user in node.users if user.op != "output"}
            if isinstance(known.placement, Shard):  # cut only where tokens become vectors
                assert users and all(kind.is_floating_point for kind in users), node.format_node()


def test_loss_adds_terms_and_divides_by_a_global_count() -> None:
    embedding = _embed()
    labels = IDS % 8
    labels[0, :9] = -100

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(embedding(ids).flatten(0, 1), labels.flatten())

    program = assert_program_equals_whole(loss, (IDS, labels), 3)
    assert program.collectives() == [LOSS]
    (node,) = program.named("cross_entropy")
    assert node.kwargs["reduction"] == "sum"


def test_rank_without_a_target_does_not_spoil_the_loss() -> None:
    embedding = _embed()
    labels = torch.full_like(IDS, -100)
    labels[:, :2] = 1

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(embedding(ids).flatten(0, 1), labels.flatten())

    assert_program_equals_whole(loss, (IDS, labels), 4)


POOLED = {
    "largest": lambda x, ids: x.max(1).values,
    "mean": lambda x, ids: x.mean(1),
    "last of each row": lambda x, ids: x[torch.arange(len(x)), (ids != 0).int().argmax(-1)],
    "products of features": lambda x, ids: x.mT @ x,
}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("pool", POOLED)
def test_result_without_the_sequence_is_whole_on_every_rank(pool: str, n: int) -> None:
    """However the batch or the features were split for it. What has the sequence stays split."""

    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.score = _embed(), nn.Linear(8, 5, dtype=torch.float64)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embedding(ids)
            return self.score(POOLED[pool](x, ids)), self.score(x)

    ids = torch.randint(16, (4, 16), generator=torch.Generator().manual_seed(3))
    program = assert_program_equals_whole(Classes(), (ids,), n)
    output = next(node for node in program.placed.nodes if node.op == "output")
    assert facts(output).placements == (R, Shard(1, (16 // n,) * n))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sequence_dim_may_come_first(n: int) -> None:
    embedding = _embed()
    program = assert_program_equals_whole(
        lambda ids: embedding(ids).softmax(-1).mean(0), (IDS.T.contiguous(),), n, seq_dim=0
    )
    assert program.kinds() == ["all_reduce"]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_input_of_floats_is_cut_where_it_comes_in(n: int) -> None:
    x = torch.randn(2, 12, 8, dtype=torch.float64, requires_grad=True)
    program = assert_program_equals_whole(lambda x: (x * 2).softmax(-1), (x,), n)
    assert program.kinds() == []
    assert all(isinstance(facts(node).placement, Shard) for node in program.named("softmax"))


@pytest.mark.parametrize("n", [2, 3])
def test_input_of_floats_used_in_several_ways_has_its_true_gradient(n: int) -> None:
    x = torch.randn(2, 12, 8, dtype=torch.float64, requires_grad=True)
    y = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.cumsum(1) * y + x, x.mean((0, 1)) + y

    assert_program_equals_whole(call, (x, y), n)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_input_that_comes_split_is_taken_as_it_is(n: int) -> None:
    """A loss on logits that a parallelized model gave: no part of it is made whole."""
    logits = torch.randn(2, 13, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(8, (2, 13))
    labels[0, :9] = -100
    chunks = Shard(1, chunk_sizes(13, n))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    program = assert_program_equals_whole(loss, (logits, labels), n, sharded={0: chunks})
    assert program.collectives() == ([LOSS] if n > 1 else [])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_input_may_come_split_on_any_dim(n: int, dim: int) -> None:
    x = torch.randn(4, 13, 7, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 13, 7, dtype=torch.float64, requires_grad=True)
    chunks = Shard(dim, chunk_sizes(x.shape[dim], n))

    def call(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x * y).cumsum(1), x.softmax(-1).mean((0, 1)), x[:, -1]

    assert_program_equals_whole(call, (x, y), n, sharded={0: chunks})
    assert_program_equals_whole(call, (x, y), n, sharded={1: chunks})


# -- refusing --------------------------------------------------------------------------------------


def test_operation_without_a_rule_is_refused_with_this_text() -> None:
    embedding = _embed()

    def counts(ids: Tensor) -> Tensor:
        return torch.histc(embedding(ids), 4)

    with pytest.raises(PlacementError) as refused:
        lowered(counts, (IDS,), 2)
    line = counts.__code__.co_firstlineno + 1
    assert str(refused.value) == (
        "torch.histc has no rule for a value split over mesh axis 'sp' (size 2).\n"
        f"  node  test_placer.py:{line}, histc\n"
        "  have  arg 0 f64[2, 12@sp, 8]\n"
        "  why   each rank holds a part of the sequence, and it is not known whether the operation "
        "reads across parts\n"
        '  fix   register one: autosp.register_rule(torch.histc, "a b c -> ..."), with [] around '
        "dims that it reads whole"
    )


def test_all_operations_without_a_rule_are_named_at_once() -> None:
    embedding = _embed()

    def edges(ids: Tensor) -> tuple[Tensor, Tensor]:
        x = embedding(ids)
        return torch.histc(x, 4), torch.renorm(x, 2, 1, 1.0)

    with pytest.raises(PlacementError) as refused:
        lowered(edges, (IDS,), 2)
    assert "histc" in str(refused.value)
    line = edges.__code__.co_firstlineno + 2
    assert f"        also  renorm at test_placer.py:{line}" in str(refused.value).split("\n")


def test_operation_without_a_rule_runs_on_one_rank_and_on_whole_values() -> None:
    embedding = _embed()
    assert_program_equals_whole(lambda ids: torch.histc(embedding(ids).detach(), 4), (IDS,), 1)
    ids = IDS.double()
    program = assert_program_equals_whole(lambda ids: torch.histc(ids, 4), (ids,), 2)
    assert program.kinds() == []


@pytest.mark.parametrize("path", ["blocks.0", "blocks.0.attention", "blocks.1.attention.q"])
def test_hooks_move_nothing_on_uneven_parts(path: str) -> None:
    """Between two hooks it stays known where the sequence dim is: 13 tokens on 4 ranks."""
    ids = ids_of_t(2, 13)
    want = lowered(ModelT(), (), 4, ids=ids, labels=ids).kinds()
    model = ModelT()
    for module in (model.get_submodule(path), model.blocks[1]):
        module.register_forward_pre_hook(lambda m, a: None)
        module.register_forward_hook(lambda m, a, out: None)
    assert lowered(model, (), 4, ids=ids, labels=ids).kinds() == want
