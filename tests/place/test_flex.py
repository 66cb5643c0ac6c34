"""flex_attention: any score_mod and BlockMask, exact, without scores of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.errors import CaptureError
from autosp_dtensor.place.masks import tiles
from tests import reference_attention
from tests.pieces import glue
from tests.simulate import Lowered, Ranks, assert_program_equals_whole, lowered

LENGTH, HEADS, SIZE = 13, 6, 2
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [0] * 1 + [1] * 11 + [2] * 1])
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
Attend = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


def trained(*shape: int) -> Tensor:
    table = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return table.requires_grad_()


SLOPES, BY_DISTANCE = trained(HEADS), trained(HEADS, 2 * LENGTH - 1)
PREFIX = torch.tensor([3, 7])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < 4


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < PREFIX[b]


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((h % 2 == 0) | (q - k < 3))


def same_document(d: Tensor) -> Callable[..., Tensor]:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return d[b, q] == d[b, k]

    return mod


def nothing_for_some(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q != 5)


def mask(mod: Callable[..., Tensor], length: int = LENGTH) -> Any:
    return create_block_mask(mod, None, None, length, length, device="cpu")


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 5 * torch.tanh(score / 5)


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + SLOPES[h] * (k - q)


def by_distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + BY_DISTANCE[h, q - k + LENGTH - 1]


def inside(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, score, -float("inf"))


def chunk(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q // 5 == k // 5


def filled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score.masked_fill(k > q, -float("inf")) + (2 - (q - k)) * 0.1


# Calls of flex_attention on q, k, v, document ids; `at` is the function itself or its reference.
CALLS: dict[str, Callable[[Attend, Tensor, Tensor, Tensor, Tensor], Any]] = {
    "nothing": lambda at, q, k, v, d: at(q, k, v),
    "scale": lambda at, q, k, v, d: at(q, k, v, scale=0.3),
    "causal": lambda at, q, k, v, d: at(q, k, v, block_mask=mask(causal)),
    "causal by score_mod": lambda at, q, k, v, d: at(q, k, v, inside),
    "documents": lambda at, q, k, v, d: at(
        q, k, v, block_mask=mask(and_masks(causal, same_document(d)))
    ),
    "window": lambda at, q, k, v, d: at(q, k, v, block_mask=mask(and_masks(causal, window))),
    "chunks": lambda at, q, k, v, d: at(q, k, v, block_mask=mask(and_masks(causal, chunk))),
    "filled": lambda at, q, k, v, d: at(q, k, v, filled),
    "prefix": lambda at, q, k, v, d: at(q, k, v, block_mask=mask(or_masks(causal, prefix))),
    "heads apart": lambda at, q, k, v, d: at(q, k, v, block_mask=mask(by_head)),
    "queries that read nothing": lambda at, q, k, v, d: at(
        q, k, v, block_mask=mask(nothing_for_some)
    ),
    "capped": lambda at, q, k, v, d: at(q, k, v, capped),
    "capped, causal": lambda at, q, k, v, d: at(q, k, v, capped, mask(causal)),
    "alibi, documents": lambda at, q, k, v, d: at(
        q, k, v, score_mod=alibi, block_mask=mask(same_document(d))
    ),
    "a table by head and distance": lambda at, q, k, v, d: at(q, k, v, by_distance, mask(causal)),
    "shared key heads": lambda at, q, k, v, d: at(
        q, k[:, :2], v[:, :2], block_mask=mask(causal), enable_gqa=True
    ),
    "shared key heads, capped": lambda at, q, k, v, d: at(
        q, k[:, :1], v[:, :1], capped, mask(causal), enable_gqa=True
    ),
    "gate on log-sum-exp": lambda at, q, k, v, d: gated(
        *at(q, k, v, alibi, mask(causal), return_lse=True)
    ),
}


def gated(out: Tensor, lse: Tensor) -> Tensor:
    return out * torch.sigmoid(lse)[..., None]


TABLE = torch.randn(16, HEADS * SIZE, generator=torch.Generator().manual_seed(0)).double()
TABLE.requires_grad_()


def model(call: Callable[..., Any], at: Attend) -> Callable[..., Tensor]:
    def run(ids: Tensor, d: Tensor) -> Tensor:
        x = F.embedding(ids, TABLE)
        q, k, v = (
            (x * factor).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for factor in (1.3, 0.7, -0.9)
        )
        return call(at, q, k, v, d).transpose(1, 2).flatten(2)

    return run


def equal(call: Callable[..., Any], n: int, at: Attend = flex.flex_attention) -> Lowered:
    reference = model(call, reference_attention.flex_attention)
    return assert_program_equals_whole(model(call, at), (IDS, DOCUMENTS), n, reference=reference)


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_flex_is_that_of_one_device(name: str, n: int) -> None:
    program = equal(CALLS[name], n)
    kernels = program.named("scaled_dot_product_attention") + program.named("tiled_attention")
    assert len(kernels) == 1 and not program.named("flex_weights")
    assert program.largest() < LENGTH * LENGTH * 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_reference_is_flex_attention_itself() -> None:
    """Forward alone: torch has no backward of flex_attention on a CPU."""
    for name in ("documents", "capped, causal", "a table by head and distance", "prefix"):
        with torch.no_grad():
            ours = model(CALLS[name], reference_attention.flex_attention)(IDS, DOCUMENTS)
            theirs = model(CALLS[name], flex.flex_attention)(IDS, DOCUMENTS)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*script_method.*deprecated")  # torch imports its own
def test_compiled_flex_attention_is_met_as_well() -> None:
    equal(CALLS["documents"], 2, torch.compile(flex.flex_attention))


def test_plain_masks_need_no_tiles() -> None:
    for name in ("causal", "nothing", "causal by score_mod"):
        (node,) = equal(CALLS[name], 2).named("scaled_dot_product_attention")
        assert node.kwargs["is_causal"] is (name != "nothing")


@pytest.mark.parametrize("name", ["shared key heads", "shared key heads, capped"])
def test_key_heads_are_not_repeated_before_the_exchange(name: str) -> None:
    """enable_gqa: 2 key heads or 1 travel beside 6 query heads, in one exchange."""
    keys = 1 if "capped" in name else 2
    for n in (2, 4):
        program = lowered(model(CALLS[name], flex.flex_attention), (IDS, DOCUMENTS), n)
        assert program.kinds() == ["all_to_all", "all_to_all"]
        there, back = (moves for _, moves in program.collectives())
        assert [target.block for _, target in there] == [HEADS, keys, keys]
        assert [source.block for source, _ in back] == [HEADS * SIZE]  # flattened


class Given(nn.Module):
    """Gets its block mask as an argument, as training loops hand it in."""

    def __init__(self, at: Attend) -> None:
        super().__init__()
        self.table, self.at = nn.Parameter(TABLE.detach().clone()), at

    def forward(self, ids: Tensor, block_mask: Any) -> Tensor:
        x = F.embedding(ids, self.table).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return self.at(x, x, x, block_mask=block_mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("n", [2, 4])
def test_block_mask_is_an_argument_whose_tensors_change(n: int) -> None:
    """One program for all steps: what mask_mod has closed over is an input of it."""
    live = Given(flex.flex_attention)
    first = mask(and_masks(causal, same_document(DOCUMENTS)))
    program = lowered(live, (IDS, first), n)
    keys = set()
    for shift in range(3):
        documents = DOCUMENTS.roll(shift, 1)
        given = mask(and_masks(causal, same_document(documents)))
        keys.add(read_call(live, (IDS, given), {}, lambda t: None).key)
        (parts,) = Ranks(n, program.state).run(program.root, [[IDS] * n, [documents] * n])
        output = next(node for node in program.flat.nodes if node.op == "output")
        got = glue(parts, output.meta["autosp"].placements[0])
        whole = Given(reference_attention.flex_attention)
        torch.testing.assert_close(got, whole(IDS, given))
    assert len(keys) == 1
    other = read_call(live, (IDS, mask(causal)), {}, lambda t: None).key
    assert other not in keys


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a row of a table": (
        lambda at, q, k, v, d: at(q, k, v, lambda s, b, h, i, j: s + d[b][i]), "dim of its own"),
    "a lookup after another": (
        lambda at, q, k, v, d: at(q, k, v, lambda s, b, h, i, j: s + BY_DISTANCE[h][i - j]),
        "dim of its own"),
    "a sum over what is one element": (
        lambda at, q, k, v, d: at(q, k, v, lambda s, b, h, i, j: s + (i - j).sum()), "sum"),
    "a slice": (
        lambda at, q, k, v, d: at(q, k, v, lambda s, b, h, i, j: s + i[..., :1]), "slices"),
    "a mask of another length": (
        lambda at, q, k, v, d: at(q, k, v, block_mask=mask(causal, 16)), "other lengths"),
    "heads that do not fit": (
        lambda at, q, k, v, d: at(q, k[:, :2], v[:, :2]), "numbers of heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_something_else_for_all_positions_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(CaptureError, match=text):
        capture(read_call(model(call, flex.flex_attention), (IDS, DOCUMENTS), {}, lambda t: None))


def test_functions_are_themselves_after_tracing() -> None:
    code = flex.flex_attention.__code__
    lowered(model(CALLS["causal"], flex.flex_attention), (IDS, DOCUMENTS), 2)
    assert flex.flex_attention.__code__ is code
    call, _ = REFUSED["a slice"]
    with pytest.raises(CaptureError):
        capture(read_call(model(call, flex.flex_attention), (IDS, DOCUMENTS), {}, lambda t: None))
    assert flex.flex_attention.__code__ is code


def test_blocks_without_a_mask_mod_are_refused() -> None:
    """They alone would say what may be read."""
    known = mask(causal)
    bare = flex.BlockMask.from_kv_blocks(
        known.kv_num_blocks, known.kv_indices, BLOCK_SIZE=4, seq_lengths=(LENGTH, LENGTH)
    )
    call = lambda at, q, k, v, d: at(q, k, v, block_mask=bare)  # noqa: E731
    with pytest.raises(CaptureError, match="no mask_mod"):
        capture(read_call(model(call, flex.flex_attention), (IDS, DOCUMENTS), {}, lambda t: None))
