"""Masks made of runs of keys go to torch's varlen_attn where flash-attn cannot be imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.errors import UsageError
from autosp_dtensor.graph import Meta, facts
from autosp_dtensor.place.masks import Run, Runs, varlen
from tests import reference_attention
from tests.place.test_varlen import FOUND, IDS, PROVED, TILES, Attention, runs_in
from tests.place.varlen import torch_varlen_here
from tests.simulate import Ranks, assert_program_equals_whole, lowered

__all__ = ["torch_varlen_here"]

Fixture = list[tuple[int, int]]


class Wide(Attention):
    """Heads of 8, as torch's kernel takes them."""

    def __init__(self, mask: Callable[..., Tensor], heads: int = 4, keys: int = 4) -> None:
        super().__init__(mask, heads, keys)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(16, heads * 8, generator=generator).double().requires_grad_()

    def __call__(self, ids: Tensor, *data: Tensor) -> Tensor:
        q = F.embedding(ids, self.table).unflatten(-1, (self.heads, 8)).transpose(1, 2)
        k, v = q[:, : self.keys] * 0.7, q[:, -self.keys :] * -0.9
        out = F.scaled_dot_product_attention(
            q, k, v, self.mask(*data), scale=self.scale, enable_gqa=self.keys != self.heads
        )
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", PROVED)
def test_mask_that_no_data_says_is_proved(torch_varlen_here: Fixture, name: str, n: int) -> None:
    mask, windows = PROVED[name]
    program = assert_program_equals_whole(Wide(mask), (IDS,), n)
    (runs,) = runs_in(program)
    assert runs is not None and runs.known is not None and runs.kernel == varlen.TORCH
    assert set(torch_varlen_here) == windows


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", FOUND)
def test_mask_that_data_say_is_found_while_it_runs(
    torch_varlen_here: Fixture, name: str, n: int
) -> None:
    mask, data, windows = FOUND[name]
    program = assert_program_equals_whole(Wide(mask), (IDS, *data), n)
    assert runs_in(program) == [Runs(kernel=varlen.TORCH)]
    assert set(torch_varlen_here) == windows


@pytest.mark.parametrize(("heads", "keys"), [(7, 7), (9, 3), (14, 2), (3, 1)])
@pytest.mark.parametrize("n", [2, 4])
def test_any_number_of_heads(torch_varlen_here: Fixture, heads: int, keys: int, n: int) -> None:
    mask, data, windows = FOUND["documents and a window"]
    assert_program_equals_whole(Wide(mask, heads, keys), (IDS, *data), n)
    assert set(torch_varlen_here) == windows


@pytest.mark.parametrize("scale", [0.3, 0.0])
def test_scale_is_the_models(torch_varlen_here: Fixture, scale: float) -> None:
    mask, data, _ = FOUND["documents"]
    attention = Wide(mask)
    attention.scale = scale
    assert_program_equals_whole(attention, (IDS, *data), 2)
    assert torch_varlen_here


@pytest.mark.parametrize("name", ["ids that come back", "holes", "a bias"])
def test_mask_that_is_no_runs_goes_by_tiles(torch_varlen_here: Fixture, name: str) -> None:
    mask, data = TILES[name]
    assert_program_equals_whole(Wide(mask), (IDS, *data), 2)
    assert not torch_varlen_here


def note(program: Any) -> str:
    (node,) = program.named("tiled_attention")
    return facts(node).note


def test_explain_tells_which_kernel_runs_it(torch_varlen_here: Fixture) -> None:
    window, _ = PROVED["window"]
    documents, data, _ = FOUND["documents"]
    assert note(lowered(Wide(window), (IDS,), 2)) == (
        "torch's varlen_attn: 1 run of keys by windows (3, 0), proved"
    )
    assert note(lowered(Wide(documents), (IDS, *data), 2)) == (
        "torch's varlen_attn where the mask is runs of keys in the data, else tiles"
    )


def test_flash_attn_comes_first(
    torch_varlen_here: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "_flash_attn", lambda: reference_attention.flash_attn_varlen_func)
    mask, data, _ = FOUND["documents"]
    program = assert_program_equals_whole(Wide(mask), (IDS, *data), 2)
    assert runs_in(program) == [Runs()] and not torch_varlen_here


def meta(heads: int = 4, size: int = 8, dtype: torch.dtype = torch.float64) -> Meta:
    return Meta((2, heads, 13, size), dtype, torch.device("cpu"), True)


def without(*names: str) -> Any:
    """varlen_attn of a release that lacks arguments."""

    def older(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not called")

    real = inspect.signature(reference_attention.varlen_attn)
    kept = [p for name, p in real.parameters.items() if name not in names]
    older.__signature__ = real.replace(parameters=kept)  # type: ignore[attr-defined]
    return older


NOT_HERE = "flash-attn cannot be imported, and torch's varlen_attn "
# (queries, keys, dropout, the function) -> why tiles run.
LACKS: dict[str, tuple[Meta, Meta, bool, Any, str]] = {
    "no function": (meta(), meta(), False, None, "is not in this release"),
    "no windows": (meta(), meta(), False, without("window_size"), "is not in this release"),
    "no shared key heads": (
        meta(), meta(2), False, without("enable_gqa"), "does not share key heads in this release"
    ),
    "dropout": (meta(), meta(), True, without(), "has no dropout"),
    "heads of 12": (meta(4, 12), meta(4, 12), False, without(), "takes heads of a multiple of 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKS)
def test_what_it_lacks_goes_by_tiles(
    torch_varlen_here: Fixture, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, dropout, function, why = LACKS[name]
    if function is None:
        monkeypatch.delattr(torch.nn.attention.varlen, "varlen_attn")
    else:
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", function)
    assert varlen.kernel_for(query, key, key, torch.float64, dropout) == ("", NOT_HERE + why)
    if name == "no shared key heads":
        assert varlen.kernel_for(query, query, query, torch.float64, False) == (varlen.TORCH, "")


@pytest.mark.parametrize(
    ("capability", "size", "built", "why"),
    [
        ((8, 0), 256, True, ""),
        ((9, 0), 256, True, ""),
        ((8, 6), 192, True, ""),
        ((8, 6), 200, True, f"{NOT_HERE}takes heads up to 192 on this GPU"),
        ((12, 0), 256, True, f"{NOT_HERE}takes heads up to 192 on this GPU"),
        ((9, 0), 64, False, f"{NOT_HERE}is not built in here"),
        ((7, 5), 64, True, "flash-attn needs compute capability 8.0"),
        ((9, 0), 264, True, "flash-attn takes heads up to 256"),
    ],
)
def test_what_a_gpu_is_asked(
    capability: tuple[int, int], size: int, built: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch tells of the device is put in here: nothing runs."""
    monkeypatch.setattr(varlen, "_flash_attn", lambda: None)
    monkeypatch.setattr(varlen, "_torch", lambda: reference_attention.varlen_attn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    x = Meta((2, 4, 13, size), torch.bfloat16, torch.device("cuda"), True)
    chosen = varlen.kernel_for(x, x, x, torch.bfloat16, False)
    assert chosen == ("" if why else varlen.TORCH, why)


def test_dropout_goes_by_tiles(torch_varlen_here: Fixture) -> None:
    mask, data, _ = FOUND["documents"]

    def dropped(q: Tensor, d: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(d), dropout_p=0.5)

    x = torch.randn(2, 4, 13, 8, dtype=torch.float64)
    program = lowered(dropped, (x, *data), 2, 2)
    assert runs_in(program) == [None]
    assert note(program) == f"tiles: {NOT_HERE}has no dropout"


def test_gradients_of_gradients_are_refused(torch_varlen_here: Fixture) -> None:
    mask, data, _ = FOUND["documents"]
    attention = Wide(mask)
    program = lowered(attention, (IDS, *data), 1)
    ((out,),) = Ranks(1, program.state).run(program.root, [[IDS], [data[0]]])
    with pytest.raises(UsageError, match="varlen_attn"):
        torch.autograd.grad(out.sum(), attention.table, create_graph=True)


def test_numbers_of_a_head_lie_side_by_side(
    torch_varlen_here: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernel asks for it; the model's may lie otherwise."""
    strides: list[int] = []

    def seen(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        strides.extend(x.stride(-1) for x in (q, k, v))
        return reference_attention.varlen_attn(q, k, v, *args, **kwargs)

    monkeypatch.setattr(varlen, "_torch", lambda: seen)
    x = torch.randn(1, 4, 8, 13, dtype=torch.float64).mT.requires_grad_()
    passes = Runs((Run(0, 0, 13, 0, 13, -1, 0),)).passes(1, 13, 13, x.device)
    assert passes is not None
    out = varlen.attend_runs(passes, varlen.TORCH, x, x, x, 8**-0.5, 0.0)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert set(strides) == {1}
