"""The pictures of a plan, and its progress on a terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import autosp_dtensor.__main__ as command
from autosp_dtensor.plan.measure import Setting, Step, measure
from autosp_dtensor.plan.plan import Plan
from autosp_dtensor.plan.search import find

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODES = ("auto", "none", "full", "sequence")


class Axes:
    """Stands in for matplotlib's, which not every test machine has: what was drawn."""

    def __init__(self) -> None:
        self.drawn: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def draw(*args: Any, **kwargs: Any) -> Any:
            self.drawn[name] = (args, kwargs)
            return name

        return draw


class Figure:
    made: ClassVar[list[Figure]] = []

    def __init__(self, **_: Any) -> None:
        self.axes: list[Axes] = []
        Figure.made.append(self)

    def subplots(self, rows: int, columns: int, squeeze: bool) -> list[list[Axes]]:
        assert rows == 1 and not squeeze
        self.axes = [Axes() for _ in range(columns)]
        return [self.axes]

    def savefig(self, path: str) -> None:
        Path(path).write_text("drawn")


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> type[Figure]:
    Figure.made.clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=Figure))
    return Figure


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ["plan", "--model", str(tmp_path), "--gpus", "2"]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Plan]]:
    """Filled with each plan that the command made. A search takes a minute for all configurations:
    steps that only it looks at take so many MiB for each token, instead of being run."""
    seen: list[tuple[dict[str, Any], Plan]] = []
    real, run = command.plan, measure

    def quick(setting: Setting, length: int, *, history: bool = False) -> Step:
        if history:
            return run(setting, length, history=True)
        each = {"none": 8, "sequence": 6, "full": 4, "auto": 2}[setting.checkpoint]
        each += (setting.tile == "none") - bool(setting.host)
        return Step(length, each * length << 20, {}, "", 0.0)

    monkeypatch.setattr(sys.modules[Plan.__module__], "measure", quick)
    monkeypatch.setattr(sys.modules[find.__module__], "measure", quick)

    def plan(*args: Any, **options: Any) -> Plan:
        found = real(*args, **options)
        seen.append((options, found))
        return found

    monkeypatch.setattr(command, "plan", plan)
    return seen


def test_both_pictures_are_drawn(
    figure: type[Figure], plans: list[Any], model: list[str], tmp_path: Path
) -> None:
    """The step by kind, whose fullest moment is the peak; and a length for each configuration."""
    picture = tmp_path / "plan.png"
    host = ["--offload", "--host-memory", "1GiB", "--checkpoint", "full"]
    assert command.main([*model, *host, "--plot", str(picture)]) == 0
    assert picture.exists()
    (made,) = figure.made
    step, lengths = (axes.drawn for axes in made.axes)
    shown = plans[0][1]
    (_, *kinds), named = step["stackplot"]
    fullest = max(map(sum, zip(*kinds, strict=True))) * 2**30
    assert 0.97 * shown.step.peak <= fullest <= shown.step.peak
    assert {"kept for backward", "temporaries"} <= set(named["labels"])
    (names, bars), _ = lengths["barh"]
    assert names == [f"{mode}{more}" for mode in MODES for more in (", no tiles", "", ", offload")]
    said = dict(zip(names, bars, strict=True))
    assert said["full, offload"] == shown.step.length == shown.longest
    assert said["full, offload"] > said["full"] > said["full, no tiles"] > said["none"] > 0
    ways = {(o["checkpoint"], o["tile"], o["host_memory"]): p.step.length for o, p in plans}
    assert len(plans) == len(ways) == len(names)
    assert ways["sequence", "none", None] == said["sequence, no tiles"]
    assert ways["sequence", "auto", None] == said["sequence"]


def test_one_length_has_one_picture(figure: type[Figure], model: list[str], tmp_path: Path) -> None:
    assert command.main([*model, "--seq", "256", "--plot", str(tmp_path / "plan.png")]) == 0
    assert [len(made.axes) for made in figure.made] == [1]


@pytest.mark.parametrize("more", [[], ["--seq", "512"]], ids=["longest", "one length"])
def test_matplotlib_draws_a_file(
    plans: list[Any], model: list[str], tmp_path: Path, more: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert command.main([*model, *more, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_told(
    monkeypatch: pytest.MonkeyPatch, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command.main([*model, "--seq", "512", "--plot", "plan.png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, model: list[str], terminal: bool
) -> None:
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    assert command.main([*model, "--seq", "512"]) == 0
    text = stream.getvalue()
    assert "512 tokens: " in text and text.endswith("\n")
    if terminal:  # one of the usual seven steps
        assert text.startswith("\r\033[K[###..................] 512 tokens: ")
    else:
        assert "\r" not in text and "[" not in text


def test_a_bar_fills_up_and_stays_full(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(True)
    monkeypatch.setattr(sys, "stderr", stream)
    progress = command._Progress()
    for step in range(9):
        progress(f"step {step}")
    progress.done()
    bars = [part.partition("]")[0] for part in stream.getvalue().split("[")[2::2]]
    assert [bar.count("#") for bar in bars] == [3, 6, 9, 12, 15, 18, 21, 21, 21]
    assert {len(bar) for bar in bars} == {21}


@pytest.mark.parametrize("name", ["nowhere/plan.png", "plan.txt", "plan"])
def test_a_place_where_no_picture_can_be_is_told_before_a_plan_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "plan", None)
    with pytest.raises(SystemExit):
        command.main(["plan", "--model", "llama-3.1-8b", "--plot", str(tmp_path / name)])
    assert f"--plot {tmp_path / name}: " in capsys.readouterr().err
