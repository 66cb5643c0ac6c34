"""The program as text: whole, the same on every rank, within 80 columns."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosp_dtensor as autosp
from autosp_dtensor.errors import UsageError
from autosp_dtensor.explain import size_text
from autosp_dtensor.place.masks import varlen
from tests import reference_attention
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.run.fake_group import fake_mesh


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.rms_norm(x.cumsum(1), (8,)).sum()


def explained(model: nn.Module, *args: Tensor, n: int = 2, rank: int = 0) -> str:
    with fake_mesh(n, rank=rank) as mesh:
        autosp.parallelize(model, mesh, check_ranks=False)
        try:
            model(*args)
            return autosp.explain(model)
        finally:
            del model.__dict__["forward"]


IDS = torch.arange(12)[None] % 16


def test_text_is_this() -> None:
    first = Small.forward.__code__.co_firstlineno
    text = explained(Small(), IDS)
    lines = text.split("\n")
    assert lines[:2] == ["sp=2", ""]
    assert [line for line in lines if line.startswith(("root", "layers"))] == [
        "root",
        "layers.0 and 2 more like it",
    ]
    rows = {line[2:].split()[0]: line for line in reversed(lines) if line[:2] in ("  ", "> ")}
    assert rows["embedding"].startswith("  embedding      f32[1, 12@sp, 8]")
    assert rows["embedding"].endswith(f"test_explain.py:{first + 1}")
    assert rows["all_to_all"].startswith("> all_to_all     f32[1, 12, 8@sp]")
    assert "sends 96 B" in rows["all_to_all"]
    assert rows["all_reduce"].startswith("> all_reduce     f32[]")
    assert text.count("[layers.") == 3
    assert lines[-3].startswith("forward:  1 all_reduce, ")
    assert lines[-2].startswith("backward: 1 all_reduce, ")
    assert lines[-1].startswith("kept for backward: ")


def test_text_is_the_same_on_every_rank_and_fits_a_terminal() -> None:
    model, ids = ModelT(TConfig(layers=2)), ids_of_t(2, 13)
    texts = [explained(model, ids, ids, n=3, rank=rank) for rank in range(3)]
    assert texts == [texts[0]] * 3
    assert max(len(line) for line in texts[0].split("\n")) <= 80


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_are_those_of_the_formula(n: int) -> None:
    """b(n-1)/n^2 for each tensor of an exchange, 2b(n-1)/n for a sum (README)."""
    text = explained(ModelT(TConfig(layers=1)), ids_of_t(2, 16), ids_of_t(2, 16), n=n)
    whole = 2 * 16 * 8 * 8  # one head of all tokens in fp64
    exchange = [line for line in text.split("\n") if line.startswith("> all_to_all")]
    there, back = (line.split("sends ")[1].split("  ")[0].strip() for line in exchange)
    assert back == size_text(4 * whole * (n - 1) / n**2)
    if n == 2:
        assert there == size_text((4 + 2 + 2) * whole * (n - 1) / n**2)
    total = [line for line in text.split("\n") if line.startswith("> all_reduce")]
    assert f"sends {size_text(2 * 8 * (n - 1) / n)}" in total[0]


def test_one_rank_sends_nothing() -> None:
    text = explained(ModelT(TConfig(layers=1)), ids_of_t(2, 16), ids_of_t(2, 16), n=1)
    assert "\n> " not in text
    assert "forward:  no collective; 0 B sent per rank" in text
    assert "backward: no collective; 0 B sent per rank" in text


def test_call_without_gradient_has_no_backward() -> None:
    with torch.no_grad():
        text = explained(Small(), IDS)
    assert "backward: no collective; 0 B sent per rank" in text


def test_kept_bytes_of_a_simple_program_are_counted() -> None:
    """exp keeps its result: 12 tokens of 8 fp32 on 2 ranks."""

    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embedding(ids).exp().sum()

    text = explained(Exp(), IDS)
    (row,) = [line for line in text.split("\n") if line.startswith("  exp")]
    assert "keeps 192 B" in row


class Centred(nn.Module):
    """Layers that take their input's mean over all tokens off it, and attend."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(CentredLayer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class CentredLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.sin() - x.sin().mean(1, keepdim=True)).unflatten(-1, (2, 4))
        q = y.transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def test_exchanges_that_run_again_are_counted_apart_from_other_collectives() -> None:
    with fake_mesh(2) as mesh:
        model = autosp.parallelize(Centred(), mesh, check_ranks=False, checkpoint="full")
        model(IDS)
        lines = autosp.explain(model).split("\n")
    (layer,) = [line for line in lines if "operations run again" in line]
    assert layer.endswith(" operations run again, 1 exchange, 1 all_reduce of them")
    assert "run again in a step: 3 exchanges, 3 all_reduce" in lines
    assert lines[-1].startswith("checkpoint full: ") and max(map(len, lines)) <= 80


def test_what_is_not_parallelized_is_refused_with_this_text() -> None:
    with pytest.raises(UsageError) as error:
        autosp.explain(nn.Linear(2, 2))
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == (
        "explain takes what parallelize gave back.\n"
        "  where explain (test_explain.py:LINE)\n"
        "  have  a Linear that parallelize has not seen\n"
        "  why   programs, mesh and options are kept on what parallelize gave back\n"
        "  fix   call autosp.parallelize(model, mesh) first"
    )


def test_what_was_not_called_is_refused_with_this_text() -> None:
    with fake_mesh(2) as mesh, pytest.raises(UsageError) as error:
        autosp.explain(autosp.parallelize(nn.Linear(2, 2), mesh))
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == (
        "there is no program to explain yet.\n"
        "  where explain (test_explain.py:LINE)\n"
        "  have  no call so far\n"
        "  why   programs are traced at the first call\n"
        "  fix   call the model once"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"),
     (3 << 30, "3.0 GiB"), (2 << 40, "2.0 TiB")],
)  # fmt: skip
def test_sizes_are_written_so(count: int, text: str) -> None:
    assert size_text(count) == text


class Mixed(nn.Module):
    """One attention with each kind of mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.slopes = nn.Parameter(torch.ones(12, 12))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).unflatten(-1, (4, 2)).transpose(1, 2)
        q, k = torch.arange(12)[:, None], torch.arange(12)
        documents = ids.cumsum(1)[:, None] // 20
        masks = [
            None, k <= q, (k <= q) & (q - k < 3),
            (k <= q) & (documents[..., None, :] == documents[..., None]), self.slopes,
        ]  # fmt: skip
        for mask in masks:
            x = x + F.scaled_dot_product_attention(x, x, x, mask)
        return (x + F.scaled_dot_product_attention(x, x, x, is_causal=True)).sum()


def by(text: str) -> list[str]:
    return [line.strip()[3:] for line in text.split("\n") if line.startswith("    by ")]


def test_text_tells_which_kernel_runs_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixed()
    cpu = "tiles: flash-attn does not run on cpu"
    own, proved = "sdpa: no mask", "sdpa: its mask is proved causal"
    rest = ["sdpa: the mask as it is given", "sdpa: is_causal"]
    assert by(explained(model, IDS)) == [own, proved, cpu, cpu, *rest]
    monkeypatch.setattr(varlen, "TAKES", {"cpu": (torch.float32,)})
    with reference_attention.references_here():
        text = explained(model, IDS)
    assert by(text) == [
        own,
        proved,
        "flash-attn: 1 run of keys by windows (2, 0), proved",
        "flash-attn where the mask is runs of keys in the data, else tiles",
        *rest,
    ]
    assert max(map(len, text.split("\n"))) <= 80
