"""Training state is torch's: saved on one mesh, loaded on another, or without the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests import models
from tests.compare import dp_index
from tests.model_t import ModelT, TConfig
from tests.pool import Rank, run_on_ranks
from tests.ranks.training import (
    adamw,
    assert_state_close,
    batches_of_t,
    parallelize_then_shard,
    train_on_ranks,
    train_one_device,
)

BUILDS = {
    "t": ModelT,
    "tied": lambda: ModelT(TConfig(tied=True)),
    "lora": lambda: ModelT(TConfig(lora_rank=2)),
}
# How the loading run is laid out; the rows of the batch are those of two dp groups throughout.
LOADED = {"sp4": {"sp": 4}, "dp2_sp2": {"dp": 2, "sp": 2}, "dp4_sp1": {"dp": 4, "sp": 1}}
STEPS = 2


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def saved(rank: Rank, name: str, folder: str) -> list[str]:
    """Two steps on dp2 x sp2, then save; returns the keys of the state."""
    mesh = rank.mesh(dp=2, sp=2)
    model = parallelize_then_shard(BUILDS[name](), mesh)
    optimizer = adamw(model)
    train_on_ranks(model, batches_of_t(), mesh, STEPS, optimizer)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    return sorted(state["model"])


def resumed(rank: Rank, name: str, folder: str, axes: dict[str, int]) -> None:
    """Load onto another layout; the next step equals the third step of one device."""
    mesh = rank.mesh(**axes)
    groups = axes.get("dp", 1)
    batches = batches_of_t()
    reference, losses = train_one_device(BUILDS[name], batches, STEPS + 1)
    model = parallelize_then_shard(BUILDS[name](), mesh)
    optimizer = adamw(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if groups == 1:  # both batches, one after the other
        got = []
        for batch in batches:
            loss = model(**batch).loss
            (loss / 2).backward()
            got.append(loss.item())
        want = losses[-1]
        optimizer.step()
    else:
        mine = dp_index(mesh) % 2
        got = train_on_ranks(model, [batches[mine]], mesh, 1, optimizer)
        want = [losses[-1][mine]]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-7, atol=0)
    assert_state_close(model, reference, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """One checkpoint for each kind of model, written by dp2 x sp2."""
    made = {}
    for name in BUILDS:
        folder = tmp_path_factory.mktemp(name)
        keys = run_on_ranks(saved, name, str(folder))
        assert keys == [keys[0]] * 4
        made[name] = (folder, keys[0])
    return made


@pytest.mark.parametrize("name", BUILDS)
def test_saved_keys_are_those_of_the_plain_model(checkpoints: dict, name: str) -> None:
    assert checkpoints[name][1] == sorted(BUILDS[name]().state_dict())


@pytest.mark.parametrize("axes", LOADED.values(), ids=LOADED)
@pytest.mark.parametrize("name", BUILDS)
def test_next_step_after_loading_on_another_mesh(
    checkpoints: dict, name: str, axes: dict[str, int]
) -> None:
    run_on_ranks(resumed, name, str(checkpoints[name][0]), axes)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_checkpoint_loads_in_one_process_without_the_library(checkpoints: dict, name: str) -> None:
    batches = batches_of_t()
    _, losses = train_one_device(BUILDS[name], batches, STEPS + 1)
    model = BUILDS[name]()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(checkpoints[name][0]))
    model.load_state_dict(state["model"])
    got = [model(**batch).loss.item() for batch in batches]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(losses[-1]), rtol=1e-7, atol=0)


def plain_state(rank: Rank, folder: str) -> None:
    """A model under neither FSDP2 nor DDP: `state_dict`, `torch.save`, `load_state_dict`."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(sp=2)
    model = autosp.parallelize(models.build_t(), mesh)
    batch = batches_of_t(1)[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(**batch).loss.backward()
    assert sorted(model.state_dict()) == sorted(before) == sorted(ModelT().state_dict())
    path = Path(folder) / f"{rank.rank}.pt"
    torch.save(model.state_dict(), path)
    other = ModelT()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other = autosp.parallelize(other, mesh)
    other(**batch)  # the program is traced before the weights are loaded
    other.load_state_dict(torch.load(path))
    torch.testing.assert_close(other(**batch).loss, model(**batch).loss, rtol=0, atol=0)


def test_state_dict_of_a_plain_model_saves_and_loads(tmp_path: Path) -> None:
    run_on_ranks(plain_state, str(tmp_path), n=2)


def assigned(rank: Rank) -> None:
    """`load_state_dict(assign=True)` and `model.head.weight = ...` put new tensors in place of the
    traced ones."""
    import autosp_dtensor as autosp

    model = autosp.parallelize(models.build_t(), rank.mesh(sp=2))
    batch = batches_of_t(1)[0]
    model(**batch)
    doubled = {key: 2 * value for key, value in ModelT().state_dict().items()}
    model.load_state_dict(doubled, assign=True)
    reference = ModelT()
    reference.load_state_dict(doubled)
    torch.testing.assert_close(model(**batch).loss, reference(**batch).loss, rtol=1e-12, atol=0)
    for each in (model, reference):
        each.head.weight = nn.Parameter(torch.full_like(each.head.weight, 0.1).cumsum(0))
    torch.testing.assert_close(model(**batch).loss, reference(**batch).loss, rtol=1e-12, atol=0)


def test_parameters_assigned_after_the_first_call_are_the_ones_used() -> None:
    run_on_ranks(assigned, n=2)


def in_between(rank: Rank, folder: str) -> None:
    """Train, evaluate, save, train, save: what is saved loads without the library."""
    mesh = rank.mesh(dp=2, sp=2)
    model = parallelize_then_shard(ModelT(), mesh)
    optimizer = adamw(model)
    batches = batches_of_t()
    for round_ in range(2):
        train_on_ranks(model, batches, mesh, 1, optimizer)
        model.eval()
        with torch.no_grad():
            loss = model(**batches[0]).loss
        model.train()
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank.rank == 0:
            torch.save({"state": state, "loss": loss}, Path(folder) / f"{round_}.pt")


def test_saves_between_training_and_evaluation(tmp_path: Path) -> None:
    run_on_ranks(in_between, str(tmp_path))
    for round_ in range(2):
        found = torch.load(tmp_path / f"{round_}.pt")
        model = ModelT()
        model.load_state_dict(found["state"])
        with torch.no_grad():
            loss = model(**batches_of_t()[0]).loss
        torch.testing.assert_close(loss, found["loss"], rtol=1e-10, atol=0)
