"""The lengths that the README names, by the planner: Llama-3.1-8B on 8 x A100-80GB."""

from __future__ import annotations

import pytest

import autosp_dtensor as autosp

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
HOST = int(1.2 * 2**40)  # bytes of the machine


@pytest.mark.parametrize(
    ("tokens", "checkpoint", "host"),
    [(655_360, "sequence", None), (1_048_576, "full", None), (4_194_304, "auto", HOST)],
    ids=["attention never again", "layers' inputs", "host memory"],
)
def test_a_step_of_8b_fits_eight_gpus(tokens: int, checkpoint: str, host: int | None) -> None:
    """The whole model, at 95% of the memory; without host memory nothing waits there."""
    found = autosp.plan(
        "llama-3.1-8b", (1, 8), gpu="a100-80gb", seq=tokens, checkpoint=checkpoint, host_memory=host
    )
    assert found.gpus == found.sp == 8 and found.step.length == tokens
    assert found.step.peak <= 0.95 * (80 << 30), found
    assert bool(found.step.host) == bool(host) and 8 * found.step.host <= HOST, found
