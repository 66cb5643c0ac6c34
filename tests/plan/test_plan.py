"""Plans: predicted bytes are those of real tensors; the search finds the border."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import autosp_dtensor as autosp
from autosp_dtensor.__main__ import main
from autosp_dtensor.cost import DEVICES
from autosp_dtensor.errors import UsageError
from autosp_dtensor.plan.configs import model_maker, presets, shallow_maker
from autosp_dtensor.plan.measure import Setting, Step, fake_group, measure
from autosp_dtensor.plan.search import find, longest

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[None]:
    with fake_group(4):
        yield


def setting(**changes: Any) -> Setting:
    return Setting(model_maker(TINY)[1], **{"dp": 1, "sp": 4, "checkpoint": "none", **changes})


@pytest.mark.parametrize(
    ("dp", "sp", "checkpoint"), [(1, 4, "none"), (2, 2, "sequence"), (2, 2, "full"), (4, 1, "none")]
)
def test_prediction_is_what_real_tensors_take(
    group: None, dp: int, sp: int, checkpoint: str
) -> None:
    """The same tracker on tensors with data, within 2%."""
    each = setting(dp=dp, sp=sp, checkpoint=checkpoint, batch=2)
    fake, real = measure(each, 512), measure(each, 512, fake=False)
    assert fake.peak == pytest.approx(real.peak, rel=0.02)
    assert fake.kinds["kept for backward"] == pytest.approx(
        real.kinds["kept for backward"], rel=0.02
    )


@pytest.mark.parametrize(
    ("sp", "options", "runs"),
    [
        (4, {"checkpoint": "none", "tile": 64}, r"tiles x4"),  # of 256 tokens of a rank
        (2, {"checkpoint": "full", "tile": 64}, r"2 groups of heads"),
        (2, {"checkpoint": "auto", "budget": 5 << 20}, r"checkpoint auto: regions keep [1-9]"),
    ],
    ids=["tiles", "heads", "auto"],
)
def test_prediction_is_right_for_what_runs_in_parts_or_again(
    group: None, monkeypatch: pytest.MonkeyPatch, sp: int, options: dict[str, Any], runs: str
) -> None:
    texts: list[str] = []

    def explained(model: Any) -> str:
        texts.append(autosp.explain(model))
        return texts[-1]

    monkeypatch.setattr(sys.modules[measure.__module__], "explain", explained)
    shallow = {**TINY, "num_hidden_layers": 2}
    each = Setting(model_maker(shallow)[1], 4 // sp, sp, **{"batch": 2, **options})
    fake, real = measure(each, 512), measure(each, 512, fake=False)
    assert all(re.search(runs, text) for text in texts) and len(texts) == 2, texts[0]
    assert fake.peak == pytest.approx(real.peak, rel=0.02)
    assert fake.peak < 0.9 * measure(replace(each, checkpoint="none", tile="none"), 512).peak


def test_what_is_still_here_when_backward_comes_is_given_up_in_turn(group: None) -> None:
    """The last layers' values have not left yet. A tensor without data must not be held by what
    torch keeps of the operations that it went through."""
    each = setting(checkpoint="sequence", host=1 << 30, budget=1 << 20, batch=2)
    step = measure(each, 512, history=True)
    assert step.host > 0
    assert max(live["kept for backward"] for live in step.history) > 0
    assert step.history[-1]["kept for backward"] == 0


@pytest.mark.parametrize(("batch", "out"), [(1, [1]), (2, [1, 2, 1])])
def test_exchange_buffers_are_what_is_packed_and_received(
    group: None, batch: int, out: list[int]
) -> None:
    """In units of a rank's part b/n of a hidden state of b bytes. q, k and v go together: 3 are
    packed, 3 more received, until the packed ones are let go. The result of one row goes from where
    it lies; its gradient is packed. So forward sends 4 b/n, and backward as much.
    """
    sizes = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 4}
    each = Setting(model_maker(sizes)[1], 1, 4, "none", batch=batch, device=DEVICES["a100-80gb"])
    step = measure(each, 512, history=True)
    part = batch * 512 * TINY["hidden_size"] * 2 // 4  # type: ignore[operator]
    held = [key for key, _ in groupby(live["exchange buffers"] / part for live in step.history)]
    forward, backward = [0, 3, 6, 3, 0, *out, 0], [1, 2, 1, 0, 3, 6, 3, 0]
    assert held == forward + backward
    assert step.exchange == 6 * part
    assert max(sum(live.values()) for live in step.history) == step.peak


def test_most_of_exchange_buffers_stands_in_the_table() -> None:
    """q, k and v, packed and received: 6 parts of 128 KiB. It is seldom at the peak."""
    sizes = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 4}
    found = autosp.plan(sizes, (1, 4), seq=4096)
    assert found.step.exchange == 6 * 4096 * 64 * 2 // 4
    assert re.search(r"most in exchanges +768.0 KiB  of exchange buffers", str(found)), found
    assert "exchange" not in str(autosp.plan(sizes, (4, 1), seq=512))


def test_what_waits_on_the_host_leaves_the_device(group: None) -> None:
    """Of real tensors the same bytes; all inputs but the last two regions' are gone at the peak."""
    deep = Setting(model_maker({**TINY, "num_hidden_layers": 6})[1], 1, 4, "full")
    moved = replace(deep, host=1 << 30)
    plain, fake, real = measure(deep, 2048), measure(moved, 2048), measure(moved, 2048, fake=False)
    assert fake.peak == pytest.approx(real.peak, rel=0.02)
    hidden = 2048 // 4 * 64 * 2
    assert plain.host == 0 and fake.host == real.host == 6 * hidden
    assert plain.peak - fake.peak >= 4 * hidden * 0.98
    assert "wait in host memory" in fake.note


def test_host_memory_is_not_exceeded(group: None) -> None:
    bound = 300_000
    step = measure(setting(checkpoint="none", host=bound), 4096)
    assert 0 < step.host <= bound


def test_tracing_leaves_the_host_to_the_step(group: None) -> None:
    """With room for one forward's values alone, all of them wait there."""
    deep = Setting(model_maker({**TINY, "num_hidden_layers": 6})[1], 1, 4, "full")
    bytes_of_inputs = 6 * (2048 // 4 * 64 * 2)
    plenty, enough = (
        measure(replace(deep, host=host), 2048) for host in (1 << 30, bytes_of_inputs)
    )
    assert (enough.host, enough.peak) == (plenty.host, plenty.peak)
    assert enough.host == bytes_of_inputs


def test_auto_uses_the_host_where_its_budget_asks_for_it(group: None) -> None:
    whole = measure(setting(), 8192).peak
    large = measure(setting(checkpoint="auto", budget=2 * whole, host=1 << 30), 8192)
    assert large.host == 0 and large.peak == whole
    deep = Setting(model_maker({**TINY, "num_hidden_layers": 6})[1], 1, 4, "full")
    full = measure(deep, 8192).peak
    tight = replace(deep, checkpoint="auto", budget=full - 300_000, host=1 << 30)
    small = measure(tight, 8192)
    assert small.host > 0 and small.peak < full


def test_less_is_kept_where_more_runs_again(group: None) -> None:
    peaks = [measure(setting(checkpoint=c), 4096).peak for c in ("none", "sequence", "full")]
    assert peaks[0] > peaks[1] >= peaks[2]


def test_auto_stays_within_its_budget(group: None) -> None:
    whole = measure(setting(), 8192).peak
    full = measure(setting(checkpoint="full"), 8192).peak
    for budget in (whole + (1 << 20), (whole + full) // 2):
        assert measure(setting(checkpoint="auto", budget=budget), 8192).peak <= budget


@pytest.mark.parametrize("border", [1024, 5_000, 33_000, 1_000_000])
@pytest.mark.parametrize("bend", [0.4, 1.0, 1.3, 3.0])
@pytest.mark.parametrize("start", [0.0, 0.5, 0.97, 2.0])
def test_search_finds_the_border(border: int, bend: float, start: float) -> None:
    """Also where memory grows faster or slower from some length on, and from a wrong guess."""
    tried: list[int] = []

    def at(length: int) -> Step:
        tried.append(length)
        extra = max(0, length - 20_000) * (bend - 1)
        return Step(length, int(1000 + 10 * (length + extra)), {}, "", 0.0)

    capacity = at(border).peak
    tried.clear()
    found = longest(at, capacity, 1024, int(start * border))
    assert found.peak <= capacity
    assert border - found.length < max(2048, border // 40)
    assert len(tried) <= 8


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_search_by_shallow_models_measures_the_whole_one_once(group: None, checkpoint: str) -> None:
    """And that is at the border: what it says of the whole model is right."""
    sizes = {**TINY, "num_hidden_layers": 14, "hidden_size": 128}
    whole = Setting(model_maker(sizes)[1], 1, 4, checkpoint)
    capacity = 600 << 20
    seen: list[tuple[int, int]] = []
    make, layers = shallow_maker(sizes)
    found = find(whole, capacity, lambda s, n: seen.append((n, s.length)), make, layers)
    assert [length for n, length in seen if n == 0] == [found.length]
    assert found.peak <= capacity
    assert measure(whole, int(found.length * 1.03) // 4 * 4).peak > capacity


@pytest.mark.parametrize("ranks", [64, 1024])
def test_many_ranks_are_planned_here(ranks: int) -> None:
    sizes = {**TINY, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 256}
    found = autosp.plan(sizes, (ranks // 64, 64), seq=64 * 128, checkpoint="full")
    assert found.fits and found.gpus == ranks


def test_a_thousand_ranks_take_no_longer_to_plan_than_eight() -> None:
    """Per rank there is little work: neither FSDP2's chunks nor placing goes through all ranks."""
    sizes = {
        **TINY, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 2048,
        "num_hidden_layers": 4,
    }  # fmt: skip
    seconds = {}
    for dp, sp in ((1, 8), (1, 8), (128, 8), (1, 1024)):  # the first also imports
        with fake_group(dp * sp):
            start = time.process_time()
            measure(Setting(model_maker(sizes)[1], dp, sp, "full"), 1 << 16)
            seconds[dp, sp] = time.process_time() - start
    assert seconds[128, 8] < 1.5 * seconds[1, 8]
    assert seconds[1, 1024] < 2 * seconds[1, 8]


def test_history_of_a_step_has_its_peak(group: None) -> None:
    step = measure(setting(), 1024, history=True)
    assert max(sum(live.values()) for live in step.history) == step.peak


def test_plan_is_a_table_that_names_what_takes_memory() -> None:
    found = autosp.plan(TINY, (1, 2), gpu="a100-40gb", seq=1024, checkpoint="full")
    text = str(found)
    assert found.fits and found.longest is None
    assert "1,024 tokens" in text and "optimizer" in text and "fits" in text


def test_plan_tells_of_host_memory() -> None:
    found = autosp.plan(
        {**TINY, "num_hidden_layers": 6}, (1, 4), gpu="a100-40gb", seq=4096, checkpoint="full",
        host_memory=1 << 30, machine=2,
    )  # fmt: skip
    assert found.host == 1 << 29
    assert "host memory of one rank" in str(found) and "512.0 MiB" in str(found)
    with pytest.raises(UsageError, match="positive"):
        autosp.plan(TINY, (1, 2), seq=512, host_memory=0)


def test_presets_are_models_that_can_be_made() -> None:
    for name, sizes in presets().items():
        assert sizes["hidden_size"] % 64 == 0, name
        assert sizes["num_attention_heads"] % sizes["num_key_value_heads"] == 0, name


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-8b", "qwen3-32b"])
def test_presets_are_planned(name: str) -> None:
    """One layer of each family and size: heads, head sizes and norms of its own."""
    found = autosp.plan({**presets()[name], "num_hidden_layers": 1}, (1, 8), seq=4096)
    assert found.fits and found.step.kinds["optimizer"] > 0


def test_depth_is_known_by_whatever_name_a_config_has_for_it() -> None:
    sizes = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 20, "vocab_size": 64}
    make, layers = shallow_maker(sizes)
    assert make is not None and layers == 20
    assert len(make(3)().transformer.h) == 3  # type: ignore[union-attr,arg-type]
    assert shallow_maker({**sizes, "layer_types": []})[0] is None


def test_auto_is_searched_by_what_it_keeps_at_the_border(group: None) -> None:
    """Below, it fills the memory that there is: its peaks say nothing of how far it goes."""
    capacity = measure(setting(checkpoint="full"), 8192).peak
    steps: list[Step] = []
    auto = setting(checkpoint="auto", budget=capacity)
    found = find(auto, capacity, lambda step, _: steps.append(step))
    assert found.peak <= capacity and found.length >= 8192 * 0.98
    assert len(steps) <= 7


def test_plan_needs_a_process_of_its_own(group: None) -> None:
    with pytest.raises(UsageError, match="process of its own"):
        autosp.plan(TINY, (1, 2), seq=512)


@pytest.mark.parametrize(
    ("model", "gpus", "sp"),
    [
        ("llama-3.1-8b", 1024, 32),
        ("gpt2", 64, 8),
        ("gpt2", 8, 8),
        ("gpt2", 18, 9),
        ("mamba", 64, 64),
    ],
)
def test_command_shares_a_sequence_by_no_more_ranks_than_heads(
    monkeypatch: pytest.MonkeyPatch, model: str, gpus: int, sp: int
) -> None:
    """32 and 12 heads, and a model without any. What is said by hand is taken as it is."""
    shapes: list[tuple[int, int]] = []

    def planned(model: str, shape: tuple[int, int], **_: Any) -> None:
        shapes.append(shape)
        raise UsageError("seen", where="here", have="a shape", why="that is all", fix="none")

    monkeypatch.setattr(sys.modules[main.__module__], "plan", planned)
    asked = ["plan", "--model", model, "--gpus", str(gpus)]
    assert main(asked) == main([*asked, "--sp", str(gpus)]) == 2
    assert shapes == [(gpus // sp, sp), (1, gpus)]


def test_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    asked = ["--gpus", "4", "--sp", "2", "--seq", "512", "--gpu", "H100-80GB", "--tile", "64"]
    assert main(["plan", "--model", str(tmp_path), *asked]) == 0
    shown = capsys.readouterr().out
    assert "4 x h100-80gb" in shown and "peak of one GPU" in shown
    host = ["--gpus", "2", "--seq", "512", "--offload", "--host-memory", "1.5GiB"]
    assert main(["plan", "--model", str(tmp_path), *host]) == 0
    assert "of 768.0 MiB" in capsys.readouterr().out
    assert main(["plan", "--model", str(tmp_path), "--gpus", "6", "--seq", "512"]) == 0
    assert "on 6 x a100-80gb, sp=3 (4 query heads): 512 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--model", "nothing", "--host-memory", "much"])
    assert "is no size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--model", "nothing", "--host-memory", "1TiB"])
    assert "goes with --offload" in capsys.readouterr().err
    assert main(["plan", "--model", "nothing"]) == 2
    assert "no model" in capsys.readouterr().err
