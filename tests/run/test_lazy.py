"""Logits that are made when they are read, and losses by tiles, in a user's hands: hooks, modes,
gradients of gradients, keeping them in a file. On a mesh of one, where everything is computed."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autosp_dtensor as autosp
from autosp_dtensor.errors import UsageError
from tests.run.one_rank import mesh, whole

__all__ = ["mesh"]

IDS = torch.randint(16, (2, 13), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(11, (2, 13), generator=torch.Generator().manual_seed(2))
TARGET[0, :7] = -100


def mean(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Model(nn.Module):
    def __init__(self, classes: int = 11, loss: Callable[..., Tensor] = mean) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, classes)
        self.loss = loss
        self.double()

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Any:
        logits = self.head(self.table(ids).tanh())
        return logits if target is None else (self.loss(logits, target), logits)


def pair(mesh: DeviceMesh) -> tuple[Any, ...]:
    """(split model, split loss), (model, loss)"""
    model = Model()
    split = autosp.parallelize(copy.deepcopy(model), mesh, tile=3)
    return (split, autosp.parallelize(mean, mesh, tile=3)), (model, mean)


def same_gradients(split: nn.Module, model: nn.Module) -> None:
    for (name, got), want in zip(split.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)


def test_hook_on_logits_is_called_and_changes_the_gradient(mesh: DeviceMesh) -> None:
    calls = pair(mesh)
    for model, loss in calls:
        logits = model(IDS)
        logits.register_hook(lambda grad: grad * 2)
        loss(logits, TARGET).backward()
    same_gradients(calls[0][0], calls[1][0])


def test_logits_retain_their_gradient(mesh: DeviceMesh) -> None:
    kept = []
    for model, loss in pair(mesh):
        logits = model(IDS)
        logits.retain_grad()
        loss(logits, TARGET).backward()
        kept.append(whole(logits.grad))
    torch.testing.assert_close(*kept)


def test_hook_that_no_gradient_would_come_to_is_refused(mesh: DeviceMesh) -> None:
    (model, loss), _ = pair(mesh)
    logits = model(IDS)
    with torch.no_grad():
        loss(logits, TARGET)
    logits.register_hook(lambda grad: grad)  # nothing has passed it
    logits = model(IDS)
    loss(logits, TARGET)
    assert logits.pending
    for ask in (lambda: logits.register_hook(lambda grad: grad), logits.retain_grad):
        with pytest.raises(UsageError, match="before they are given to the loss"):
            ask()


def test_inference_mode(mesh: DeviceMesh) -> None:
    (split, _), (model, _) = pair(mesh)
    with torch.inference_mode():
        loss, logits = split(IDS, TARGET)
    want = model(IDS, TARGET)
    assert logits.pending
    torch.testing.assert_close((loss, whole(logits)), tuple(x.detach() for x in want))


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {}], ids=str)
def test_logits_are_not_made_of_parameters_after_a_step(
    mesh: DeviceMesh, kind: dict[str, bool]
) -> None:
    """Fused optimizers change parameters without counting it on them."""
    (split, _), _ = pair(mesh)
    optimizer = torch.optim.AdamW(split.parameters(), **kind)
    loss, logits = split(IDS, TARGET)
    loss.backward()
    optimizer.step()
    with pytest.raises(UsageError, match="has changed"):
        logits.to_local()


@pytest.mark.parametrize("cast", [lambda x: x.to(torch.float32), lambda x: x.float()])
def test_logits_in_another_dtype_are_not_made_either(mesh: DeviceMesh, cast: Any) -> None:
    """What stands around a model casts its results, read or not."""
    (split, _), (model, _) = pair(mesh)
    loss, logits = split(IDS, TARGET)
    found = cast(logits)
    assert found.dtype == torch.float32
    assert found.pending and logits.pending
    want, other = model(IDS, TARGET)
    torch.testing.assert_close(whole(found), other.float())
    assert logits.pending
    (loss + whole(found).square().mean()).backward()
    (want + other.float().square().mean()).backward()
    same_gradients(split, model)


def test_logits_in_a_file_are_a_plain_dtensor(mesh: DeviceMesh) -> None:
    (split, _), _ = pair(mesh)
    logits = split(IDS)
    found = pickle.loads(pickle.dumps(logits))
    assert type(found) is DTensor
    torch.testing.assert_close(found.to_local(), logits.to_local())
    torch.save(split(IDS), io.BytesIO())


@pytest.mark.parametrize("outside", [True, False])
def test_gradients_of_gradients_are_refused(mesh: DeviceMesh, outside: bool) -> None:
    """Autograd would take gradients by tiles for constants."""
    (split, _), _ = pair(mesh)
    loss = whole(split(IDS)).square().mean() if outside else split(IDS, TARGET)[0]
    with pytest.raises(UsageError, match="gradients of gradients"):
        torch.autograd.grad(loss, list(split.parameters()), create_graph=True)


def small(logits: Tensor, target: Tensor) -> Tensor:
    """Each token's term as it is in a batch of many tokens."""
    each = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
    return (each * 2.0**-18).sum()


@pytest.mark.parametrize("autocast", [True, False])
def test_gradients_of_a_scaled_loss_do_not_vanish_in_fp16(mesh: DeviceMesh, autocast: bool) -> None:
    model = Model(loss=small)
    split = copy.deepcopy(model).to(torch.float32 if autocast else torch.float16)
    split = autosp.parallelize(split, mesh, tile=3)
    model(IDS, TARGET)[0].backward()
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = split(IDS, TARGET)[0]
    (loss.float() * 2.0**18).backward()
    for got, want in zip(split.parameters(), model.parameters(), strict=True):
        error = (got.grad.double() / 2**18 - want.grad).norm() / want.grad.norm()
        assert error < 4e-3


class Held(TorchDispatchMode):
    """How many memories of one shape there are at most."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.seen, self.most = shape, [], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.shape == self.shape:
            self.seen.append(weakref.ref(found.untyped_storage()))
            alive = {ref()._cdata for ref in self.seen if ref() is not None}
            self.most = max(self.most, len(alive))
        return found


def test_autocast_casts_a_weight_once_for_all_tiles(mesh: DeviceMesh) -> None:
    """Autocast keeps what it has cast until its block ends."""
    most = []
    for height in (13, 1):
        model = autosp.parallelize(Model(57).float(), mesh, tile=height)
        with torch.autocast("cpu", torch.bfloat16):
            model(IDS, TARGET)
            with Held((57, 8)) as held:
                loss, _ = model(IDS, TARGET)
                loss.backward()
        most.append(held.most)
    assert most[1] <= most[0] + 2


def compiled_loss(logits: Any, target: Tensor) -> Tensor:
    return mean(logits.to_local(), target)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.parametrize("read", [False, True], ids=["not made", "made"])
def test_function_under_torch_compile_takes_logits(mesh: DeviceMesh, read: bool) -> None:
    """As torchtitan compiles its loss: they are made for it, and it is compiled once."""
    (split, _), (model, _) = pair(mesh)
    torch.compiler.reset()
    compiled = torch.compile(compiled_loss, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        logits = split(IDS)
        if read:
            logits.detach()
        total = compiled(logits, TARGET)
        total.backward()
        mean(model(IDS), TARGET).backward()
        same_gradients(split, model)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(split(IDS), TARGET), total)
