"""Programs that look at values are planned all the same: none of what they take depends on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosp_dtensor as autosp
from autosp_dtensor.errors import CaptureError, UsageError
from autosp_dtensor.plan.configs import model_maker
from autosp_dtensor.plan.measure import Setting, fake_group, measure

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
VOCABULARY, WIDTH, HEADS, LONGEST = 64, 32, 4, 256
GEMMA = {
    "model_type": "gemma2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "sliding_window": 64, "max_position_embeddings": 8192,
}  # fmt: skip
GPT = {
    "model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 4096, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss",
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LONGEST, LONGEST, dtype=torch.bool)))
        self.bias = nn.Embedding(8, HEADS)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = self.mask[:length, :length]  # type: ignore[index]
        if self.kind == "kernel":
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout.p)
        else:
            scores = q @ k.transpose(-1, -2)
            if self.kind == "bias":
                at = torch.arange(length)
                scores = scores + self.bias((at[:, None] - at).clamp(0, 7)).permute(2, 0, 1)
            if self.kind == "padding":
                scores = scores.masked_fill(pad[:, None, None, :] == 0, -1e9)
            out = self.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1)) @ v
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str = "kernel", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Attention(kind, dropout) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x, pad = self.embed(input_ids), (input_ids > 0).long()
        for layer in self.layers:
            x = layer(x, pad)
        logits = self.head(x[:, :-1]).flatten(0, 1).float()
        return SimpleNamespace(loss=F.cross_entropy(logits, labels[:, 1:].flatten()))


def both(setting: Setting, length: int) -> tuple[int, int]:
    """Peaks of a step without data, and with."""
    with fake_group(setting.dp * setting.sp):
        return measure(setting, length).peak, measure(setting, length, fake=False).peak


@pytest.mark.parametrize(("dp", "sp"), [(1, 4), (2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("sizes", [GEMMA, GPT], ids=["soft cap and window", "dropout everywhere"])
def test_values_are_not_needed(sizes: dict[str, Any], checkpoint: str, dp: int, sp: int) -> None:
    """A strip of queries is taken to read all keys: never less than it does, and close to it."""
    pytest.importorskip("transformers")
    setting = Setting(model_maker(sizes)[1], dp, sp, checkpoint, batch=2)
    planned, real = both(setting, 2047)
    assert 0.999 * real <= planned <= 1.15 * real


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["kernel", "by hand", "bias", "padding"])
def test_masks_whose_values_are_not_known_count_as_any_mask(kind: str, dropout: float) -> None:
    """A causal mask in a buffer is proved where it has data; in a plan it is one of all pairs."""
    setting = Setting(lambda: Model(kind, dropout), 1, 2, batch=2, dtype=torch.float32)
    planned, real = both(setting, 101)
    assert planned >= 0.999 * real
    plain = kind in ("kernel", "by hand")
    pairs = 2 * HEADS // 2 * 101 * 101 * 4  # bytes of scores, of which a strip has some at a time
    assert planned <= real + 8 * pairs * plain + 0.001 * real


def test_dropout_in_attention_takes_no_memory() -> None:
    """The CPU's kernel would keep all pairs of tokens; those that are planned for draw again."""
    pytest.importorskip("transformers")
    silent = {**GPT, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    for checkpoint in ("none", "sequence"):
        peaks = []
        for dropout in (0.0, 0.1):
            make = model_maker({**silent, "attn_pdrop": dropout})[1]
            with fake_group(4):
                peaks.append(measure(Setting(make, 1, 4, checkpoint), 4096).peak)
        assert peaks[1] == peaks[0]


class ReadsInForward(Model):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        if bool((labels > 0).all()):
            labels = labels + 0
        return super().forward(input_ids, labels)


class ReadsWhenMade(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]


def hooked() -> nn.Module:
    model = Model()

    def look(module: nn.Module, args: Any, out: Tensor) -> None:
        assert not out.isnan().any()

    model.layers[0].register_forward_hook(look)
    return model


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (ReadsInForward, CaptureError),
        (ReadsWhenMade, UsageError),
        (lambda: Model().double(), UsageError),
        (hooked, UsageError),
    ],
    ids=["forward", "constructor", "another dtype", "hook"],
)
def test_what_needs_data_is_told_with_its_line(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"where|node") as raised:
        autosp.plan(make, (1, 2), seq=64)
    assert "test_without_data.py:" in str(raised.value)
