"""Attention by groups of heads under a policy: gradients of a run that keeps all, bit for bit; and
sums over groups in bf16 err hardly more than one product does."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autosp_dtensor as autosp
from autosp_dtensor.checkpoint.kinds import is_attention
from autosp_dtensor.graph import facts
from autosp_dtensor.run import compile
from tests.checkpoint.test_stages import BODIES, MODES, Model, all_cuts, asked
from tests.place.test_head_groups import IDS
from tests.run.one_rank import mesh, whole  # noqa: F401
from tests.run.test_codegen import Ran
from tests.simulate import lowered

__all__ = ["all_cuts"]

GROUPED = {name: BODIES[name] for name in ("plain", "gated", "twice", "difference")}
RUNS = [
    *(("plain", mode, 2) for mode in MODES),
    *((name, "full", 2) for name in ("gated", "difference")),
    *(("twice", mode, n) for mode, n in (("full", 1), ("sequence", 2), ("exchanges", 2))),
]


@pytest.mark.parametrize(("name", "mode", "n"), RUNS)
@pytest.mark.usefixtures("all_cuts")
def test_gradients_are_those_of_a_run_that_keeps_all(name: str, mode: str, n: int) -> None:
    model = Model(GROUPED[name])
    del model.blocks[1]
    kept, again = (Ran(model, (IDS,), n, policy=p, tile=64) for p in (None, asked(MODES[mode])))
    for a, b in zip([*kept.results, *kept.grads], [*again.results, *again.grads], strict=True):
        assert torch.equal(a, b)
    calls = {facts(node).turn for node in again.program.nodes() if is_attention(node)}
    attentions = 2 if name in ("twice", "difference") else 1
    assert calls == {(k, group) for k in range(attentions) for group in range(4 // n)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain", "twice"])
@pytest.mark.usefixtures("all_cuts")
def test_each_group_runs_once_again_at_most(name: str, mode: str) -> None:
    program = lowered(Model(GROUPED[name]), (IDS,), 2, tile=64)
    ((region, choice),) = asked(MODES[mode])(program).choices.items()
    nodes = list(region.graph.nodes)
    runs = Counter(k for stage in choice.stages.each for k in stage.again)
    attention = [k for k, node in enumerate(nodes) if is_attention(node)]
    assert len(attention) == (4 if name == "twice" else 2)
    assert all(runs[k] == (mode != "sequence") for k in attention)


@pytest.mark.parametrize("checkpoint", ["full", "sequence"])
def test_what_auto_takes_runs(
    checkpoint: str,
    mesh: DeviceMesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile, "LEAST_GROUP", 1)
    monkeypatch.setattr(compile, "_is_better", lambda *_: True)
    model = Model(GROUPED["plain"])
    reference = copy.deepcopy(model)
    model = autosp.parallelize(model, mesh, checkpoint=checkpoint)
    for each in (model, reference):
        whole(each(IDS)).square().sum().backward()
    want = {name: p.grad for name, p in reference.named_parameters()}
    got = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert "heads 2 of 4" in str(autosp.explain(model))


WIDE, COUNT, TOKENS = 128, 16, 96


class Rounded(nn.Module):
    """A layer of sixteen heads, so that sixteen groups' gradients are added."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, WIDE)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))
        self.bfloat16().to(dtype)  # the same numbers in either

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y = F.rms_norm(x, (WIDE,))
        q, k, v = (
            p(y).unflatten(-1, (COUNT, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (self.o(y.transpose(1, 2).flatten(2)) * x.detach()).sum(1)


def errors(n: int, **tile: int) -> Tensor:
    """Of each parameter's gradient in bf16, by norms, against one device in fp64."""
    ids = torch.randint(16, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    model, exact = Rounded(torch.bfloat16), Rounded(torch.float64)
    got, want = Ran(model, (ids,), n, **tile), Ran(exact, (ids,), 1)
    calls = sum(is_attention(node) for node in got.program.nodes())
    assert calls == (COUNT // n if tile else 1)
    pairs = zip(got.grads, want.grads, strict=True)
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs])


@pytest.mark.parametrize("n", [1, 2])
def test_gradients_in_bf16_err_hardly_more(n: int) -> None:
    whole, grouped = errors(n), errors(n, tile=1024)
    assert (grouped <= 1.3 * whole).all(), "1.14 on one rank, of what is in front of projections"
    assert torch.equal(grouped[1:], whole[1:]), "a weight's rows are of one group each"
    assert grouped[0] != whole[0]
