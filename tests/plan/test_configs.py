"""What a plan takes as a model: names, files, dicts. Files are data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autosp_dtensor as autosp
from autosp_dtensor.errors import UsageError
from autosp_dtensor.plan.configs import model_maker, shallow_maker

pytest.importorskip("transformers")
TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
KERNEL = "kernels-community/x"
NAMED = {
    "attn_implementation": KERNEL, "_attn_implementation": KERNEL,
    "_attn_implementation_internal": KERNEL, "experts_implementation": KERNEL,
    "_experts_implementation": {"": KERNEL},
}  # fmt: skip


def made(model: Any) -> Any:
    with torch.device("meta"):
        return model_maker(model)[1]()


@pytest.mark.parametrize("key", [None, *NAMED])
def test_config_files_are_read_as_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None
) -> None:
    """No code that a file names is looked for, whatever it says that its own dtype is."""
    from transformers import modeling_utils

    def fetched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"something is fetched: {args}")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", fetched)
    named = {key: NAMED[key]} if key else {}
    file = {**TINY, **named, "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(file))
    for path in (tmp_path, tmp_path / "config.json"):
        model = made(path)
        assert type(model).__module__.startswith("transformers.models.llama")
        assert model.config._attn_implementation == "sdpa"
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("key", NAMED)
def test_configs_inside_of_a_config_are_data_too(key: str) -> None:
    """A model of text and pictures, whose parts have configs of their own."""
    text = {**TINY, "head_dim": 16, "model_type": "gemma3_text", key: NAMED[key]}
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, key: NAMED[key],
    }  # fmt: skip
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    model = made(config)
    assert model.config.text_config.hidden_size == 64
    for each in (model.config, model.config.text_config, model.config.vision_config):
        assert each._attn_implementation == "sdpa"
        assert KERNEL not in str(each._experts_implementation)


def test_a_model_type_alone_has_its_default_sizes() -> None:
    from transformers import Qwen3Config

    model = made({"model_type": "qwen3", "num_hidden_layers": 1})
    assert model.config.hidden_size == Qwen3Config().hidden_size
    name, _ = model_maker("qwen3")
    shallow, layers = shallow_maker("qwen3")
    assert name == "qwen3" and layers == Qwen3Config().num_hidden_layers
    with torch.device("meta"):
        assert shallow is not None and len(shallow(2)().model.layers) == 2  # type: ignore
    assert shallow_maker("gpt_oss") == (None, 0)  # its layers are of two types


def test_unknown_names_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model"):
        autosp.plan("gpt-17", (1, 8))
    with pytest.raises(UsageError, match="no figures"):
        autosp.plan(TINY, (1, 8), gpu="z1")
    with pytest.raises(UsageError, match="no loss over tokens"):
        autosp.plan("vit", (1, 8), seq=64)
    for text in ("not json", "[1]", "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match="no config of transformers"):
            autosp.plan(tmp_path, (1, 8))


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "x"}, {"model_type": "nobodys"}, {"num_attention_heads": [4]}]
)
def test_a_config_that_transformers_cannot_take_is_told(wrong: dict[str, Any]) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 32, **wrong}
    with pytest.raises(UsageError, match="transformers takes this for no config of a"):
        autosp.plan(config, (1, 2), seq=64)


def test_a_gpu_is_named_in_letters_of_either_case() -> None:
    found = autosp.plan({**TINY, "num_hidden_layers": 1}, (1, 2), gpu="A100-80GB", seq=64)
    assert found.gpu == "a100-80gb" and found.fits
