"""Values that wait on the host: the same gradients, each moved once, and gone after backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import autosp_dtensor as autosp
from autosp_dtensor.api import forward_of
from autosp_dtensor.checkpoint import Checkpoint, Frame, Host
from autosp_dtensor.checkpoint.host import Moved
from autosp_dtensor.errors import UsageError
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.run.one_rank import mesh  # noqa: F401

IDS = ids_of_t(2, 13)
LABELS = IDS.clone()
LABELS[0, 3:9] = -100
LARGE = 1 << 30
HIDDEN = 2 * 13 * 32 * 8  # bytes of a region's input
LAYERS = 4
MODES: dict[str, str | Checkpoint] = {
    "none": "none",
    "auto": "auto",
    "full": "full",
    "sequence": "sequence",
    "products": Checkpoint(("products",)),
}


def model_t() -> ModelT:
    return ModelT(TConfig(layers=LAYERS, qk_norm="hidden"))


def made(mesh: DeviceMesh, **options: Any) -> tuple[Any, Host]:  # noqa: F811
    model = autosp.parallelize(model_t(), mesh, **options)
    host = forward_of(model).host  # type: ignore[union-attr]
    assert host is not None
    return model, host


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


PLAIN: dict[tuple[str, int], list[Tensor]] = {}


def plain(mesh: DeviceMesh, mode: str, times: int = 1) -> list[Tensor]:  # noqa: F811
    """Without offload; made once for each mode."""
    if (mode, times) not in PLAIN:
        model = autosp.parallelize(model_t(), mesh, checkpoint=MODES[mode])
        for _ in range(times):
            model(IDS, LABELS).loss.backward()
        PLAIN[mode, times] = gradients(model)
    return PLAIN[mode, times]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("limit", [LARGE, 3 * HIDDEN, 1])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bit_equal_within_any_limit(
    mode: str,
    limit: int,
    mesh: DeviceMesh,  # noqa: F811
) -> None:
    model, host = made(mesh, checkpoint=MODES[mode], offload=limit)
    for _ in range(2):  # the second step uses the first one's buffers
        model.zero_grad()
        loss = model(IDS, LABELS).loss
        assert (host.now > 0) == (limit > 1)
        loss.backward()
        assert host.now == 0
        assert_equal(gradients(model), plain(mesh, mode))
    assert host.peak <= host.taken <= limit
    assert (host.stayed > 0) == (limit < LARGE)
    assert host.late == 0


@pytest.mark.parametrize("mode", MODES)
def test_each_memory_moves_once_each_way(
    mode: str,
    mesh: DeviceMesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    fetched: list[int] = []
    make, fetch = Moved.__init__, Moved.fetch

    def noted(self: Moved, host: Host, transport: Any, tensor: Tensor, buffer: Any) -> None:
        seen.append(tensor.data_ptr())
        make(self, host, transport, tensor, buffer)

    def counted(self: Moved) -> bool:
        needed = fetch(self)
        fetched.extend([id(self)] * needed)
        return needed

    monkeypatch.setattr(Moved, "__init__", noted)
    monkeypatch.setattr(Moved, "fetch", counted)
    model, host = made(mesh, checkpoint=MODES[mode], offload=LARGE)
    loss = model(IDS, LABELS).loss
    assert host.out == host.now
    if mode == "full":
        assert host.out == LAYERS * HIDDEN
    loss.backward()
    assert len(set(fetched)) == len(fetched) <= len(seen)
    assert host.back <= host.out
    if mode == "full":
        assert host.back == (LAYERS - 1) * HIDDEN  # the last region's has not left the device yet


def test_views_and_neighbours_share_one_copy(mesh: DeviceMesh) -> None:  # noqa: F811
    """Keeping all: a region's result is the next one's input; q, k, v look at one memory."""
    model, host = made(mesh, checkpoint="none", offload=LARGE)
    result = model(IDS, LABELS)
    region = next(iter(forward_of(model).last.policy.choices.values()))  # type: ignore[union-attr]
    assert host.now == LAYERS * region.moved
    del result


def test_memory_is_given_up_one_region_later(
    mesh: DeviceMesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a region runs, its own input is on the device, and no earlier one."""
    inputs: list[StorageWeakRef] = []
    alive: list[int] = []
    made_, moved = Frame.made, Moved.__init__

    def seen(self: Moved, *args: Any) -> None:
        moved(self, *args)
        inputs.append(self.storage)

    def at_work(self: Frame, at: int, result: Any) -> None:
        made_(self, at, result)
        alive.append(sum(not each.expired() for each in inputs))

    monkeypatch.setattr(Moved, "__init__", seen)
    monkeypatch.setattr(Frame, "made", at_work)
    model, host = made(mesh, checkpoint="full", offload=LARGE)
    loss = model(IDS, LABELS).loss
    assert len(inputs) == LAYERS and max(alive) <= 2 and alive[-1] == 1
    assert [each.expired() for each in inputs] == [True] * (LAYERS - 1) + [False]
    del loss
    assert host.now == 0


def test_the_region_before_is_fetched_when_backward_comes_to_a_region(
    mesh: DeviceMesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[str, int]] = []
    begin, fetch, make = Frame.begin, Moved.fetch, Moved.__init__
    order: dict[int, int] = {}

    def begins(self: Frame, stage: int) -> None:
        (ref,) = self.moved
        if not stage:
            events.append(("begin", order[id(ref())]))
        begin(self, stage)

    def fetches(self: Moved) -> bool:
        needed = fetch(self)
        if needed:
            events.append(("fetch", order[id(self)]))
        return needed

    def makes(self: Moved, *args: Any) -> None:
        order[id(self)] = len(order)
        make(self, *args)

    monkeypatch.setattr(Frame, "begin", begins)
    monkeypatch.setattr(Moved, "fetch", fetches)
    monkeypatch.setattr(Moved, "__init__", makes)
    model, host = made(mesh, checkpoint="full", offload=LARGE)
    model(IDS, LABELS).loss.backward()
    want = [("begin", 3), ("fetch", 2), ("begin", 2), ("fetch", 1), ("begin", 1), ("fetch", 0)]
    assert events == [*want, ("begin", 0)]
    assert host.ahead == 3 and host.late == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_retained_graph_goes_back_twice(mode: str, mesh: DeviceMesh) -> None:  # noqa: F811
    model, host = made(mesh, checkpoint=MODES[mode], offload=LARGE)
    loss = model(IDS, LABELS).loss
    whole = host.now
    loss.backward(retain_graph=True)
    assert host.now == whole
    loss.backward()
    assert host.now == 0 and host.peak == whole
    assert_equal(gradients(model), plain(mesh, mode, 2))


@pytest.mark.parametrize("turned", [False, True])
def test_forwards_before_their_backwards(turned: bool, mesh: DeviceMesh) -> None:  # noqa: F811
    model, host = made(mesh, checkpoint="sequence", offload=LARGE)
    losses = [model(IDS, LABELS).loss for _ in range(3)]
    assert host.now % 3 == 0 and host.now > 0
    for loss in reversed(losses) if turned else losses:
        loss.backward()
    assert host.now == 0
    assert_equal(gradients(model), plain(mesh, "sequence", 3))


@pytest.mark.parametrize("limit", [LARGE, 10 * HIDDEN, HIDDEN, 1, None])
@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_loss_takes_nothing_along(
    mode: str,
    limit: int | None,
    mesh: DeviceMesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the host's memory nor the device's, whatever is kept of results, and where."""
    frames: list[weakref.ref[Frame]] = []
    make = Frame.__init__

    def noted(self: Frame, *args: Any) -> None:
        make(self, *args)
        frames.append(weakref.ref(self))

    monkeypatch.setattr(Frame, "__init__", noted)
    offload: dict[str, Any] = {} if limit is None else {"offload": limit}
    model = autosp.parallelize(model_t(), mesh, checkpoint=MODES[mode], **offload)
    host = forward_of(model).host  # type: ignore[union-attr]
    gc.disable()  # by reference counts alone: nothing waits for a collection
    try:
        loss = model(IDS, LABELS).loss
        assert host is None or (host.now > 0) == (host.limit > 1)
        assert len(frames) == (0 if mode in ("none", "auto") and limit is None else LAYERS)
        del loss
        assert host is None or host.now == 0
        assert [ref() for ref in frames] == [None] * len(frames)
    finally:
        gc.enable()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("on purpose")


def test_a_backward_that_fails_takes_nothing_along(mesh: DeviceMesh) -> None:  # noqa: F811
    model, host = made(mesh, checkpoint="full", offload=LARGE)
    model(IDS, LABELS)
    hook = model.blocks[1].register_forward_hook(lambda module, args, result: Fails.apply(result))
    loss = model(IDS, LABELS).loss
    assert host.now > 0
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    del loss
    gc.collect()  # the error's traceback held it
    assert host.now == 0
    hook.remove()
    model.zero_grad()
    model(IDS, LABELS).loss.backward()
    assert_equal(gradients(model), plain(mesh, "full"))


def test_without_gradient_nothing_moves(mesh: DeviceMesh) -> None:  # noqa: F811
    model, host = made(mesh, checkpoint="none", offload=LARGE)
    model(IDS, LABELS).loss.backward()
    moved = host.out
    with torch.no_grad():
        model(IDS, LABELS)
    assert host.out == moved and host.now == 0


def test_gradients_of_some_parameters_alone(mesh: DeviceMesh) -> None:  # noqa: F811
    model, host = made(mesh, checkpoint="full", offload=LARGE)
    reference = autosp.parallelize(model_t(), mesh)
    for which in (0, -1):
        got, want = (
            torch.autograd.grad(m(IDS, LABELS).loss, [list(m.parameters())[which]])[0]
            for m in (model, reference)
        )
        assert torch.equal(got, want)
        assert host.now == 0


def test_explain_says_what_waits_where(mesh: DeviceMesh) -> None:  # noqa: F811
    model, _ = made(mesh, checkpoint="sequence", offload=1 << 20)
    model(IDS, LABELS)
    text = autosp.explain(model)
    assert "moves 13.8 KiB to the host: 7.3 KiB of what it keeps, 6.5 KiB of what it" in text
    last = "offload: 55.2 KiB per rank wait in host memory, of 1.0 MiB that may"
    assert text.splitlines()[-1] == last
    assert "host 7.3 KiB" in text


@pytest.mark.parametrize("value", [0, -1, True, "host", 1.5, None])
def test_wrong_options_are_told(value: Any, mesh: DeviceMesh) -> None:  # noqa: F811
    with pytest.raises(UsageError, match='offload is "none", "auto" or a number of bytes'):
        autosp.parallelize(model_t(), mesh, offload=value)


def test_auto_moves_nothing_where_no_memory_is_known(mesh: DeviceMesh) -> None:  # noqa: F811
    model, host = made(mesh, offload="auto")
    model(IDS, LABELS).loss.backward()
    assert host.out == 0 and host.limit > 1 << 20
    assert "offload" not in autosp.explain(model)
