"""Ranks of a group that get other data of the same shape at some later call are told so: in that
call on a CPU, in the next one where hashes are read one call late."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compare import Collectives
from tests.pool import Rank, run_on_ranks

LENGTH = 12
FINE = "ran"


class Takes(nn.Module):
    """Token ids, a float input, and a mask in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, *, features: Tensor, extra: dict[str, Tensor]) -> Tensor:
        h = self.linear(self.embedding(ids) + features)
        return torch.where(extra["keep"].unsqueeze(-1), h, 0.0).square().mean()


def batch(step: int, odd: str = "", length: int = LENGTH) -> dict[str, Any]:
    """The data of a step; one input is of another step."""
    given: dict[str, Any] = {}
    for name in ("ids", "features", "keep"):
        seed = step + 1000 * (name == odd)
        generator = torch.Generator().manual_seed(seed)
        if name == "features":
            given[name] = torch.randn(2, length, 8, generator=generator)
        else:
            given[name] = torch.randint(32, (2, length), generator=generator)
    return {**given, "keep": given["keep"] > 8}


def called(model: Any, data: dict[str, Any]) -> str:
    """What a step says."""
    import autosp_dtensor as autosp

    try:
        loss = model(data["ids"], features=data["features"], extra={"keep": data["keep"]})
        if torch.is_grad_enabled():
            loss.backward()
    except autosp.RankMismatchError as error:
        return str(error)
    return FINE


def made(mesh: Any, late: bool) -> Any:
    import autosp_dtensor as autosp
    from autosp_dtensor.api import forward_of
    from autosp_dtensor.run.content import OneCallLate, on_its_way

    model = autosp.parallelize(Takes(), mesh)
    if late:  # as on a device, whose numbers are there later
        forward_of(model).agreement.inputs = OneCallLate(on_its_way)  # type: ignore[union-attr]
    return model


def steps(rank: Rank, late: bool) -> dict[str, list[str]]:
    """Each entry: what the calls said of which one had other data on rank 1."""
    mesh = rank.mesh(sp=rank.world_size)
    odd = rank.rank == 1
    said: dict[str, list[str]] = {}
    said["new"] = [called(made(mesh, late), batch(0, "ids" if odd else ""))]
    model = made(mesh, late)
    said["same"] = [called(model, batch(step)) for step in range(6)]
    for name in ("ids", "features", "keep"):  # one after the other: ranks stay in step
        said[name] = [called(model, batch(7, name if odd else ""))]
        said[name] += [called(model, batch(step)) for step in (8, 9)]
    twin = copy.deepcopy(model)
    said["copy"] = [called(twin, batch(9)), called(model, batch(10, "ids" if odd else ""))]
    said["copy"] += [called(twin, batch(11)), called(model, batch(11))]
    with torch.no_grad():  # too short to be split: each rank's own affair
        said["short"] = [called(model, batch(12, length=1))]
        said["short"] += [called(model, batch(13, "ids" if odd else "", length=1))]
        said["short"] += [called(model, batch(14, length=1))]
    said["shapes"] = [called(model, batch(15, "ids" if odd else ""))]
    said["shapes"] += [called(model, batch(16, length=LENGTH - odd)), called(model, batch(17))]
    return said


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("late", [False, True], ids=["at_once", "one_call_late"])
def test_other_data_at_a_later_call_is_an_error_on_every_rank(n: int, late: bool) -> None:
    argument = {"ids": "0", "features": "features", "keep": "extra.keep"}
    before = " in the call before this one" if late else ""
    title = f"ranks of one sp group were called with different data{before}.\n"
    for said in run_on_ranks(steps, late, n=n):
        assert said.pop("new")[0].startswith(
            "ranks of one sp group were called with different data.\n"
        )
        assert said.pop("same") == [FINE] * 6
        assert said.pop("short") == [FINE] * 3
        shapes = said.pop("shapes")
        assert shapes[0 if not late else 1].startswith(title)
        assert shapes[2] == FINE
        if not late:
            assert "different shapes" in shapes[1]
        for name, texts in said.items():
            place = (name == "copy") + late
            assert [text == FINE for text in texts] == [k != place for k in range(len(texts))], name
            assert texts[place].startswith(title), texts[place]
            differs = argument.get(name, "0")
            others = ", ".join(str(r) for r in range(n) if r != 1)
            for ranks in (others, "1"):
                line = rf" ranks {ranks}: i64\[2, {LENGTH}\].*; differs: argument {differs}\n"
                assert re.search(line, texts[place]), texts[place]
            assert ("checkpoint before it" in texts[place]) == late


def unreadable(rank: Rank, late: bool) -> list[str]:
    """Rank 1 cannot hash its inputs, once."""
    from autosp_dtensor.run import content

    model = made(rank.mesh(sp=2), late)
    said = [called(model, batch(0)), called(model, batch(1))]
    right = content._words

    def fails(tensor: Tensor) -> Tensor:
        raise MemoryError("no room for words")

    try:
        content._words = fails if rank.rank == 1 else right
        said.append(called(model, batch(2)))
    except MemoryError as error:
        said.append(f"own: {error}")
    finally:
        content._words = right
    return [*said, called(model, batch(3)), called(model, batch(4))]


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "one_call_late"])
def test_rank_that_cannot_read_its_inputs_tells_the_others(late: bool) -> None:
    fine, failed = run_on_ranks(unreadable, late, n=2, timeout=60)
    assert failed == [FINE, FINE, "own: no room for words", FINE, FINE]
    assert fine[2].startswith("reading the inputs failed on other ranks of the sp group")
    assert "rank 1: MemoryError: no room for words" in fine[2]
    assert fine[:2] + fine[3:] == [FINE] * 4


def sent(rank: Rank, late: bool) -> list[int]:
    model = made(rank.mesh(sp=2), late)
    counts = []
    for _ in range(3):
        with Collectives() as collectives, torch.no_grad():
            called(model, batch(0))
        counts.append(collectives.counts.get("_allgather_base_", 0))
    return counts


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "one_call_late"])
def test_data_goes_with_the_call_in_one_message(late: bool) -> None:
    first, second, third = run_on_ranks(sent, late, n=2)[0]
    assert first > second == third == 1
