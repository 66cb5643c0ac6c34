"""A step's peak from sizes alone: nothing that the library counts is asked."""

from __future__ import annotations

import pytest

from autosp_dtensor.plan.configs import model_maker
from autosp_dtensor.plan.measure import Setting, fake_group, measure

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
RANKS, LAYERS, TOKENS, TILE = 2, 4, 4096, 64
WIDTH, INNER, HEADS, VOCABULARY = 64, 128, 4, 256
SIZES = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
}  # fmt: skip
HIDDEN = TOKENS // RANKS * WIDTH * 2  # a rank's part of a hidden state in bf16
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH  # parameters
ROOT = 2 * VOCABULARY * WIDTH + WIDTH


def peak(checkpoint: str) -> int:
    """By torch's tracker; gradients of an earlier batch are there. Heads go one after the other."""
    make = model_maker(SIZES)[1]
    with fake_group(RANKS):
        setting = Setting(make, 1, RANKS, checkpoint, tile=TILE, accumulated=True)
        return measure(setting, TOKENS).peak


def bound() -> int:
    """Bytes of a rank while the last layer's attention goes backward, the fullest moment."""
    state = (4 + 4 + 8) * (ROOT + LAYERS * LAYER) // RANKS  # parameters, gradients, AdamW in fp32
    gathered = 2 * (ROOT + 2 * LAYER)  # in bf16: the root, this layer, and the one that is next
    head = WIDTH // HEADS
    group = HIDDEN * RANKS // HEADS  # a rank's part of what one of its heads has of all tokens
    buffer = {
        "cosines and sines": 2 * HIDDEN * head // WIDTH,
        "the gradient that passes attention by": HIDDEN,
        "what queries, keys and values are made of": HIDDEN,
        "queries, keys and values of one head": 3 * group,
        "that head's output and its gradient": 2 * group,
        "the gradients of its queries, keys and values": 3 * group,
        "those of the head before, back with their tokens": 3 * group,
        "log-sum-exp of the rank's heads": 4 * TOKENS * HEADS // RANKS,
        # Heads of 16 are rounded up to 32; one more number for each token.
        "the kernel's workspace for one head": 4 * TOKENS * (32 + 1),
        "gradients of this layer's weights": 4 * LAYER,
        "token ids, whole": 8 * TOKENS,
        "counters and factors": 1024,
    }
    return state + LAYERS * HIDDEN + gathered + sum(buffer.values())


def test_a_step_takes_one_input_for_each_layer_and_a_named_buffer() -> None:
    """What the bound has too much is less than half a hidden state: weights' gradients are not all
    in fp32."""
    taken = peak("full")
    assert taken <= bound() <= taken + HIDDEN // 2


def test_one_more_hidden_state_for_each_layer_would_be_seen() -> None:
    """Mode "sequence" keeps attention's output."""
    assert peak("sequence") >= bound() + (LAYERS - 1) * HIDDEN
