"""The real kernels behind every call of test_flash.py, split, in bf16: as exact as on one device.

All but the kernel runs on a CPU as well, where the references in bf16 stand in for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch import Tensor

from autosp_dtensor.graph import facts
from tests.pieces import glue
from tests.place import flash_calls
from tests.place.flash_calls import CALLS, model
from tests.reference_attention import loaded_by_transformers, references_here
from tests.simulate import Ranks, lowered

# Of the package that a call's name begins with; the others are flash-attn 2's.
PACKAGES = {
    "flash-attn 3 under": "flash_attn_3.flash_attn_interface",
    "flash-attn 3": "flash_attn_interface",
    "flash-attn 4": "flash_attn.cute",
    "torch's": "torch.nn.attention.varlen",
}
NOT_ON_A_GPU = {
    "other head size of values": "flash-attn 2 takes one head size",
    "transformers with sinks": "transformers chooses the package, and its own tests run it",
}


@contextlib.contextmanager
def tensors_of(device: str, dtype: torch.dtype, times: int, size: int) -> Iterator[None]:
    """The calls' tensors: `times` as many tokens, heads of `size`, the same bf16 values in any
    dtype. Slopes are what flash-attn takes, fp32, unless all is fp64. The table stays in fp64: its
    gradient is a sum over tokens, which is no kernel's."""
    generator = torch.Generator().manual_seed(0)
    length, heads = flash_calls.LENGTH * times, flash_calls.HEADS

    def values(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.bfloat16().to(device, dtype).requires_grad_()

    slopes = torch.float64 if dtype == torch.float64 else torch.float32
    made = {
        "LENGTH": length, "SIZE": size, "MOST": flash_calls.MOST * times,
        "IDS": torch.randint(16, (2, length), generator=generator).to(device),
        "CUTS": (flash_calls.CUTS * times).to(device),
        "USED": (flash_calls.USED * times).to(device),
        "SLOPES": flash_calls.SLOPES.float().to(device, slopes),
        "SINKS": values(flash_calls.SINKS.detach(), dtype),
        "TABLE": values(torch.randn(16, heads * size, generator=generator), torch.float64),
        "DTYPE": dtype,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.items():
            patch.setattr(flash_calls, name, value)
        yield


def results(name: str, n: int | None) -> list[Tensor]:
    """Result and gradients of the table and the sinks, in fp64; n: split over so many ranks."""
    ids, trained = flash_calls.IDS, [flash_calls.TABLE, flash_calls.SINKS]
    if n is None:
        out = model(CALLS[name])(ids)
    else:
        program = lowered(model(CALLS[name]), (ids,), n)
        (parts,) = Ranks(n, program.state).run(program.root, [[ids] * n])
        end = next(node for node in program.flat.nodes if node.op == "output")
        out = glue(parts, facts(end).placements[0])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    grads = torch.autograd.grad(out, trained, weight.to(out), allow_unused=True)
    # Ranks here add up to n times what each would hold.
    return [out.double(), *(g.double() / (n or 1) for g in grads if g is not None)]


def assert_as_exact_as_one_device(
    name: str,
    n: int,
    device: str,
    times: int,
    size: int,
    kernels: contextlib.AbstractContextManager,
) -> None:
    """kernels: a context in which what is called is the kernel."""
    with references_here(), tensors_of(device, torch.float64, times, size):
        exact = results(name, None)
    with kernels, tensors_of(device, torch.bfloat16, times, size):
        one, split = results(name, None), results(name, n)
    assert len(exact) == len(one) == len(split) >= 2
    for want, theirs, ours in zip(exact, one, split, strict=True):
        error = (theirs - want).abs().max()
        assert error > 0, "bf16 rounds"
        assert (ours - want).abs().max() <= 2 * error


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_with_references_in_bf16(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the comparison holds of what is no kernel, and needs no GPU."""
    for each, value in loaded_by_transformers(4).items():
        monkeypatch.setattr(flash_utils, each, value)
    assert_as_exact_as_one_device(name, n, "cpu", 1, 8, references_here())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_real_kernel(name: str, n: int) -> None:
    if name in NOT_ON_A_GPU:
        pytest.skip(NOT_ON_A_GPU[name])
    package = next((p for start, p in PACKAGES.items() if name.startswith(start)), "flash_attn")
    pytest.importorskip(package)
    assert_as_exact_as_one_device(name, n, "cuda", 32, 64, contextlib.nullcontext())
