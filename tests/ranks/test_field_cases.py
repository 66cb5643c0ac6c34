"""FIELD-CASES.md, under its numbers: targets at the cuts, scale of the loss, positions.

`CHECKED` is the loss that the file gives for the right program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import models
from tests.compare import assert_same_as_one_device, compare, gather, one_device
from tests.losses import WEIGHT, dpo, label_smoothing, sequence_mean, token_sum
from tests.model_t import IGNORED, ModelT, TConfig, ids_of_t, labels_with_targets
from tests.pool import Rank, run_on_ranks
from tests.ranks.cases import batch_with, checked, shifted, t_on_ranks
from tests.ranks.training import parallelize_then_shard

ALL = range(15)


# label-boundary


@pytest.mark.parametrize("n", [2, 4])
def test_fc_001_no_target_is_lost_at_the_cuts(n: int) -> None:
    assert run_on_ranks(t_on_ranks, TConfig(), batch_with(ALL), n=n) == [checked(4.2528)] * n


@pytest.mark.parametrize("given", ["labels", "shift_labels", "both"])
def test_fc_014_targets_are_shifted_once(given: str) -> None:
    ids = ids_of_t()
    batch = {"ids": ids}
    if given != "shift_labels":
        # With both, the shifted ones win, so these may be anything.
        batch["labels"] = ids if given == "labels" else ids.flip(1)
    if given != "labels":
        batch["shift_labels"] = shifted(ids)
    assert run_on_ranks(t_on_ranks, TConfig(), batch, n=2) == [checked(4.253)] * 2


class LogProbs(ModelT):
    """What RL needs: log p of each next token and the entropy, in order, without the last 3
    pads."""

    def forward(self, ids: Tensor, valid: int) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.embedding(ids)
        logp = self.head(self.hidden(x, None, None))[:, :-1].log_softmax(-1)
        taken = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, : valid - 1]
        entropy = -(logp.exp() * logp).sum(-1)[:, : valid - 1]
        return {"logprobs": taken, "entropy": entropy, "loss": -(taken * entropy.detach()).mean()}


def log_probs(rank: Rank, padded: int, rows: int) -> None:
    ids = F.pad(ids_of_t(rows, 13), (0, padded - 13))
    want = assert_same_as_one_device(
        rank, LogProbs, {"ids": ids, "valid": 13}, rank.mesh(sp=rank.world_size)
    )
    assert want.outputs["logprobs"].shape == (rows, 12)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("padded", [16, 13])
def test_fc_064_log_probs_per_token_in_order(padded: int, rows: int) -> None:
    run_on_ranks(log_probs, padded, rows, n=2)


def keys_of_the_batch(rank: Rank) -> None:
    import autosp_dtensor as autosp

    batch = models.batch_transformers("padding_positions")
    before = {key: value.clone() for key, value in batch.items()}
    model = models.build_transformers("llama")
    want = model(**batch)
    got = autosp.parallelize(model, rank.mesh(sp=2))(**batch)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)  # logits in fp32
    assert list(got.keys()) == list(want.keys())
    assert list(batch) == list(before)
    assert all(torch.equal(batch[key], value) for key, value in before.items())


def test_fc_093_model_keeps_its_loss_and_the_batch_its_keys() -> None:
    run_on_ranks(keys_of_the_batch, n=2)


# loss-scale


def test_fc_004_each_rank_own_mean() -> None:
    slots = (7, 10, 11, 12, 13, 14)
    assert run_on_ranks(t_on_ranks, TConfig(), batch_with(slots), n=2) == [checked(3.996)] * 2


def norm_on_layout(rank: Rank, axes: dict[str, int]) -> float:
    ids = ids_of_t(4)
    groups = axes.get("dp", 1) * axes.get("dp_replicate", 1)
    batches = [{"ids": part, "labels": part} for part in ids.chunk(groups)]
    want = assert_same_as_one_device(
        rank, models.build_t, batches, rank.mesh(**axes), set_up=parallelize_then_shard
    )
    squares = [grad.pow(2).sum() for grad in want.grads.values() if grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def test_fc_005_gradient_norm_is_the_same_on_every_layout() -> None:
    layouts: list[dict[str, int]] = [
        {"dp": 4, "sp": 1},
        {"dp": 2, "sp": 2},
        {"dp": 1, "sp": 4},
        {"dp_replicate": 2, "sp": 2},
    ]
    norms = [run_on_ranks(norm_on_layout, axes)[0] for axes in layouts]
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-12)


def accumulate(
    rank: Rank, slots: list[Any], num_items: Any, with_fsdp: bool, rows_at_once: int = 1
) -> list[float]:
    """One micro-batch for each entry of `slots`, divided by the count of all; returns their
    losses."""
    import autosp_dtensor as autosp

    ids = ids_of_t(len(slots))
    targets = shifted(labels_with_targets(ids, slots))
    mesh = rank.mesh(dp=1, sp=rank.world_size)
    reference = models.build_t()
    token_sum(reference(ids).logits, targets, num_items).backward()
    if with_fsdp:
        model = parallelize_then_shard(models.build_t(), mesh)
    else:
        model = autosp.parallelize(models.build_t(), mesh)
    loss = autosp.parallelize(token_sum, mesh)
    losses = []
    for row in range(0, len(slots), rows_at_once):
        part = slice(row, row + rows_at_once)
        micro = loss(model(ids[part]).logits, targets[part], num_items)
        micro.backward()
        losses.append(micro.item())
    if not with_fsdp:
        autosp.sync_gradients(model)
    got = gather(model, {}, torch.zeros(()), None)
    want = gather(reference, {}, torch.zeros(()), None)
    compare(got, want)
    return losses


@pytest.mark.parametrize("with_fsdp", [False, True], ids=["plain", "fsdp2"])
def test_fc_006_micro_batches_weigh_by_their_targets(with_fsdp: bool) -> None:
    slots = [range(12, 15), range(3, 15)]
    for losses in run_on_ranks(accumulate, slots, 15, with_fsdp, n=2):
        assert sum(losses) == checked(4.674)


def test_fc_008_first_rank_has_no_target() -> None:
    batch = batch_with(range(8, 15))
    assert run_on_ranks(t_on_ranks, TConfig(), batch, n=2) == [checked(4.370)] * 2


def test_fc_008_only_the_last_of_four_ranks_has_a_target() -> None:
    run_on_ranks(t_on_ranks, TConfig(), batch_with((14,)), n=4)


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_fc_022_count_of_the_step_is_used_once(kind: str) -> None:
    count: Any = torch.tensor(15) if kind == "tensor" else 15
    for losses in run_on_ranks(accumulate, [ALL], count, False, n=4):
        assert losses == [checked(4.2528)]


def test_fc_022_count_of_the_step_over_two_accumulation_steps() -> None:
    run_on_ranks(accumulate, [range(8), range(8, 15)], 15, False, n=4)


def loss_of_t(rank: Rank, name: str, slots: Any) -> float:
    ids = ids_of_t(2)
    want = assert_same_as_one_device(
        rank,
        ModelT,
        {"ids": ids, "targets": shifted(labels_with_targets(ids, slots))},
        rank.mesh(sp=rank.world_size),
        loss={"dpo": dpo, "rows": sequence_mean, "smoothing": label_smoothing}[name],
    )
    assert want.loss is not None
    return want.loss.item()


def test_fc_028_dpo_is_taken_of_whole_rows() -> None:
    assert run_on_ranks(loss_of_t, "dpo", ALL, n=2) == [checked(0.440)] * 2


def test_fc_028_mean_over_rows_of_row_means() -> None:
    slots = [range(11, 15), range(3, 15)]
    assert run_on_ranks(loss_of_t, "rows", slots, n=2) == [checked(4.307)] * 2


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 1.0, 1.0, 9.0], dtype=logits.dtype)
    return F.cross_entropy(logits, targets, weight=weight)


def class_weights(rank: Rank) -> float:
    """16 tokens, 4 classes, plain tensors cut along dimension 0."""
    import autosp_dtensor as autosp

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0] * 8 + [3] * 8)
    plain, shared = (logits.clone().requires_grad_() for _ in range(2))
    want = weighted(plain, targets)
    want.backward()
    got = autosp.parallelize(weighted, rank.mesh(sp=2), seq_dim=0)(shared, targets)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(shared.grad, plain.grad, rtol=1e-12, atol=1e-14)
    return got.item()


def test_fc_031_class_weights_are_summed_over_all_ranks() -> None:
    assert run_on_ranks(class_weights, n=2) == [checked(1.646)] * 2
    assert WEIGHT.unique().numel() == WEIGHT.numel(), "no two classes weigh the same in test_losses"


def test_fc_031_label_smoothing_with_uneven_masks() -> None:
    run_on_ranks(loss_of_t, "smoothing", [(0, 7, 8, 9, 10, 11), (2,)], n=2)


class NanAtPads(ModelT):
    """The hidden state of the last 3 tokens is NaN; they have no target."""

    def __init__(self, selected: bool) -> None:
        super().__init__()
        self.selected = selected

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        h = super().hidden(x, position_ids, mask)
        pad = torch.arange(h.shape[1])[:, None] >= 13
        h = torch.where(pad, torch.nan, h)
        # With a selection before the head the gradient is finite on one device, too.
        return torch.where(pad, 0.0, h) if self.selected else h


def nan_at_pads(rank: Rank, selected: bool) -> tuple[float, float]:
    ids = ids_of_t(1, 13)
    short = one_device(ModelT, [{"ids": ids, "labels": ids}])
    padded = F.pad(ids, (0, 3), value=0)
    batch = {"ids": padded, "labels": F.pad(ids, (0, 3), value=IGNORED)}
    want = assert_same_as_one_device(rank, partial(NanAtPads, selected), batch, rank.mesh(sp=4))
    assert want.loss is not None and short.loss is not None
    return want.loss.item(), short.loss.item()


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "left"])
def test_fc_069_nan_at_pads_does_not_reach_the_loss(selected: bool) -> None:
    for padded, short in run_on_ranks(nan_at_pads, selected, n=4):
        assert padded == pytest.approx(short, rel=1e-12)


# positions


@pytest.mark.parametrize("given", [False, True], ids=["made_inside", "given"])
def test_fc_010_positions_count_over_the_whole_sequence(given: bool) -> None:
    more = {"position_ids": torch.arange(16)[None]} if given else {}
    batch = batch_with(ALL, **more)
    assert run_on_ranks(t_on_ranks, TConfig(), batch, n=2) == [checked(4.2528)] * 2


def three_axis_positions(equal_rows: bool) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    made = torch.randint(0, 20, (3, 2, 16), generator=generator)
    return made[:1].expand(3, 2, 16).contiguous() if equal_rows else made


@pytest.mark.parametrize("n", [2, 4])
def test_fc_034_three_axis_positions_are_cut_along_the_last_axis(n: int) -> None:
    batch = batch_with([ALL, (2, 9, 11)], rows=2, position_ids=three_axis_positions(False))
    run_on_ranks(t_on_ranks, TConfig(positions="mrope"), batch, n=n)


@pytest.mark.parametrize("which", ["documents", "reversed", "per_row"])
def test_fc_035_positions_of_the_user_win(which: str) -> None:
    documents = torch.tensor([[*range(5), *range(11)]])
    positions = {
        "documents": documents,
        "reversed": torch.arange(115, 99, -1)[None],
        "per_row": torch.cat([documents, (torch.arange(16)[None] * 7 + 3) % 16]),
    }[which]
    batch = batch_with(ALL, rows=len(positions), position_ids=positions)
    run_on_ranks(t_on_ranks, TConfig(), batch, n=2)


def outputs_in_order(rank: Rank, n: int) -> float:
    want = assert_same_as_one_device(
        rank, ModelT, batch_with(ALL), rank.mesh(sp=n), sharded=["logits"]
    )
    assert want.loss is not None
    return want.loss.item()


@pytest.mark.parametrize("n", [2, 4])
def test_fc_037_outputs_come_in_the_order_of_the_input(n: int) -> None:
    assert run_on_ranks(outputs_in_order, n, n=n) == [checked(4.253)] * n


@pytest.mark.parametrize("rows", [1, 2])
def test_fc_072_row_of_the_table_is_the_position_in_the_whole_sequence(rows: int) -> None:
    """The file gives 4.727 for a table whose values it does not say; this one is drawn last."""
    config = TConfig(positions="learned", table_rows=16)
    losses = run_on_ranks(t_on_ranks, config, batch_with(ALL, rows=rows), n=2)
    if rows == 1:
        assert losses == [checked(5.0233)] * 2


def test_fc_074_length_in_the_rotary_base_is_that_of_the_whole_sequence() -> None:
    config = TConfig(positions="ntk")
    assert run_on_ranks(t_on_ranks, config, batch_with(ALL), n=2) == [checked(4.230)] * 2


def scaled_rope(rank: Rank, kind: str) -> str:
    """transformers decides by the largest position, a value of a tensor: right, or refused."""
    import autosp_dtensor as autosp

    rope = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        "longrope": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 8,
        },
    }[kind]
    family = "phi3" if kind == "longrope" else "llama"
    build = partial(
        models.build_transformers,
        family,
        rope_parameters=rope,
        max_position_embeddings=8 if kind == "dynamic" else 16,
        **({"original_max_position_embeddings": 8} if kind == "longrope" else {}),
    )
    batch = models.batch_transformers("plain")
    want = build()(**batch).loss
    try:
        got = autosp.parallelize(build(), rank.mesh(sp=2))(**batch).loss
    except autosp.CaptureError as error:
        return str(error)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)  # transformers computes in fp32
    return ""


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_fc_074_transformers_scaled_rope_is_right_or_refused(kind: str) -> None:
    texts = run_on_ranks(scaled_rope, kind, n=2)
    assert texts == [texts[0]] * 2
    if texts[0]:
        assert "modeling_rope_utils.py:" in texts[0], texts[0]
