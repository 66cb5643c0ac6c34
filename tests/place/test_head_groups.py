"""Attention by groups of heads, projections with it: how far it goes, and like the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.checkpoint import Tile
from autosp_dtensor.checkpoint.kinds import is_attention, is_product
from autosp_dtensor.graph import facts
from autosp_dtensor.place import canonicalize, in_groups
from autosp_dtensor.place.masks import tiles
from autosp_dtensor.run.constants import Constants
from tests import models
from tests.checkpoint.stacked import Stacked
from tests.simulate import Lowered, assert_program_equals_whole, lowered
from tests.upcasts import upcasts_stay_in_fp64

LENGTH, WIDTH, HEADS, SIZE = 9, 8, 8, 4  # 9: no number of ranks here divides it
INNER = HEADS * SIZE


def random(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
X, MEMORY = random(2, LENGTH, WIDTH), random(2, 13, WIDTH, seed=2)
PADDING = torch.tensor([[1] * 6 + [0] * 3, [1] * 9]).bool()


class Layer(nn.Module):
    """`body` is its forward. Keys and values have `kv` heads."""

    def __init__(self, body: Callable[..., Any], kv: int = HEADS, heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(WIDTH, heads * SIZE)
        self.k, self.v = (nn.Linear(WIDTH, kv * SIZE, bias=False) for _ in range(2))
        self.o = nn.Linear(heads * SIZE, WIDTH)
        self.qkv = nn.Linear(WIDTH, (heads + 2 * kv) * SIZE)
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, kv * SIZE, bias=False)
        self.cube = nn.Parameter(torch.randn(WIDTH, heads, SIZE))
        self.bias = nn.Parameter(torch.randn(heads, LENGTH, LENGTH))
        self.sink = nn.Parameter(torch.randn(heads, 1))
        self.body, self.kv, self.heads = body, kv, heads
        self.double()

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.body(self, x, *rest)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
    causal = mask is None and kwargs.pop("is_causal", True)
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, **kwargs)
    return y.transpose(1, 2).flatten(2)


def plain(m: Layer, x: Tensor) -> Tensor:
    return x + m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x))))


def both_ways(m: Layer, x: Tensor) -> Tensor:
    q, k, v = (p(x).view(2, LENGTH, -1, SIZE).permute(0, 2, 1, 3) for p in (m.q, m.k, m.v))
    return m.o(sdpa(q, k, v, is_causal=False))


def gqa(m: Layer, x: Tensor) -> Tensor:
    return x + m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), enable_gqa=True))


def repeated(m: Layer, x: Tensor) -> Tensor:
    """As transformers spells it."""
    k, v = (
        heads(p(x))[:, :, None].expand(-1, -1, m.heads // m.kv, -1, -1).flatten(1, 2)
        for p in (m.k, m.v)
    )
    return m.o(sdpa(heads(m.q(x)), k, v))


def norm_of_heads(m: Layer, x: Tensor) -> Tensor:
    return m.o(sdpa(m.q_norm(heads(m.q(x))), m.k_norm(heads(m.k(x))), heads(m.v(x))))


def norm_of_all(m: Layer, x: Tensor) -> Tensor:
    q, k = (F.rms_norm(p(x), (INNER,)) for p in (m.q, m.k))
    return m.o(sdpa(heads(q), heads(k), heads(m.v(x))))


def rotated(m: Layer, x: Tensor) -> Tensor:
    at = torch.arange(LENGTH, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1]).double()
    cos, sin = (f(torch.cat([at, at], -1)) for f in (torch.cos, torch.sin))

    def turned(x: Tensor) -> Tensor:
        half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
        return x * cos + half * sin

    return m.o(sdpa(turned(heads(m.q(x))), turned(heads(m.k(x))), heads(m.v(x))))


def rotated_by_chunks(m: Layer, x: Tensor) -> Tensor:
    """Halves are several results of one call; keys' are split."""
    q, k = heads(m.q(x)), heads(m.k(x))
    (a, b), (c, d) = q.chunk(2, -1), k.split(SIZE // 2, -1)
    return m.o(sdpa(torch.cat([-b, a], -1), torch.cat([d, c * 2], -1), heads(m.v(x))))


def chunks_of_heads(m: Layer, x: Tensor) -> Tensor:
    """GPT-NeoX of transformers."""
    q, k, v = m.qkv(x).view(2, LENGTH, m.heads, 3 * SIZE).transpose(1, 2).chunk(3, -1)
    return m.o(sdpa(q, k, v))


def chunks_with_others(m: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys' chunk is a result, too: the call stays whole, with its other results."""
    q, k, v = m.qkv(x).view(2, LENGTH, m.heads, 3 * SIZE).transpose(1, 2).chunk(3, -1)
    return m.o(sdpa(q * 2, k, v)), k


def unbound(m: Layer, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(2, LENGTH, 3, m.heads, SIZE).unbind(2)
    return m.o(sdpa(*(each.transpose(1, 2) for each in (q, k, v))))


def fused_thirds(m: Layer, x: Tensor) -> Tensor:
    """GPT-2: all queries, then all keys."""
    return m.o(sdpa(*(heads(each) for each in m.qkv(x).chunk(3, -1))))


def fused_slices(m: Layer, x: Tensor) -> Tensor:
    """Phi-3, with fewer key heads."""
    y, a, b = m.qkv(x), m.heads * SIZE, (m.heads + m.kv) * SIZE
    return m.o(sdpa(heads(y[..., :a]), heads(y[..., a:b]), heads(y[..., b:]), enable_gqa=True))


def fused_by_head(m: Layer, x: Tensor) -> Tensor:
    """GPT-NeoX: each head's queries, keys and values side by side."""
    y = m.qkv(x).view(2, LENGTH, m.heads, 3 * SIZE).transpose(1, 2)
    return m.o(sdpa(y[..., :SIZE], y[..., SIZE : 2 * SIZE], y[..., 2 * SIZE :]))


def adapted(m: Layer, x: Tensor) -> Tensor:
    """LoRA on two projections: what it is squeezed into is there once."""
    k, v = (p(x) + 2 * m.up(m.down(x)) for p in (m.k, m.v))
    return m.o(sdpa(heads(m.q(x)), heads(k), heads(v)))


def merged(m: Layer, x: Tensor) -> Tensor:
    """The weights themselves are made."""
    k = F.linear(x, m.k.weight + 2 * m.up.weight @ m.down.weight)
    return m.o(sdpa(heads(m.q(x)), heads(k), heads(m.v(x))))


def by_einsum(m: Layer, x: Tensor) -> Tensor:
    q = torch.einsum("bsd,dhe->bhse", x, m.cube)
    return m.o(sdpa(q, heads(m.k(x)), heads(m.v(x))))


def by_addmm(m: Layer, x: Tensor) -> Tensor:
    """Conv1D of GPT-2, a product of two dims."""
    q = torch.addmm(m.q.bias, x.view(-1, WIDTH), m.q.weight.t()).view(2, LENGTH, -1)
    return m.o(sdpa(heads(q), heads(m.k(x)), heads(m.v(x))))


def by_hand(m: Layer, x: Tensor) -> Tensor:
    q, k, v = heads(m.q(x)), heads(m.k(x)), heads(m.v(x))
    scores = (q @ k.mT * 0.5).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    return m.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def padded(m: Layer, x: Tensor, padding: Tensor) -> Tensor:
    mask = padding[:, None, None, :]
    return m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), mask))


def biased(m: Layer, x: Tensor) -> Tensor:
    """Numbers of each head and pair, which are trained."""
    return m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), m.bias[None]))


def biased_by_input(m: Layer, x: Tensor, bias: Tensor) -> Tensor:
    return m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), bias))


def gated(m: Layer, x: Tensor) -> Tensor:
    y = sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)))
    return m.o(y * F.linear(x, m.q.weight).sigmoid())


def scaled_by_head(m: Layer, x: Tensor) -> Tensor:
    """A number of each head before, and behind attention."""
    y = F.scaled_dot_product_attention(heads(m.q(x)) * m.sink[..., None], heads(m.k(x)),
                                       heads(m.v(x)), is_causal=True)  # fmt: skip
    return m.o((y * m.sink[..., None]).transpose(1, 2).flatten(2))


def cached(m: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values are results, too."""
    k, v = heads(m.k(x)), heads(m.v(x))
    return m.o(sdpa(heads(m.q(x)), k, v)), k, v


def across(m: Layer, x: Tensor, memory: Tensor) -> Tensor:
    y = sdpa(heads(m.q(x)), heads(m.k(memory)), heads(m.v(memory)), is_causal=False)
    return x + m.o(y)


def alike(m: Layer, x: Tensor) -> Tensor:
    """Keys are values."""
    k = heads(m.k(x))
    return m.o(sdpa(heads(m.q(x)), k, k))


def to_itself(m: Layer, x: Tensor) -> Tensor:
    q = heads(m.q(x))
    return m.o(sdpa(q, q, q))


def sharing(m: Layer, x: Tensor) -> Tensor:
    """Two attentions of the same keys, the second of the first's result."""
    k = heads(m.k(x))
    x = x + m.o(sdpa(heads(m.q(x)), k, heads(m.v(x))))
    return x + m.o(sdpa(heads(m.q(x)), k, heads(m.v(x))))


def side_by_side(m: Layer, x: Tensor) -> Tensor:
    """Differences of attentions."""
    v = heads(m.v(x))
    return m.o(sdpa(heads(m.q(x)), heads(m.k(x)), v) - sdpa(heads(m.k(x)), heads(m.q(x)), v))


def unheaded(m: Layer, x: Tensor) -> Tensor:
    """The result keeps its dim of heads to the end."""
    y = F.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)))
    return torch.einsum("bhse,dhe->bsd", y, m.cube)


def straight(m: Layer, x: Tensor) -> Tensor:
    """Nothing stands before attention or behind it."""
    x = x[:, None].expand(-1, m.heads, -1, -1)
    return F.scaled_dot_product_attention(x, x * 0.5, x * 0.25, is_causal=True).sum(1)


@dataclass(frozen=True)
class Case:
    """products: matrix products that go by groups, of each attention. attentions: how many."""

    body: Callable[..., Any]
    products: int
    kv: int = HEADS
    attentions: int = 1
    rest: tuple[Tensor, ...] = ()
    ranks: tuple[int, ...] = (1, 2, 4)


CASES = [
    Case(plain, 3),
    Case(both_ways, 3),
    Case(gqa, 3, kv=4, ranks=(1, 2)),
    Case(repeated, 3, kv=4, ranks=(1, 2)),
    Case(norm_of_heads, 3),
    Case(norm_of_all, 1),
    Case(rotated, 3),
    Case(rotated_by_chunks, 3),
    Case(chunks_of_heads, 1),
    Case(chunks_with_others, 0, ranks=(2,)),
    Case(unbound, 0, ranks=(1, 2)),
    Case(fused_thirds, 0),
    Case(fused_slices, 0, kv=4, ranks=(2,)),
    Case(fused_by_head, 1),
    Case(adapted, 5, ranks=(2,)),
    Case(merged, 4, ranks=(2,)),
    Case(by_einsum, 3, ranks=(2, 4)),
    Case(by_addmm, 3, ranks=(2,)),
    Case(by_hand, 3, ranks=(2,)),
    Case(padded, 3, rest=(PADDING,), ranks=(2, 4)),
    Case(biased, 3, ranks=(1, 2)),
    Case(biased_by_input, 3, rest=(random(2, HEADS, LENGTH, LENGTH).requires_grad_(),), ranks=(2,)),
    Case(gated, 3, ranks=(2,)),
    Case(scaled_by_head, 3, ranks=(2,)),
    Case(cached, 1),
    Case(across, 3, rest=(MEMORY,), ranks=(2, 4)),
    Case(alike, 2, ranks=(2,)),
    Case(to_itself, 1, ranks=(2,)),
    Case(sharing, 2, attentions=2, ranks=(2,)),
    Case(side_by_side, 2, attentions=2, ranks=(2,)),
    Case(unheaded, 3, ranks=(2,)),
    Case(straight, 0, ranks=(2,)),
]
RUNS = [(case, n) for case in CASES for n in case.ranks]


def each_operation(nodes: Iterator[Node] | list[Node]) -> Iterator[Node]:
    """What is inside of tiles, too."""
    for node in nodes:
        if isinstance(node.target, Tile):
            yield from each_operation(
                [n for n in node.target.body.nodes if n.op == "call_function"]
            )
        else:
            yield node


def turns(program: Lowered) -> Counter[tuple[int, int] | None]:
    """Calls of attention by groups: (attention, group); None for those of all heads."""
    calls = [facts(node) for node in program.nodes() if is_attention(node)]
    assert all((known.turn is not None) == ("heads " in known.note) for known in calls)
    return Counter(known.turn for known in calls)


def products(program: Lowered) -> set[int]:
    """How many matrix products each group of each attention has of its own."""
    found = Counter(
        facts(node).turn for node in each_operation(program.nodes()) if is_product(node)
    )
    return {found[turn] / calls for turn, calls in turns(program).items()}


@pytest.mark.parametrize(
    ("case", "n"), RUNS, ids=[f"{case.body.__name__}-{case.kv}-{n}" for case, n in RUNS]
)
def test_attention_goes_by_groups_with_what_makes_its_heads(case: Case, n: int) -> None:
    layer, x = Layer(case.body, case.kv), X.clone().requires_grad_()
    program = assert_program_equals_whole(layer, (x, *case.rest), n, tile=4)
    count = case.kv // n
    every = {(k, group) for k in range(case.attentions) for group in range(count)}
    assert turns(program) == Counter(every)
    assert products(program) == {case.products}


# What each head draws, or where it stands among all of them, is another thing by groups.


def dropping(m: Layer, x: Tensor) -> Tensor:
    return m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), dropout_p=0.5))


def windowed(m: Layer, x: Tensor, ids: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    near = (at[:, None] - at < 4) & (at[:, None] >= at)
    near = near & (ids[:, None, :, None] == ids[:, None, None])
    return m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), near))


def sloped(m: Layer, x: Tensor) -> Tensor:
    """ALiBi."""
    at = torch.arange(LENGTH)
    slopes = 0.5 ** torch.arange(1, m.heads + 1).double()[:, None, None]
    mask = (slopes * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
    return m.o(sdpa(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), mask[None]))


WHOLE: dict[str, tuple[Layer, int, tuple[Tensor, ...]]] = {
    "heads of ranks differ": (Layer(plain, 6, 6), 4, ()),
    "heads are left": (Layer(plain, 10, 10), 4, ()),
    "fewer heads than ranks": (Layer(plain, 2, 2), 4, ()),
    "one head": (Layer(plain, 4, 4), 4, ()),
    "one key head": (Layer(gqa, 2), 2, ()),
    "one key head of all": (Layer(gqa, 1), 1, ()),
    "key heads of ranks differ": (Layer(gqa, 4, 12), 3, ()),
    "tiles": (Layer(windowed), 2, (torch.tensor([[0] * 5 + [1] * 4, [0] * 2 + [1] * 7]),)),
    "tiles of each head": (Layer(sloped), 2, ()),
    "nothing is trained": (Layer(plain).requires_grad_(False), 2, ()),
}


@pytest.mark.parametrize("name", WHOLE)
def test_attention_of_all_heads_stays_where_groups_cannot_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    layer, n, rest = WHOLE[name]
    program = assert_program_equals_whole(layer, (X, *rest), n, tile=4)
    assert turns(program) == {None: 1}


def test_attention_that_draws_stays() -> None:
    """On one rank it draws what one device draws: nothing else would."""
    program = lowered(Layer(dropping), (X.clone().requires_grad_(),), 2, tile=4)
    assert turns(program) == {None: 1}


def test_without_gradients_attention_stays() -> None:
    with torch.no_grad():
        program = assert_program_equals_whole(Layer(plain), (X,), 2, tile=4, gradients=False)
    assert turns(program) == {None: 1}


def grouped(layer: Layer, least: int = 1, border: str = "") -> Counter[Any]:
    """Products by turns, on two ranks; nothing where there are no groups."""
    call = read_call(layer, (X,), {}, lambda _: None)  # type: ignore[arg-type, return-value]
    canonical = canonicalize(capture(call).graph, 2, Constants(layer).read)
    graph = in_groups(canonical, 2, least, frozenset({border}))
    return Counter(facts(node).turn for node in graph.nodes if is_product(node)) if graph else {}


@pytest.mark.parametrize(("border", "left"), [("", 3), ("q", 2), ("k", 2), ("o", 3)])
def test_groups_end_where_a_region_does(border: str, left: int) -> None:
    found = grouped(Layer(plain), border=border)
    assert found == {**{(0, group): left for group in range(4)}, None: 4 - left}


@pytest.mark.parametrize(("least", "count"), [(1728, 4), (1729, 2), (3456, 2), (3457, 0)])
def test_a_group_has_at_least_the_bytes_asked_for(least: int, count: int) -> None:
    """Queries, keys and values of two rows, 9 tokens, 8 heads of 4 numbers in fp64, on 2 ranks."""
    assert 3 * 2 * 9 * 8 * 4 * 8 // 2 == 4 * 1728
    assert len([turn for turn in grouped(Layer(plain), least) if turn]) == count


@pytest.mark.parametrize("body", [gqa, repeated])
def test_equal_layers_stay_one_region(body: Callable[..., Any]) -> None:
    model = Stacked(lambda: Layer(body, 4), WIDTH)
    program = assert_program_equals_whole(model, (IDS,), 2, tile=4)
    assert len(program.root.calls) == 2
    assert len({call.region for call in program.root.calls}) == 1
    assert turns(program) == {(0, 0): 2, (0, 1): 2}


class SequenceFirst(nn.Module):
    """[S, B, W], and torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(WIDTH, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def test_sequence_may_come_first() -> None:
    x = X.transpose(0, 1).contiguous().requires_grad_()
    program = assert_program_equals_whole(SequenceFirst(), (x,), 2, seq_dim=0, tile=4)
    assert turns(program) == {(0, 0): 1, (0, 1): 1}


# What of a group there is to say: its own products.
FAMILIES = {"llama": 3, "qwen3": 3, "olmo2": 1, "gpt2": 0, "phi3": 0, "gpt_neox": 1}


@pytest.mark.parametrize("variant", ["plain", "padding"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_go_by_groups(family: str, variant: str) -> None:
    sizes = {} if family in ("gpt2", "gpt_neox") else {"num_attention_heads": 8}
    if sizes:
        sizes["num_key_value_heads"] = 4
    model = models.build_transformers(family, **sizes)
    with upcasts_stay_in_fp64():
        program = assert_program_equals_whole(
            model, (), 2, tile=5, **models.batch_transformers(variant)
        )
    if variant == "padding":  # tiles, which count heads
        assert turns(program) == {None: 2}
        return
    assert turns(program) == {(0, 0): 2, (0, 1): 2}, "two equal layers"
    assert products(program) == {FAMILIES[family]}


def literals(m: Layer, x: Tensor) -> Tensor:
    """Tensors made from Python's numbers, one for each head: nothing says what a group's are."""
    scale = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]).double().view(8, 1, 1)
    order = torch.tensor([3, 1, 2, 0, 7, 6, 5, 4])
    v = heads(m.v(x))
    v = torch.where(torch.as_tensor([True, False] * 4)[:, None, None], v, -v)
    return m.o(sdpa(heads(m.q(x)) * scale, heads(m.k(x))[:, order], v))


@pytest.mark.parametrize("n", [1, 2])
def test_tensors_of_python_numbers_are_cut(n: int) -> None:
    program = assert_program_equals_whole(Layer(literals), (X,), n, tile=64)
    assert sum(is_attention(node) for node in program.nodes()) == HEADS // n


def test_exchanges_carry_no_note_of_the_attention_before_them() -> None:
    """Nothing moves dims behind it here, so that its own result is sent back."""

    def flat(m: Layer, x: Tensor) -> Tensor:
        q, k, v = (heads(p(x)) for p in (m.q, m.k, m.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(1)

    program = lowered(Layer(flat), (X,), 2, tile=64)
    told = [node for node in program.nodes() if "heads" in facts(node).note]
    assert len(told) == HEADS // 2 and all(is_attention(node) for node in told)
