"""FIELD-CASES.md, class cross-modal: text beside images, and towers of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import facts
from autosp_dtensor.placement import Replicate
from tests.model_t import ModelT, ids_of_t, rms_norm
from tests.simulate import assert_program_equals_whole

RANKS = [2, 3, 4]
IMAGE = 7


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Joint(nn.Module):
    """MMDiT: text and image have weights of their own, and one attention over both."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.text, self.image = (nn.Linear(16, 3 * heads * 4) for _ in range(2))
        self.text_out, self.image_out = (nn.Linear(heads * 4, 16) for _ in range(2))
        self.double()

    def forward(
        self, text: Tensor, image: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        count = text.shape[1]
        both = torch.cat([self.text(text), self.image(image)], 1)
        q, k, v = both.unflatten(-1, (3, self.heads, 4)).permute(2, 0, 3, 1, 4)
        if mask is not None:  # of the text's tokens
            mask = F.pad(mask, (0, image.shape[1]), value=True)[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return self.text_out(out[:, :count]), self.image_out(out[:, count:])


@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded text"])
@pytest.mark.parametrize(("length", "heads"), [(8, 4), (9, 4), (8, 7), (9, 3)])
@pytest.mark.parametrize("n", RANKS)
def test_fc_023_text_on_all_ranks_counts_once(
    n: int, length: int, heads: int, masked: bool
) -> None:
    """4 text tokens that every rank holds, image tokens that are cut. (Of 3 heads on 4 ranks, or
    of 2 rows on 2, queries or rows may be split instead.)"""
    text, image = drawn(1, 2, 4, 16), drawn(2, 2, length, 16)
    mask = torch.tensor([[True] * 4, [True, True, False, False]]) if masked else None
    program = assert_program_equals_whole(Joint(heads), (text, image, mask), n)
    if heads >= n:
        assert "all_to_all" in program.kinds() and "all_gather" not in program.kinds()


class WithImages(ModelT):
    """Features of a tower take the places of marked tokens, by masked_scatter or by index."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.tower = nn.Linear(32, 32, bias=False).double()
        with torch.no_grad():
            self.tower.weight.copy_(drawn(5, 32, 32))

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:  # type: ignore[override]
        x, mask = self.embedding(ids), (ids == IMAGE)[..., None]
        features = self.tower(pixels)
        if self.how == "expanded":
            x = x.masked_scatter(mask.expand_as(x), features)
        elif self.how == "broadcast":
            x = x.masked_scatter(mask, features)
        elif self.how == "flat":
            x = x.masked_scatter(mask.expand(-1, -1, 32), features.flatten())
        else:
            order = mask.flatten().cumsum(0).sub(1).clamp(min=0).view_as(ids)
            x = torch.where(mask, features[order], x)
        return self.head(self.hidden(x, None, None))


@pytest.mark.parametrize("how", ["expanded", "broadcast", "flat", "by index"])
@pytest.mark.parametrize("n", RANKS)
def test_fc_036_features_go_to_the_marks_of_the_whole_sequence(n: int, how: str) -> None:
    """Slots 5..10 of row 0, over the cut at 8, and 2..4 of row 1."""
    ids = ids_of_t(2)
    ids[ids == IMAGE] = 8
    ids[0, 5:11], ids[1, 2:5] = IMAGE, IMAGE
    pixels = drawn(3, 9, 32).requires_grad_()
    program = assert_program_equals_whole(WithImages(how), (ids, pixels), n)
    assert set(program.kinds()) <= {"all_to_all"}


def test_fc_036_more_marks_than_features_are_an_error_as_on_one_device() -> None:
    ids = torch.full((2, 16), IMAGE)
    with pytest.raises((IndexError, RuntimeError)):
        WithImages("expanded")(ids, drawn(3, 9, 32))
    with pytest.raises(IndexError):
        assert_program_equals_whole(WithImages("expanded"), (ids, drawn(3, 9, 32)), 2)


class Tower(nn.Module):
    """A ViT of 3 heads over 9 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36).double(), nn.Linear(12, 32).double()

    def forward(self, patches: Tensor) -> Tensor:
        q, k, v = self.qkv(patches).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TextAndTower(ModelT):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = Tower()

    def forward(self, ids: Tensor, patches: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        seen, fixed = self.tower(patches), self.tower(table[None])
        return self.head(self.hidden(self.embedding(ids), None, None)) + (
            rms_norm(seen).mean(1, keepdim=True) @ fixed.mT @ fixed
        ).mean(-1, keepdim=True)


@pytest.mark.parametrize("n", RANKS)
def test_fc_091_tower_and_text_each_have_their_attention(n: int) -> None:
    """Neither 3 heads nor 9 patches are divided by 4; what is not cut is left as it is."""
    table = drawn(4, 9, 12)
    program = assert_program_equals_whole(
        TextAndTower(), (ids_of_t(2), drawn(3, 2, 9, 12), table), n
    )
    calls = program.named("scaled_dot_product_attention")
    whole = [node for node in calls if isinstance(facts(node).placements[0], Replicate)]
    assert len(calls) == 4 and len(whole) == 2
