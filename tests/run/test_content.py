"""Hashes of inputs: equal for equal bits alone, of any dtype; read at once, or one call later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autosp_dtensor._torch import FakeTensorMode
from autosp_dtensor.run.content import AtOnce, OneCallLate, content, on_its_way, reader_for

LONG = 3 * (1 << 16) + 5  # words: more than one part


def number(tensor: Tensor) -> int:
    return int(content(tensor))


def bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bits, NaN among them."""
    size = torch.tensor(shape).prod().item() * dtype.itemsize
    raw = torch.randint(256, (int(size),), generator=torch.Generator().manual_seed(0))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


DTYPES = [
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16, torch.float64, torch.float32,
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (1,), (), (2, 0, 3)], ids=str)
def test_every_byte_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = bits(dtype, shape)
    assert number(tensor) == number(tensor.clone())
    flat = tensor.reshape(-1).view(torch.uint8)
    for place in range(flat.numel()):
        changed = flat.clone()
        changed[place] ^= 1 << (place % 8)
        assert number(changed.view(dtype).reshape(shape)) != number(tensor)


def test_masks_are_told_apart_by_one_place() -> None:
    mask = torch.ones(5, 9, dtype=torch.bool).tril()
    other = mask.clone()
    other[4, 8] = True
    assert number(mask) == number(mask.clone()) != number(other)


def test_order_counts_within_parts_and_between_them() -> None:
    tokens = torch.arange(LONG)
    part = 1 << 16
    swapped = tokens.clone()
    swapped[[3, 4]] = tokens[[4, 3]]
    parts = torch.cat([tokens[part : 2 * part], tokens[:part], tokens[2 * part :]])
    last = tokens.clone()
    last[-1] += 1
    assert len({number(each) for each in (tokens, swapped, parts, last)}) == 4


def test_signs_of_two_values_do_not_cancel() -> None:
    """A sum of multiples would not see two highest bits flipped."""
    x = torch.linspace(1, 2, 64, dtype=torch.float64)
    y = x.clone()
    y[[5, 6]] *= -1
    assert number(x) != number(y)


def test_layout_in_memory_does_not_count() -> None:
    ids = torch.arange(60).reshape(5, 12)
    assert number(ids.t().contiguous().t()) == number(ids)
    assert number(ids[:, 3:7]) == number(ids[:, 3:7].clone())
    mask = ids % 7 == 0
    assert number(mask[1:, :]) == number(mask[1:, :].clone())  # does not begin at a whole word
    z = torch.complex(ids.float(), ids.float() + 1)
    assert number(z.conj()) == number(torch.complex(ids.float(), -ids.float() - 1))


def test_what_asks_for_a_gradient_or_has_no_data_passes() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert number(x) == number(x.detach()) and not content(x).requires_grad
    assert number(torch.empty(3, device="meta")) == 0
    with FakeTensorMode():
        fake = torch.ones(4)
        assert content(fake).device.type == "cpu"
    assert number(fake) == 0
    with torch.inference_mode():
        inside = number(x)
    assert inside == number(x)


def test_no_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    content(torch.arange(5))
    assert torch.equal(torch.get_rng_state(), before)


# -- when they are read ----------------------------------------------------------------------------


class Delayed:
    """Stands in for a device: a number is there when it is waited for, not before."""

    def __init__(self) -> None:
        self.sent, self.waited = 0, 0

    def __call__(self, numbers: list[Tensor]) -> Any:
        self.sent += 1
        copies = [n.clone() for n in numbers]

        def wait() -> list[int]:
            self.waited += 1
            return [int(n) for n in copies]

        return wait


def named(*values: int) -> list[tuple[str, Tensor]]:
    return [(f"x{k}", torch.full((3,), value)) for k, value in enumerate(values)]


def test_on_a_cpu_a_call_gives_its_own_hashes() -> None:
    reader = reader_for("cpu")
    assert isinstance(reader, AtOnce)
    seen = reader.of_call("call", named(1, 2))
    assert seen is not None and (seen.description, seen.names, seen.late) == (
        "call", ["x0", "x1"], False)  # fmt: skip
    assert seen.hashes == [number(t) for _, t in named(1, 2)]
    assert reader.pending() is None


def test_elsewhere_a_call_gives_those_of_the_call_before_and_waits_for_no_other() -> None:
    device = Delayed()
    reader = OneCallLate(device)
    assert reader.of_call("first", named(1, 2)) is None
    assert (device.sent, device.waited) == (1, 0)
    seen = reader.of_call("second", named(3))
    assert (device.sent, device.waited) == (2, 1)
    assert seen is not None and (seen.description, seen.names, seen.late) == (
        "first", ["x0", "x1"], True)  # fmt: skip
    assert seen.hashes == [number(t) for _, t in named(1, 2)]
    now = reader.pending()  # a program's first call
    assert now is not None and now.description == "second" and not now.late
    assert reader.pending() is None and reader.of_call("third", named(4)) is None
    reader.forget()
    assert reader.of_call("fourth", named(5)) is None


def test_order_of_inputs_counts_in_the_number_of_a_call() -> None:
    one, other = AtOnce().of_call("", named(1, 2)), AtOnce().of_call("", named(2, 1))
    assert one is not None and other is not None and one.number != other.number


def test_inputs_may_change_once_the_call_has_begun() -> None:
    reader, inputs = OneCallLate(on_its_way), named(1)
    before = number(inputs[0][1])
    reader.of_call("first", inputs)
    inputs[0][1].zero_()
    seen = reader.pending()
    assert seen is not None and seen.hashes == [before]
