"""The example's command line. That it trains is shown by `make demo`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("train_llama", EXAMPLES / "train_llama.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("option", ["--sp", "--dp", "--batch", "--seq-len", "--layers", "--width"])
@pytest.mark.parametrize("value", ["0", "-2"])
def test_sizes_are_at_least_one(
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_llama.py", f"{option}={value}"])
    with pytest.raises(SystemExit) as stop:
        example.parse_args()
    assert stop.value.code == 2
    assert f"argument {option}: {value} is less than 1" in capsys.readouterr().err


def test_defaults_are_accepted(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_llama.py"])
    assert example.parse_args().sp == 2
