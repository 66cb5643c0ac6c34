"""flex_attention and flash-attn's functions on ranks, packed documents that change at each step."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.compare import Collectives, whole
from tests.place import test_field_cases_packing as packing
from tests.place.attention_table import HEADS, Model, inputs
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import logged, split
from tests.reference_attention import install_flash_attn

# As many documents each time, so that cu_seqlens keeps its shape: one program.
STEPS = [((5, 11), (9, 7)), ((1, 15), (8, 8)), ((4, 12), (15, 1))]


def documents_change(rank: Rank, way: str) -> tuple[int, int]:
    """Every step against one device; how many programs were traced, and all-to-alls of a step."""
    install_flash_attn()
    import autosp_dtensor as autosp

    model = split(packing.Packed(way), rank.mesh(sp=rank.world_size))
    sent = 0
    with logged() as lines:
        for rows in STEPS:
            batch = packing.packed_batch(*rows)
            reference = packing.Packed(way, reference=True)
            want = reference(**batch)
            want.loss.backward()
            model.zero_grad()
            with Collectives() as counter:
                got = model(**batch)
                got.loss.backward()
            sent = counter.exchanges()
            autosp.sync_gradients(model)
            torch.testing.assert_close(got.logits.full_tensor(), want.logits)
            torch.testing.assert_close(got.loss, want.loss)
            for (name, mine), theirs in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
        # The first row's first document changed: the rest of the batch is as it was, bit for bit.
        first = STEPS[-1][0][0]
        changed = model(**{**batch, "ids": packing.others(batch["ids"], 0, slice(0, first))})
        before, after = (x.logits.full_tensor() for x in (got, changed))
        assert torch.equal(before[0, first:], after[0, first:])
        assert torch.equal(before[1], after[1]) and not torch.equal(before, after)
    return len(lines), sent


@pytest.mark.parametrize("n", [2, 4])
def test_packed_documents_by_every_kernel_in_one_program(n: int) -> None:
    """Two layers: q, k and v in one exchange, the result in another, and the same backward."""
    for way in packing.WAYS:
        assert run_on_ranks(documents_change, way, n=n) == [(1, 8)] * n, way


def a_cell(rank: Rank, form: str, mask: str, heads: str) -> None:
    install_flash_attn()
    import autosp_dtensor as autosp

    count, kv, n = HEADS[heads]
    given = inputs(mask, count)
    reference = Model(form, mask, count, kv, reference=True)
    model = split(Model(form, mask, count, kv), rank.mesh(sp=n))
    want, got = reference(*given), model(*given)
    # With fewer heads than ranks a small result is whole on every rank, and a plain tensor.
    torch.testing.assert_close(whole(got), want)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).double()
    (want * weight).sum().backward()
    if isinstance(got, DTensor):
        weight = distribute_tensor(weight, got.device_mesh, got.placements).to_local()
        got = got.to_local()
    (got * weight).sum().backward()
    autosp.sync_gradients(model)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


# Of each form those where heads, mask and exchange are least alike on all ranks.
CELLS = (
    ("documents, padding", "7/7 on 4"),
    ("bias of heads", "14/2 on 4"),
    ("slopes", "9/3 on 2"),
    ("given by head", "14/2 on 4"),
    ("chunked", "3/1 on 4"),
)
FLASH_CELLS = (("slopes", "14/2 on 4"), ("window", "3/1 on 4"), ("causal", "9/3 on 2"))


@pytest.mark.parametrize("form", ["sdpa", "matmul", "flex", "flash_attn"])
def test_cells_of_the_table_on_ranks(form: str) -> None:
    for mask, heads in FLASH_CELLS if form == "flash_attn" else CELLS:
        run_on_ranks(a_cell, form, mask, heads, n=HEADS[heads][2])
