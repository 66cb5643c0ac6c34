"""Token-wise chains by tiles: the values and all gradients of running them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.checkpoint import Deferred, Tile, tile
from autosp_dtensor.graph import short_name
from tests.simulate import Lowered, Ranks, assert_program_equals_whole, lowered

IDS = torch.randint(16, (2, 13), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(11, (2, 13), generator=torch.Generator().manual_seed(2))
TARGET[0, :7] = -100
TARGET[1, 9:] = 3
WEIGHT = torch.linspace(0.5, 2.0, 11, dtype=torch.float64)
Loss = Callable[[Tensor, Tensor], Tensor]
HEIGHTS = [1, 5, 100]


def tiles(program: Lowered) -> list[Tile]:
    return [node.target for node in program.nodes() if isinstance(node.target, Tile)]


def inside(program: Lowered) -> list[str]:
    """Names of the operations that run by tiles."""
    return [short_name(n.target) for t in tiles(program) for n in t.body.nodes
            if n.op == "call_function"]  # fmt: skip


def names(program: Lowered) -> list[str]:
    """Names of the operations that run whole."""
    return [short_name(n.target) for n in program.nodes() if not isinstance(n.target, Tile)]


def flat(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return x.flatten(0, 1), t.flatten()


def chosen(x: Tensor, t: Tensor) -> Tensor:
    """Log-probabilities of the targets, as preference losses take them."""
    found = x.log_softmax(-1).gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (found * (t != -100)).sum(1).square().mean()


LOSSES: dict[str, Loss] = {
    "plain": lambda x, t: F.cross_entropy(*flat(x, t)),
    "after view": lambda x, t: F.cross_entropy(x.view(-1, 11), t.reshape(-1)),
    "sum": lambda x, t: F.cross_entropy(*flat(x, t), reduction="sum"),
    "each": lambda x, t: F.cross_entropy(*flat(x, t), reduction="none").square().sum(),
    "soft cap": lambda x, t: F.cross_entropy(*flat(3 * torch.tanh(x / 3), t)),
    "scale, view": lambda x, t: F.cross_entropy((x * 0.7).view(-1, 11), t.view(-1)),
    "other index ignored": lambda x, t: F.cross_entropy(*flat(x, t.clamp(min=0)), ignore_index=3),
    "smoothing": lambda x, t: F.cross_entropy(*flat(x, t), label_smoothing=0.1),
    "weights": lambda x, t: F.cross_entropy(*flat(x, t), WEIGHT, label_smoothing=0.2),
    "with z-loss": lambda x, t: (
        F.cross_entropy(*flat(x, t)) + 0.1 * x.logsumexp(-1).square().mean()
    ),
    "divided by a count": lambda x, t: F.cross_entropy(*flat(x, t), reduction="sum") / 5,
    "chosen tokens": chosen,
    "probabilities": lambda x, t: F.cross_entropy(
        x.flatten(0, 1), x.detach().flatten(0, 1).softmax(-1)
    ),
}


class Model(nn.Module):
    """Vectors of 8, logits of 11; `give` says whether logits are a result as well."""

    def __init__(self, loss: Loss, *, give: bool = True, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 11, bias=bias)
        self.loss, self.give = loss, give
        self.double()

    def forward(self, ids: Tensor, target: Tensor) -> Any:
        logits = self.head(self.table(ids))
        loss = self.loss(logits, target)
        return (loss, logits) if self.give else loss


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_by_tiles_is_that_of_one_device(name: str, n: int) -> None:
    for height in HEIGHTS:
        program = assert_program_equals_whole(Model(LOSSES[name]), (IDS, TARGET), n, tile=height)
        assert len(tiles(program)) == 1
        assert "linear" in inside(program) and "linear" not in names(program)
        # Logits as a result are made on demand, not in the step.
        assert len([n for n in program.nodes() if isinstance(n.target, Deferred)]) == 1


@pytest.mark.parametrize("name", ["plain", "with z-loss"])
@pytest.mark.parametrize("give", [True, False])
def test_no_value_as_wide_as_logits_is_left(name: str, give: bool) -> None:
    program = assert_program_equals_whole(
        Model(LOSSES[name], give=give, bias=True), (IDS, TARGET), 2, tile=2
    )
    assert "cross_entropy" in inside(program)
    assert not {"linear", "cross_entropy", "logsumexp", "flatten", "reshape"} & {
        n for n in names(program) if n != "reshape"
    }


@pytest.mark.parametrize("name", LOSSES)
def test_one_sum_has_its_gradients_in_forward(name: str) -> None:
    """What saves nothing but gradients runs nothing again; other losses save what they are made
    of."""
    program = lowered(Model(LOSSES[name], give=False), (IDS, TARGET), 2, tile=4)
    (found,) = tiles(program)
    alone = name not in ("with z-loss", "chosen tokens")
    assert found.sums_once == alone


class Gated(nn.Module):
    def __init__(self, bias: bool, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate, self.up = nn.Linear(8, 20, bias=bias), nn.Linear(8, 20, bias=bias)
        self.down = nn.Linear(20, 8, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class Fused(nn.Module):
    """Gate and up in one product, as some models have it; scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 40), nn.Linear(20, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 20))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.down(F.gelu(gate, approximate="tanh") * up * self.scale)


class Plain(nn.Module):
    """Two layers and a statistic of what is between them, which is a sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.first(x))
        return x + self.second(h), (h > 0).double().mean((0, 1)) + h.sum((0, 1))


class Shared(nn.Module):
    """A wide value that something else reads: it is made whole, so no tile pays."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return x + self.second(h.tanh()), h.flip(1)


class Norm(nn.Module):
    """A norm by hand in a wider dtype, with a narrow value on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = x.double()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.weight * h.to(x.dtype)


MLPS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gated": (
        lambda: Gated(False, F.silu),
        ["rms_norm", "linear", "silu", "linear", "mul", "linear", "add"],
    ),
    "with biases": (
        lambda: Gated(True, F.gelu),
        ["rms_norm", "linear", "gelu", "linear", "mul", "linear", "add"],
    ),
    "gate and up in one": (Fused, []),
    "a sum beside": (Plain, []),
}


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([make() for _ in range(blocks)])

    def forward(self, ids: Tensor) -> Any:
        x, more = self.table(ids), []
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x, other = x
                more.append(other)
        return x.cos(), more


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", MLPS)
def test_mlp_by_tiles_is_that_of_one_device(name: str, n: int) -> None:
    make, body = MLPS[name]
    for height in HEIGHTS:
        program = assert_program_equals_whole(Stack(make).double(), (IDS,), n, tile=height)
        assert len(tiles(program)) == 2, "one for each block"
        assert "linear" not in names(program)
        assert not body or inside(program) == body * 2


def test_wide_value_that_others_read_stays_whole() -> None:
    program = assert_program_equals_whole(Stack(Shared).double(), (IDS,), 2, tile=3)
    assert not tiles(program)


def test_narrow_value_between_wide_ones_is_in_the_tile() -> None:
    program = assert_program_equals_whole(Stack(Norm), (IDS,), 2, tile=3)
    assert len(tiles(program)) == 2
    assert {"rsqrt", "mean"} <= {*inside(program)}


class NormedMLP(nn.Module):
    """A norm by hand before an MLP, and the sum with what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def test_norm_and_residual_join_the_mlp() -> None:
    """All of it is one tile: its input and its output are all that backward holds."""
    program = assert_program_equals_whole(Stack(NormedMLP).double(), (IDS,), 2, tile=3)
    assert len(tiles(program)) == 2
    assert set(names(program)) <= {"slice", "embedding", "cos", "scale_grad", "getitem"}
    for found in tiles(program):
        assert sum(cut is not None for cut in found.cuts) == 1


class NormedHead(nn.Module):
    """A norm by hand before the final projection; logits are a result as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.head = nn.Embedding(16, 8), Norm(), nn.Linear(8, 11)

    def forward(self, ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(self.table(ids)))
        return F.cross_entropy(*flat(logits, target)), logits


@pytest.mark.parametrize("n", [1, 2, 3])
def test_norm_before_the_final_projection_joins_the_loss(n: int) -> None:
    """So its copies in a wider dtype exist for one tile, though logits are a result: those are made
    of what the norm takes, too.
    """
    program = assert_program_equals_whole(NormedHead().double(), (IDS, TARGET), n, tile=3)
    assert {"rsqrt", "mean", "linear", "cross_entropy"} <= {*inside(program)}
    assert not {"rsqrt", "mean", "linear", "mul"} & {*names(program)}


def test_small_chains_are_left_alone_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(LOSSES["plain"], give=False)
    assert not tiles(lowered(model, (IDS, TARGET), 2, tile="auto"))
    monkeypatch.setattr(tile, "LEAST_BYTES", 1)
    monkeypatch.setattr("autosp_dtensor.checkpoint.tiling.LEAST_BYTES", 1)
    assert not tiles(lowered(model, (IDS, TARGET), 2, tile="auto")), "one tile would hold it"
    monkeypatch.setattr(tile, "LEAST_TOKENS", 4)
    monkeypatch.setattr(tile, "TILE_BYTES", 4 * 11 * 8)
    (found,) = tiles(lowered(model, (IDS, TARGET), 2, tile="auto"))
    assert found.count == 4  # 14 tokens of rank 0, 4 at a time
    assert not tiles(lowered(Stack(Plain), (IDS,), 2, tile="auto")), "MLPs cost time in backward"


@pytest.mark.parametrize("made", ["in forward", "in backward"])
def test_gradients_of_weights_are_added_up_in_fp32(made: str) -> None:
    """512 tiles of one token, whose terms are exact in bf16 and whose sum is in fp32: it is rounded
    once. Added up in bf16 it would stop to grow where a term is less than half a unit of it.
    """
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 8).bfloat16())
    table = nn.Parameter((torch.rand(512, 8) + 0.5).bfloat16())
    ids = torch.arange(512)[None]

    def call(ids: Tensor) -> Tensor:
        each = F.linear(F.embedding(ids, table), weight).float().sum(-1)
        return each.sum() if made == "in forward" else each

    program = lowered(call, (ids,), 1, tile=1)
    (found,) = tiles(program)
    assert "linear" in inside(program)
    assert found.count == 512 and found.sums_once == (made == "in forward")
    ((result,),) = Ranks(1, program.state).run(program.root, [[ids]])
    (got,) = torch.autograd.grad(result.sum(), weight)
    assert torch.equal(got, table.detach().double().sum(0).bfloat16().expand(40, -1))


def test_what_a_tile_saves_is_nobody_elses() -> None:
    """Hooks on saved tensors around a call (a region's, torch's save_on_cpu) are told of what lives
    until backward, here of gradients, and not of one tile's logits.
    """
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    program = lowered(Model(LOSSES["plain"], give=False), (IDS, TARGET), 1, tile=5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ((loss,),) = Ranks(1, program.state).run(program.root, [[IDS], [TARGET]])
    shapes = [tuple(each.shape) for each in packed]
    assert (16, 8) in shapes and (11, 8) in shapes
    assert not [shape for shape in shapes if shape[-1:] == (11,)], shapes
    loss.backward()
