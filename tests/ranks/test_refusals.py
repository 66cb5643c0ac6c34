"""What cannot be split is refused: before the first collective, on every rank, with the line and
what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.compare import Collectives
from tests.model_t import ModelT
from tests.pool import Rank, run_on_ranks

HERE = r"test_refusals\.py:\d+"


class Reads(ModelT):
    """Forward reads a value of a tensor in Python, in one of the ways that people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        h = super().hidden(x, position_ids, mask)
        if self.how == "item":
            return h / h.abs().max().item()
        if self.how == "if":
            if (h > 100).any():
                h = h.clamp(-100, 100)
            return h
        if self.how == "tolist":
            return h * len(h[0, 0].tolist())
        if self.how == "int":
            return h * int(h.sum())
        if self.how == "numpy":
            return h * float(h.detach().numpy().mean())
        if self.how == "nonzero":
            return h * h.nonzero().shape[0]
        return h * h[h > 0].numel()


class Counts(nn.Module):
    """Uses an operation that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return torch.histc(x, bins=4).sum() + x.sum()


def refused(rank: Rank, make: Callable[[], nn.Module], *args: Any) -> tuple[str, str, int]:
    """Class and text of the error, and the number of collectives of more than a call's key."""
    import autosp_dtensor as autosp

    model = autosp.parallelize(make(), rank.mesh(sp=2))
    sent = Collectives()
    try:
        with sent:
            model(models.random_ids(), *args)
    except autosp.AutoSPError as error:
        return type(error).__name__, str(error), sent.exchanges()
    return "", "ran", sent.exchanges()


def reads_a_value(rank: Rank, how: str) -> tuple[str, str, int]:
    return refused(rank, lambda: Reads(how))


@pytest.mark.parametrize("how", ["item", "if", "tolist", "int", "numpy", "nonzero", "mask"])
def test_python_that_depends_on_a_value_is_refused_by_the_line(how: str) -> None:
    answers = run_on_ranks(reads_a_value, how, n=2)
    assert answers == [answers[0]] * 2
    name, text, exchanges = answers[0]
    assert name == "CaptureError", text
    assert exchanges == 0
    assert re.search(rf"\n  node  .*{HERE}", text), text
    assert "\n  why   " in text and "\n  fix   " in text, text


def test_item_is_refused_with_this_text() -> None:
    _, text, _ = run_on_ranks(reads_a_value, "item", n=2)[0]
    assert re.sub(r"\.py:\d+", ".py:LINE", text) == (
        "Python reads the value of a tensor: item().\n"
        "  node  test_refusals.py:LINE\n"
        "  have  arg 0 f64[]\n"
        "  why   the program is traced once, without data, and must be the same on every rank\n"
        "  fix   use torch.where or a mask of fixed shape instead, or pass the value to forward as "
        "a Python number"
    )


def counts(rank: Rank) -> tuple[str, str, int]:
    return refused(rank, Counts)


def test_operation_without_a_rule_is_refused_with_op_line_shapes_and_how_to_register() -> None:
    answers = run_on_ranks(counts, n=2)
    assert answers == [answers[0]] * 2
    name, text, exchanges = answers[0]
    assert (name, exchanges) == ("PlacementError", 0)
    assert re.sub(r"\.py:\d+", ".py:LINE", text) == (
        "torch.histc has no rule for a value split over mesh axis 'sp' (size 2).\n"
        "  node  test_refusals.py:LINE, histc\n"
        "  have  arg 0 f32[2, 16@sp, 32]\n"
        "  why   each rank holds a part of the sequence, and it is not known whether the operation "
        "reads across parts\n"
        '  fix   register one: autosp.register_rule(torch.histc, "a b c -> ..."), with [] around '
        "dims that it reads whole"
    )


class Many(nn.Module):
    """Two operations without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return torch.histc(x, bins=4).sum() + torch.renorm(x, 2, 1, 1.0).sum()


def many(rank: Rank) -> tuple[str, str, int]:
    return refused(rank, Many)


def test_all_operations_without_a_rule_are_listed() -> None:
    _, text, _ = run_on_ranks(many, n=2)[0]
    assert "histc" in text and "renorm" in text, text


def histogram(x: Tensor) -> Tensor:
    """Counts of the values of each row of channels; no gradient."""
    edges = torch.linspace(-1, 1, 5, dtype=x.dtype)
    return torch.stack([(x.detach() > e).sum(1) for e in edges], -1).double()


class WithRule(ModelT):
    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        h = super().hidden(x, position_ids, mask)
        return h + self.histogram(h).sum(-1)[:, None, :] / 100


def with_rule(rank: Rank) -> tuple[float, float]:
    """A rule that reads the sequence whole, for a function that is not looked into."""
    import autosp_dtensor as autosp

    made = autosp.register_rule(histogram, "b [s] d -> b d [n]")
    ids = models.random_ids()
    losses = []
    for on_ranks in (False, True):
        model = WithRule()
        model.histogram = made if on_ranks else histogram
        if on_ranks:
            model = autosp.parallelize(model, rank.mesh(sp=2))
        losses.append(model(ids, ids).loss.item())
    return losses[0], losses[1]


def test_registered_rule_makes_the_function_run_whole() -> None:
    for want, got in run_on_ranks(with_rule, n=2):
        assert got == pytest.approx(want, rel=1e-12)


def short(rank: Rank, length: int) -> tuple[str, str]:
    """A sequence with fewer tokens than ranks: right, or refused."""
    import autosp_dtensor as autosp

    ids = models.random_ids(2, length)
    want = ModelT()(ids, ids).loss
    try:
        got = autosp.parallelize(ModelT(), rank.mesh(sp=4))(ids, ids).loss
    except autosp.AutoSPError as error:
        return type(error).__name__, str(error)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
    return "", ""


@pytest.mark.parametrize("length", [2, 3])
def test_sequence_shorter_than_sp_is_right_or_refused(length: int) -> None:
    answers = run_on_ranks(short, length)
    assert answers == [answers[0]] * 4
    if answers[0][0]:
        assert "4" in answers[0][1] and str(length) in answers[0][1]


# The mesh and the options.


def misused(rank: Rank, how: str) -> tuple[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    import autosp_dtensor as autosp

    mesh = rank.mesh(dp=2, sp=1)
    uses: dict[str, Callable[[], Any]] = {
        "no_sp_axis": lambda: autosp.parallelize(ModelT(), rank.mesh(dp=2, tp=1)),
        "no_names": lambda: autosp.parallelize(ModelT(), init_device_mesh("cpu", (2,))),
        "no_mesh": lambda: autosp.parallelize(ModelT(), None),
        "two_axes": lambda: autosp.parallelize(ModelT(), mesh, sp_axis=("dp", "sp")),
        "twice": lambda: autosp.parallelize(autosp.parallelize(ModelT(), mesh), mesh),
        "part_of_it": lambda: autosp.parallelize(inner_is_split(autosp, mesh), mesh),
        "no_callable": lambda: autosp.parallelize(3, mesh),
        "seq_dim": lambda: autosp.parallelize(ModelT(), mesh, seq_dim=-1),
        "same_axes": lambda: autosp.parallelize(ModelT(), mesh, dp_axis="sp"),
        "sync_plain": lambda: autosp.sync_gradients(ModelT()),
        "explain_plain": lambda: autosp.explain(ModelT()),
        "verify_plain": lambda: autosp.verify(ModelT(), models.random_ids()),
        "fsdp_mesh": lambda: autosp.fsdp_mesh(rank.mesh(dp=2, tp=1)),
        "data_shard": lambda: autosp.data_shard(rank.mesh(dp=2, tp=1)),
        "rule": lambda: autosp.register_rule(torch.histc, "a b -> ] c"),
    }
    try:
        uses[how]()
    except autosp.AutoSPError as error:
        return type(error).__name__, re.sub(r"\.py:\d+", ".py:LINE", str(error))
    return "", "ran"


def inner_is_split(autosp: Any, mesh: Any) -> nn.Module:
    model = ModelT()
    autosp.parallelize(model.blocks[1], mesh)
    return model


NO_SP_AXIS = (
    "the mesh has no axis 'sp'.\n"
    "  where {} (test_refusals.py:LINE)\n"
    "  have  axes ('dp', 'tp') of sizes (2, 1)\n"
    "  why   sequences are split over that axis\n"
    '  fix   init_device_mesh(..., mesh_dim_names=("dp", "sp")), or pass sp_axis='
)


@pytest.mark.parametrize(
    ("how", "name", "text"),
    [
        ("no_sp_axis", "MeshError", NO_SP_AXIS.format("parallelize")),
        ("no_names", "MeshError", "the mesh has no axis 'sp'."),
        ("no_mesh", "MeshError", "parallelize needs a DeviceMesh, got NoneType."),
        ("two_axes", "", ""),
        ("twice", "MeshError", "the model is parallelized already."),
        ("part_of_it", "MeshError", "blocks.1 is parallelized already."),
        ("no_callable", "UsageError", "parallelize takes a module or a callable, got int."),
        ("seq_dim", "UsageError", "seq_dim is a dim counted from the left, got -1."),
        ("same_axes", "UsageError", "sp_axis and dp_axis are both 'sp'."),
        ("sync_plain", "UsageError", "sync_gradients takes "),
        ("explain_plain", "UsageError", "explain takes what parallelize gave back."),
        ("verify_plain", "UsageError", "verify takes what parallelize gave back."),
        ("fsdp_mesh", "MeshError", NO_SP_AXIS.format("fsdp_mesh")),
        ("data_shard", "MeshError", NO_SP_AXIS.format("data_shard")),
        ("rule", "UsageError", ""),
    ],
)
def test_misuse_is_refused_where_it_is_made(how: str, name: str, text: str) -> None:
    for got_name, got in run_on_ranks(misused, how, n=2):
        assert got.startswith(text) and got != "ran", got
        assert got_name == name or (not name and got_name), got


def other_device(rank: Rank, where: str) -> tuple[str, str]:
    """Inputs or weights that are not on the mesh's device."""
    import autosp_dtensor as autosp

    ids = models.random_ids()
    model = ModelT()
    if where == "weights":
        with torch.device("meta"):
            model = ModelT()
    model = autosp.parallelize(model, rank.mesh(sp=2))
    try:
        model(ids.to("meta") if where == "inputs" else ids)
    except autosp.AutoSPError as error:
        return type(error).__name__, str(error)
    return "", "ran"


@pytest.mark.parametrize("where", ["inputs", "weights"])
def test_other_device_is_refused(where: str) -> None:
    answers = run_on_ranks(other_device, where, n=2)
    assert answers == [answers[0]] * 2
    name, text = answers[0]
    assert name in ("MeshError", "CaptureError"), text
    assert "meta" in text and "\n  fix   " in text, text


KEPT: list[Tensor] = []


class Writes(ModelT):
    """Forward changes what does not belong to it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.history: list[int] = []

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        if self.what == "input":
            ids.clamp_(max=62)
        elif self.what == "parameter":
            with torch.no_grad():
                self.head.weight.mul_(0.5)
        elif self.what == "outside":
            KEPT.append(self.embedding(ids).mean())
        else:
            self.history.append(ids.shape[1])
        return super().forward(ids, labels)


def writes(rank: Rank, what: str) -> tuple[str, str, int]:
    return refused(rank, lambda: Writes(what))


@pytest.mark.parametrize("what", ["input", "parameter", "list", "outside"])
def test_forward_that_changes_what_is_not_its_own_is_refused(what: str) -> None:
    answers = run_on_ranks(writes, what, n=2)
    assert answers == [answers[0]] * 2
    name, text, exchanges = answers[0]
    assert (name, exchanges) == ("CaptureError", 0), text
    assert "\n  node  " in text and "\n  fix   " in text, text


class CountsSteps(ModelT):
    """A buffer that forward updates is a change of state that is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("usage", torch.zeros(64, dtype=torch.double))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        self.seen += 1
        out = super().forward(ids, labels)
        with torch.no_grad():
            self.usage.copy_(0.9 * self.usage + 0.1 * F.softmax(out.logits, -1).mean((0, 1)))
        return out


def counts_steps(rank: Rank) -> None:
    import autosp_dtensor as autosp

    model, reference = CountsSteps(), CountsSteps()
    model = autosp.parallelize(model, rank.mesh(sp=2))
    ids = models.random_ids()
    for _ in range(3):
        model(ids, ids)
        reference(ids, ids)
    assert int(model.seen) == 3
    torch.testing.assert_close(model.usage, reference.usage, rtol=1e-12, atol=1e-14)


def test_buffers_that_forward_updates_hold_what_one_device_has() -> None:
    run_on_ranks(counts_steps, n=2)
