"""flash-attn's entry points: the model's own kernel on the heads of a rank, exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers.modeling_flash_attention_utils as flash_utils
from torch import Tensor

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.checkpoint import by_heads, record
from autosp_dtensor.errors import CaptureError
from tests import reference_attention as reference
from tests.place.flash_calls import (
    CALLS,
    CUTE,
    CUTS,
    HEADS,
    HOPPER,
    IDS,
    SIZE,
    SLOPES,
    TABLE,
    TORCH,
    WITH_LSE,
    by_transformers,
    flash,
    model,
    packed,
    rows,
    varlen,
    with_lse,
)
from tests.simulate import Lowered, Ranks, assert_program_equals_whole, lowered


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in reference.loaded_by_transformers(4).items():
        monkeypatch.setattr(flash_utils, name, value)
    with reference.references_here():
        yield


FUNC, VARLEN = "flash_attn_func", "flash_attn_varlen_func"


def equal(name: str, n: int) -> Lowered:
    return assert_program_equals_whole(model(CALLS[name]), (IDS,), n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_flash_attention_is_that_of_one_device(name: str, n: int) -> None:
    """Six heads on four ranks: 2, 2, 1, 1; key heads go where they are read."""
    program = equal(name, n)
    assert "all_gather" not in program.kinds()
    if n > 1:
        assert program.kinds().count("all_to_all") == 2
    assert not program.named("softmax")  # the kernel is one call, not looked into


# Documents of queries and of keys: more keys than queries, as many, fewer, and none of one.
CUTS_Q, CUTS_K = (
    torch.tensor(cuts, dtype=torch.int32) for cuts in ([0, 3, 10, 16, 24], [0, 7, 14, 14, 18])
)


def documents(name: str, module: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    cuts = {"cu_seqlens_q": CUTS_Q, "cu_seqlens_k": CUTS_K, "max_seqlen_q": 8, "max_seqlen_k": 7}
    return flash(name, module)(packed(q), packed(k), packed(v), **cuts, **options)


# q [B, S, H, D] and k, v of another length, with half as many heads.
OTHER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "causal from the bottom right": lambda q, k, v: flash(FUNC)(q, k, v, causal=True),
    "window": lambda q, k, v: flash(FUNC)(q, k, v, window_size=(3, 1)),
    "kvpacked": lambda q, k, v: flash("flash_attn_kvpacked_func")(
        q, torch.stack([k, v], 2), causal=True, alibi_slopes=SLOPES
    ),
    "flash-attn 3": lambda q, k, v: flash(FUNC, HOPPER)(q, k, v, causal=True),
    "flash-attn 4": lambda q, k, v: with_lse(*flash(FUNC, CUTE)(
        q, k, v, causal=True, return_lse=True, learnable_sink=SLOPES
    )),
}  # fmt: skip
OTHER_CUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "varlen": lambda q, k, v: rows(documents(VARLEN, "flash_attn", q, k, v, causal=True)),
    "varlen, flash-attn 3": lambda q, k, v: rows(
        documents(VARLEN, HOPPER, q, k, v, window_size=(2, 0))
    ),
    "varlen, flash-attn 4": lambda q, k, v: rows(with_lse(
        *documents(VARLEN, CUTE, q, k, v, causal=True, return_lse=True)
    )),
    "varlen_attn": lambda q, k, v: rows(flash("varlen_attn", TORCH)(
        packed(q), packed(k), packed(v), CUTS_Q, CUTS_K, 8, 7, window_size=(-1, 0), enable_gqa=True
    )),
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("length", [9, 17])
@pytest.mark.parametrize("name", [*OTHER, *OTHER_CUTS])
def test_keys_of_another_length(name: str, length: int, n: int) -> None:
    """Queries of 12 tokens, keys of another sequence, shorter or longer, split as well."""
    call = {**OTHER, **OTHER_CUTS}[name]
    other = torch.randint(16, (2, length), generator=torch.Generator().manual_seed(2))

    def run(ids: Tensor, other: Tensor) -> Tensor:
        q, k = (F.embedding(x, TABLE).unflatten(-1, (HEADS, SIZE)) for x in (ids, other))
        k = k[:, :, ::2]
        return call(q * 1.3, k * 0.7, k * -0.9).flatten(2)

    program = assert_program_equals_whole(run, (IDS, other), n)
    assert "all_gather" not in program.kinds()


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_kernel_is_called_for_one_head_at_a_time(
    name: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where backward's workspace asks for it; a kernel that gives log-sum-exp too stays whole."""
    heads: list[int] = []
    real = by_heads._Run.cut

    def noted(run: Any, tensors: Any, group: Any) -> Any:
        heads.append(group.queries[1])
        return real(run, tensors, group)

    monkeypatch.setattr(by_heads._Run, "cut", noted)
    assert_program_equals_whole(model(CALLS[name]), (IDS,), n, tile=100, groups=False)
    assert {*heads} == (set() if name in WITH_LSE else {1})


def test_what_is_known_of_a_kernel_does_not_depend_on_its_calls() -> None:
    """It is not looked into: what it saves is taken to be all it takes and gives."""
    call = model(CALLS["varlen"])
    one, each = (lowered(call, (IDS,), 2, tile=tile, groups=False).root for tile in (None, 100))
    counts = [sorted((s.bytes, s.own) for s in record(region).saved) for region in (one, each)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("n", [1, 2])
def test_function_is_met_wherever_the_model_keeps_it(n: int) -> None:
    """In a table, in a closure, as a default, wrapped in torch.compile."""
    function = flash("flash_attn_func")
    table = {"fast": function}

    def call(q: Tensor, k: Tensor, v: Tensor, default: Any = function) -> Tensor:
        return table["fast"](q, k, v) + default(q, k, v, causal=True) + function(q, q, v)

    program = assert_program_equals_whole(model(call), (IDS,), n)
    assert len(program.named("flash_attn_func")) == 3
    assert (
        function is flash("flash_attn_func") and function(*[torch.ones(1, 2, 1, 2)] * 3).sum() == 4
    )


def test_dropout_draws_for_each_rank_its_own() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash("flash_attn_func")(q, k, torch.ones_like(v), dropout_p=0.5)

    program = lowered(model(call), (IDS,), 2)
    first, again, other = (
        Ranks(2, program.state, seed=seed).run(program.root, [[IDS, IDS]]) for seed in (1, 1, 2)
    )
    torch.testing.assert_close(first, again)
    assert not torch.allclose(first[0][0], other[0][0])
    whole = torch.cat(first[0], 1).unflatten(-1, (HEADS, SIZE))[..., 0]
    assert not torch.allclose(whole[:, :, :3], whole[:, :, 3:])


def test_probabilities_are_refused() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash("flash_attn_func")(q, k, v, return_attn_probs=True)

    with pytest.raises(CaptureError, match="attention probabilities"):
        capture(read_call(model(call), (IDS,), {}, lambda t: None))


class Blocks(NamedTuple):
    counts: Tensor
    more: Tensor


def by_head(score: Any, b: Any, h: Any, *_: Any) -> Any:
    return score * h


def two(function: str, module: str, **options: Any) -> Callable[..., Any]:
    """A call of an entry point of whole rows, or of one row of documents."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        kernel = flash(function, module)
        if "varlen" not in function:
            return kernel(q, k, v, **options)
        cuts = {"cu_seqlens_q": CUTS, "cu_seqlens_k": CUTS, "max_seqlen_q": 9, "max_seqlen_k": 9}
        return kernel(packed(q), packed(k), packed(v), **cuts, **options)

    return call


MODS = "may ask for a head's number"
UNKNOWN = "not known whether it differs by head"
HOLDS = "holds more than plain values"
PAGES = "in pages are for inference"
WHERE = "heads are split where its dims are"
# The argument that is refused, a part of why, and the call.
REFUSED: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "a score mod": ("score_mod", MODS, two(FUNC, CUTE, score_mod=by_head)),
    "a score mod of documents": ("score_mod", MODS, two(VARLEN, CUTE, score_mod=by_head)),
    "its backward": ("score_mod_bwd", MODS, two(FUNC, CUTE, score_mod_bwd=by_head)),
    "a mask mod": ("mask_mod", MODS, two(FUNC, CUTE, mask_mod=by_head)),
    "a mod that is a module": ("mask_mod", MODS, two(FUNC, CUTE, mask_mod=torch.nn.Identity())),
    "tensors of a mod": ("aux_tensors", HOLDS, two(FUNC, CUTE, aux_tensors=[SLOPES])),
    "blocks": (
        "block_sparse_tensors", HOLDS,
        two(FUNC, CUTE, block_sparse_tensors=Blocks(SLOPES, SLOPES)),
    ),
    "picked keys": ("gather_kv_indices", UNKNOWN, two(FUNC, CUTE, gather_kv_indices=IDS)),
    "pages": ("page_table", PAGES, two(VARLEN, CUTE, page_table=IDS)),
    "queries of values": ("qv", UNKNOWN, two(FUNC, CUTE, qv=SLOPES)),
    "queries of values, flash-attn 3": ("qv", UNKNOWN, two(FUNC, HOPPER, qv=SLOPES)),
    **{
        f"{name}, {function}": (name, UNKNOWN, two(function, HOPPER, **{name: SLOPES[:2]}))
        for name in ("q_descale", "k_descale", "v_descale") for function in (FUNC, VARLEN)
    },
    "pages, flash-attn 2": ("block_table", PAGES, two(VARLEN, "flash_attn", block_table=IDS)),
    "heads of q, k and v in one dim": (
        "qkv", WHERE, lambda q, k, v: flash("flash_attn_qkvpacked_func", HOPPER)(
            torch.cat([q, k, v], 2), num_heads_q=HEADS
        ),
    ),
    "keys in pages": ("k", WHERE, lambda q, k, v: flash(VARLEN)(
        packed(q), k, v, CUTS, CUTS, 9, 9
    )),
    "slopes of three dims": ("alibi_slopes", WHERE, two(
        FUNC, "flash_attn", alibi_slopes=SLOPES.expand(1, 1, -1)
    )),
    "pages, torch": ("block_table", PAGES, lambda q, k, v: varlen(q, k, v, block_table=IDS)),
    "pages, transformers": ("block_table", PAGES, lambda q, k, v: by_transformers(
        q, k, v, block_table=IDS
    )),
    "sinks of rows, transformers": ("s_aux", WHERE, lambda q, k, v: by_transformers(
        q, k, v, s_aux=torch.stack([SLOPES, SLOPES])
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_differ_by_head_is_refused_by_name(name: str) -> None:
    argument, why, call = REFUSED[name]
    with pytest.raises(CaptureError, match=f"is given {argument}\\.") as caught:
        capture(read_call(model(call), (IDS,), {}, lambda t: None))
    assert why in caught.value.why
    assert ("with the dims (" in caught.value.fix) == (why is WHERE)


def test_heads_that_torch_would_refuse_are_refused() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen(q, k[:, :, :2], v[:, :, :2])

    with pytest.raises(ValueError, match="same number of heads"):
        model(call)(IDS)
    with pytest.raises(CaptureError, match="6 heads of queries and 2 of keys"):
        capture(read_call(model(call), (IDS,), {}, lambda t: None))


def test_result_of_another_kind_than_expected_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that gives (out, lse) where one tensor was expected."""
    program = lowered(model(CALLS["flash-attn 3"]), (IDS,), 2)
    real = reference.hopper_attn_func
    code = (lambda *a, **k: (0, 1)).__code__
    monkeypatch.setattr(real, "__code__", code)
    with pytest.raises(CaptureError, match="gives a tuple"):
        Ranks(2, program.state).run(program.root, [[IDS, IDS]])
