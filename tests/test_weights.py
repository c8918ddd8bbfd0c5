"""What weights weigh, against models that have them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import windowkv
from tiny import MODELS, shared_model
from windowkv import ModelSourceError


def held(model: Any) -> int:
    """Bytes of all parameters, shared ones once."""
    return sum({weight.data_ptr(): weight.nbytes for weight in model.parameters()}.values())


@pytest.mark.parametrize("name", ["mistral", "gemma3n", "gpt_oss", "llama4-chunk8"])
def test_a_config_weighs_what_its_model_does(name: str) -> None:
    model = shared_model(name)
    assert windowkv.weight_bytes(model.config, dtype=torch.float32) == held(model)
    assert windowkv.weight_bytes(model.config, dtype=torch.bfloat16) == held(model) / 2


def test_weighing_changes_neither_the_config_nor_random_numbers() -> None:
    config = hf.Gemma3TextConfig(num_hidden_layers=2)
    before, seed = copy.deepcopy(vars(config)), torch.get_rng_state()
    windowkv.weight_bytes(config)
    assert vars(config) == before
    assert torch.equal(torch.get_rng_state(), seed)
    assert torch.get_default_dtype() == torch.float32


def test_weights_that_stand_for_two_count_once() -> None:
    model = hf.MistralForCausalLM(
        hf.MistralConfig(**MODELS["mistral"]().config.to_dict() | {"tie_word_embeddings": True})
    )
    assert windowkv.weight_bytes(model.config, dtype=torch.float32) == held(model)


def test_a_folder_weighs_what_lies_in_it(tmp_path: Path) -> None:
    model = MODELS["gemma3"]().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for folder in ("one", "many"):
        for source in (tmp_path / folder, str(tmp_path / folder), tmp_path / folder / "config.json"):
            assert windowkv.weight_bytes(source, dtype=torch.float32) == held(model)


def test_a_folder_with_a_config_alone_weighs_what_its_model_would(tmp_path: Path) -> None:
    model = shared_model("gemma3")
    model.config.save_pretrained(tmp_path)
    assert windowkv.weight_bytes(tmp_path, dtype=torch.float32) == held(model)


@pytest.mark.parametrize("metadata", [None, {}, {"total_parameters": 5}])
def test_an_index_without_a_sum_is_added_up(tmp_path: Path, metadata: Any) -> None:
    model = MODELS["gemma3"]()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    _with_metadata(tmp_path, metadata)
    assert windowkv.weight_bytes(tmp_path) == held(model)


def test_files_that_are_not_there_yet_are_weighed_by_their_index(tmp_path: Path) -> None:
    model = MODELS["gemma3"]()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    assert windowkv.weight_bytes(tmp_path) == held(model)


def test_files_that_are_not_whole_are_named(tmp_path: Path) -> None:
    MODELS["gemma3"]().save_pretrained(tmp_path, max_shard_size="50KB")
    _with_metadata(tmp_path, None)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ModelSourceError, match=shard.name):
        windowkv.weight_bytes(tmp_path)
    shard.unlink()
    with pytest.raises(ModelSourceError, match=shard.name):
        windowkv.weight_bytes(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelSourceError, match="weights' sizes"):
        windowkv.weight_bytes(tmp_path)


def _with_metadata(folder: Path, metadata: Any) -> None:
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text()) | {"metadata": metadata}
    index.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


def test_packed_weights_and_models_without_a_class_are_not_guessed() -> None:
    config = hf.MistralConfig(sliding_window=8)
    config.quantization_config = {"quant_method": "mxfp4"}
    assert windowkv.weight_bytes(config) is None
    assert windowkv.weight_bytes(hf.SiglipVisionConfig()) is None
