"""A saved cache comes back bit by bit and goes on as if it had never left; a file that does not fit is refused."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import windowkv
from tiny import ARCHITECTURES, MODELS, STATEFUL, WINDOW, cache_argument, fed, generated, logits, shared_model, tokens
from windowkv import (
    CacheFileError,
    ConfigError,
    DynamicSlidingWindowCache,
    InputError,
    OptionError,
    RollbackError,
    cache_file,
)
from windowkv.persist import describe

LENGTHS = [0, 1, WINDOW - 1, WINDOW, 20, 70]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.cache"


def filled(model: Any, ids: Tensor, **options: Any) -> DynamicSlidingWindowCache:
    cache = DynamicSlidingWindowCache(model.config, **options)
    if ids.shape[1]:
        fed(model, cache, ids, ids.shape[1])
    return cache


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATEFUL])
def test_a_loaded_cache_goes_on_bit_by_bit_as_the_saved_one(name: str, length: int, path: Path) -> None:
    model = STATEFUL[name]() if name in STATEFUL else shared_model(name)
    ids, more = tokens(2, length), tokens(2, 10, seed=1)
    cache = filled(model, ids, rollback=3)
    cache.save(path)
    loaded = windowkv.load(path, model.config)
    assert (loaded.get_seq_length(), loaded.rollback) == (length, 3)
    assert torch.equal(fed(model, loaded, more), fed(model, cache, more))


@pytest.mark.parametrize("before", [5, 500])
def test_saving_over_a_bigger_and_a_smaller_file(before: int, path: Path) -> None:
    model = shared_model("gemma3")
    filled(model, tokens(1, before)).save(path)
    cache = filled(model, tokens(1, 20))
    cache.save(path)
    loaded = windowkv.load(path, model.config)
    assert torch.equal(fed(model, loaded, tokens(1, 10)), fed(model, cache, tokens(1, 10)))


def test_only_live_tokens_are_written(path: Path) -> None:
    model = shared_model("mistral")
    cache = filled(model, tokens(1, 1000), rollback=3)
    cache.save(path)
    per_token = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    assert 0 <= path.stat().st_size - (WINDOW - 1 + 3) * per_token < 4000
    copy.deepcopy(cache).save(path)
    assert path.stat().st_size - (WINDOW - 1 + 3) * per_token < 4000


def test_what_a_loaded_cache_can_take_back(path: Path) -> None:
    model, ids = shared_model("gemma3"), tokens(1, 60)
    filled(model, ids, rollback=5).save(path)
    loaded = windowkv.load(path, model.config)
    with pytest.raises(RollbackError):
        loaded.crop(-6)
    loaded.crop(-5)
    torch.testing.assert_close(fed(model, loaded, ids[:, 55:]), logits(model, ids)[:, 55:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rollback", [0, 2, 50])
def test_a_cache_is_loaded_with_another_rollback(rollback: int, path: Path) -> None:
    model, ids = shared_model("mistral"), tokens(1, 500)
    filled(model, ids, rollback=20).save(path)
    loaded = windowkv.load(path, model.config, rollback=rollback)
    with pytest.raises(RollbackError):
        loaded.crop(-min(rollback, 20) - 1)
    loaded.crop(-min(rollback, 20))
    more = tokens(1, 200, seed=1)
    text = torch.cat((ids[:, : 500 - min(rollback, 20)], more), dim=1)
    torch.testing.assert_close(fed(model, loaded, more), logits(model, text)[:, -200:], atol=1e-4, rtol=0)
    loaded.crop(-rollback)
    assert loaded.nbytes == windowkv.plan(model.config, tokens=700, dtype=torch.float32, rollback=rollback).total_bytes


def test_a_cache_whose_forward_broke_off_is_not_saved(path: Path) -> None:
    model, ids = MODELS["gemma3"](), tokens(1, 30)
    cache = filled(model, ids)
    hook = model.model.layers[1].register_forward_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        fed(model, cache, ids, 30)
    hook.remove()
    with pytest.raises(InputError, match="did not end"):
        cache.save(path)
    assert not path.exists()


def broken(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_cache_to_which_a_model_added_layers_is_neither_saved_nor_stored(path: Path) -> None:
    model, ids = shared_model("gemma3"), tokens(1, 20)
    cache = filled(model, ids)
    cache.layers.append(copy.deepcopy(cache.layers[0]))
    with pytest.raises(InputError, match="5 layers, and the model's config says 4"):
        cache.save(path)
    assert not path.exists()
    store = windowkv.PrefixStore(1 << 20)
    store.bind(model)
    assert not store.insert(ids, cache)
    assert store.lookup(ids) is None


def test_a_loaded_cache_stays_in_the_file_until_it_is_written_and_never_changes_it(path: Path) -> None:
    model = shared_model("gemma3")
    filled(model, tokens(1, 60)).save(path)
    content = path.read_bytes()
    loaded, twin = windowkv.load(path, model.config), windowkv.load(path, model.config)
    assert loaded.nbytes <= len(content)
    fed(model, loaded, tokens(1, 200))
    assert path.read_bytes() == content
    os.unlink(path)
    assert torch.equal(fed(model, twin, tokens(1, 200)), fed(model, windowkv_reference(model), tokens(1, 200)))


def windowkv_reference(model: Any) -> DynamicSlidingWindowCache:
    return filled(model, tokens(1, 60))


def test_memory_is_within_the_bound_after_loading(path: Path) -> None:
    model = shared_model("mistral")
    cache = filled(model, tokens(1, 500))
    cache.save(path)
    loaded = windowkv.load(path, model.config)
    fed(model, loaded, tokens(1, 100))
    fed(model, cache, tokens(1, 100))
    assert loaded.nbytes == cache.nbytes


def test_a_cache_is_converted_when_asked_to(path: Path) -> None:
    model = shared_model("gemma3")
    filled(model, tokens(1, 60)).save(path)
    config = copy.deepcopy(model.config)
    config.dtype = torch.bfloat16
    with pytest.raises(CacheFileError, match=r"holds float32, and the config says bfloat16: .* dtype=torch\.bfloat16"):
        windowkv.load(path, config)
    loaded = windowkv.load(path, config, dtype=torch.bfloat16)
    half = MODELS["gemma3"]().to(torch.bfloat16)
    assert fed(half, loaded, tokens(1, 3)).dtype == torch.bfloat16
    assert loaded.layers[0].buffer.storages[0].dtype == torch.bfloat16
    with pytest.raises(OptionError, match="nonsense"):
        windowkv.load(path, config, dtype=torch.bfloat16, device="nonsense")
    with pytest.raises(OptionError, match="rollback=-1"):
        windowkv.load(path, config, rollback=-1)
    with pytest.raises(OptionError, match="int8"):
        windowkv.load(path, config, dtype=torch.int8)


def test_a_cache_is_moved_when_asked_to(path: Path) -> None:
    model = shared_model("gemma3")
    filled(model, tokens(1, 60)).save(path)
    loaded = windowkv.load(path, model.config, device="meta")
    assert {storage.device.type for layer in loaded.layers for storage in layer.buffer.storages} == {"meta"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sliding_window": 9}, "layer 0 has window 8 instead of 9"),
        ({"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3}, "4 layers instead of 3"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer 3 has kind full instead of sliding"),
        ({"num_key_value_heads": 4}, "layer 0 has kv_heads 2 instead of 4"),
        ({"head_dim": 32}, "head_dim 16 instead of 32"),
    ],
)
def test_another_model_is_refused_by_what_differs(change: dict[str, Any], named: str, path: Path) -> None:
    model = shared_model("gemma3")
    filled(model, tokens(1, 60)).save(path)
    config = copy.deepcopy(model.config)
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(CacheFileError, match=named):
        windowkv.load(path, config)
    with pytest.raises(ConfigError):
        windowkv.load(path, None)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest, tensors: tensors.pop("1.keys"),
        lambda manifest, tensors: tensors.update({"1.keys": tensors["1.keys"][:, :, 1:]}),
        lambda manifest, tensors: tensors.update({"1.values": tensors["1.values"][..., 1:]}),
        lambda manifest, tensors: manifest["layers"].pop(),
        lambda manifest, tensors: manifest["layers"][0].update(start=59, end=60),
        lambda manifest, tensors: manifest["layers"][0].update(start=-5),
        lambda manifest, tensors: manifest["layers"].__setitem__(0, {"class": "str", "attributes": {}}),
        lambda manifest, tensors: manifest.pop("rollback"),
        lambda manifest, tensors: manifest.update(rollback=-1),
        lambda manifest, tensors: manifest.update(rollback=10**300),
        lambda manifest, tensors: manifest.update(tokens="x"),
        lambda manifest, tensors: manifest.update(tokens=10**15),
        lambda manifest, tensors: manifest.update(tokens=59),
        lambda manifest, tensors: manifest.update(layout=5),
        lambda manifest, tensors: manifest.update(layout=[1, 1, 1, 1]),
        lambda manifest, tensors: manifest.update(layers=5),
        lambda manifest, tensors: manifest["layers"][2].update(start=40, end=59),
        lambda manifest, tensors: tensors.update({"tokens": torch.zeros(1, 99, dtype=torch.int32)}),
        lambda manifest, tensors: tensors.update({"tokens": tensors["tokens"] + 1}),
        lambda manifest, tensors: tensors.update({"tokens": tensors["tokens"][:1].expand(3, -1).clone()}),
        lambda manifest, tensors: tensors.update({"tokens": tensors["tokens"][:0]}),
        lambda manifest, tensors: manifest.update(ids_sha256="0" * 64),
        lambda manifest, tensors: manifest.update(rollback=True),
        lambda manifest, tensors: tensors.update({"foo": torch.zeros(3)}),
        lambda manifest, tensors: tensors.update({"9.keys": torch.zeros(3)}),
        lambda manifest, tensors: tensors.update({"0.foo": torch.zeros(3)}),
        lambda manifest, tensors: tensors.update({f"0.{k}": tensors[f"0.{k}"][:1] for k in ("keys", "values")}),
        lambda manifest, tensors: tensors.update({n: t[:0] for n, t in tensors.items() if n != "tokens"}),
        lambda manifest, tensors: tensors.update({n: t.int() for n, t in tensors.items() if n != "tokens"}),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(spoil: Any, path: Path) -> None:
    model = windowkv.enable(MODELS["gemma3"]())
    cache = DynamicSlidingWindowCache(model.config)
    generated(model, tokens(2, 60), 1, **cache_argument(model, cache))
    cache.save(path)
    manifest, tensors = cache_file.read(path)
    manifest, tensors = dict(manifest), {name: tensor.clone() for name, tensor in tensors.items()}
    spoil(manifest, tensors)
    cache_file.write(path, tensors, manifest)
    with pytest.raises(CacheFileError, match=str(path)):
        windowkv.load(path, model.config)


def test_the_state_of_a_layer_cannot_replace_its_methods(path: Path) -> None:
    model = STATEFUL["lfm2"]()
    filled(model, tokens(1, 20)).save(path)
    manifest, tensors = cache_file.read(path)
    manifest["layers"][0]["attributes"]["reset"] = "gone"
    cache_file.write(path, {name: tensor.clone() for name, tensor in tensors.items()}, manifest)
    with pytest.raises(CacheFileError, match="reset is no attribute"):
        windowkv.load(path, model.config)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer, tensors: layer["attributes"].pop("is_conv_states_initialized"),
        lambda layer, tensors: layer["attributes"].pop("number_of_states"),
        lambda layer, tensors: layer["attributes"]["conv_kernel_size"]["items"].append([1, 3]),
        lambda layer, tensors: layer["attributes"].update(has_previous_state=True),
        lambda layer, tensors: layer["attributes"].update(record_past="yes"),
        lambda layer, tensors: tensors.update({"0.conv_states.0": tensors["0.conv_states.0"][..., :1]}),
        lambda layer, tensors: layer["attributes"]["conv_kernel_size"].update(items=[[0, 7]]),
        lambda layer, tensors: tensors.update({"0.conv_states.5": tensors.pop("0.conv_states.0")}),
        lambda layer, tensors: (
            tensors.pop("0.conv_states.0"),
            layer["attributes"]["conv_states"]["items"].append([0, None]),
        ),
    ],
)
def test_states_that_are_none_of_the_layer_are_refused(spoil: Any, path: Path) -> None:
    model = STATEFUL["lfm2"]()
    filled(model, tokens(1, 20)).save(path)
    manifest, tensors = cache_file.read(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    spoil(manifest["layers"][0], tensors)
    cache_file.write(path, tensors, manifest)
    with pytest.raises(CacheFileError, match="a layer cannot be"):
        windowkv.load(path, model.config)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: manifest.update(version="1\x1b]0;title\x07"),
        lambda manifest: manifest.update(dtypes=["\x1b[2J"]),
        lambda manifest: manifest.update(ids_sha256="\n"),
        lambda manifest: manifest["layout"][0].update(kind="\x1b[31m"),
        lambda manifest: manifest["layout"][0].update({"\x1b[31m": 1}),
    ],
)
def test_what_would_harm_a_terminal_is_never_shown(spoil: Any, path: Path) -> None:
    filled(shared_model("gemma3"), tokens(1, 9)).save(path)
    manifest, tensors = cache_file.read(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    spoil(manifest)
    cache_file.write(path, tensors, manifest)
    with pytest.raises(CacheFileError, match="its manifest is wrong") as error:
        describe(path)
    assert str(error.value).isprintable()


def test_the_ids_come_back_and_a_changed_text_is_noticed(path: Path) -> None:
    model, ids = windowkv.enable(MODELS["mistral"]()), tokens(1, 30)
    cache = DynamicSlidingWindowCache(model.config)
    generated(model, ids, 10, **cache_argument(model, cache))
    cache.save(path)
    loaded = windowkv.load(path, model.config)
    assert torch.equal(loaded.history.tokens, cache.history.tokens)
    other = ids.clone()
    other[0, 9] += 1
    expected = generated(shared_model("mistral"), other, 10, use_cache=False)
    assert torch.equal(generated(model, other, 10, **cache_argument(model, loaded)), expected)


def test_a_file_tells_what_it_holds_without_being_loaded(path: Path) -> None:
    model, ids = windowkv.enable(MODELS["gemma3"](), rollback=7), tokens(1, 30)
    cache = DynamicSlidingWindowCache(model.config, rollback=7)
    generated(model, ids, 10, **cache_argument(model, cache))
    cache.save(path)
    info = describe(path)
    assert (info.tokens, info.rollback, info.dtypes, info.windows) == (39, 7, ("float32",), (WINDOW,))
    assert info.kinds == {"sliding": 3, "full": 1}
    assert info.ids_sha256 is not None
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert describe(path) == info
    with pytest.raises(CacheFileError, match="damaged"):
        describe(path, verify=True)


def test_rows_and_beams_are_saved_as_they_are(path: Path) -> None:
    model = shared_model("gemma3n")
    cache = filled(model, tokens(1, 20))
    cache.batch_repeat_interleave(3)
    cache.save(path)
    loaded = windowkv.load(path, model.config)
    more = tokens(3, 4, seed=5)
    assert torch.equal(fed(model, loaded, more), fed(model, cache, more))


def test_a_cache_of_states_alone_is_saved_too(path: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "initializer_range": 0.15}
    torch.manual_seed(0)
    model = hf.MambaForCausalLM(hf.MambaConfig(**sizes, pad_token_id=0)).eval()
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(1, 12), 12)
    cache.save(path)
    loaded, fork = windowkv.load(path, model.config), cache.fork()
    expected = fed(model, cache, tokens(1, 5, seed=1))
    assert torch.equal(fed(model, loaded, tokens(1, 5, seed=1)), expected)
    assert torch.equal(fed(model, fork, tokens(1, 5, seed=1)), expected)
    assert describe(path).tokens is None
