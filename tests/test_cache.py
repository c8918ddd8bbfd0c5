"""What a cache answers, what it takes back, and what it refuses without changing anything."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tiny import STATEFUL, WINDOW, cache_argument, fed, generated, logits, shared_model, tokens, uncached
from windowkv import ConfigError, DynamicSlidingWindowCache, InputError, OptionError, RollbackError


def snapshot(cache: DynamicSlidingWindowCache) -> list[Any]:
    return [(layer.get_seq_length(), layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def same(now: list[Any], then: list[Any]) -> bool:
    return all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in zip(now, then, strict=True)
    )


@pytest.mark.parametrize("rollback", [-1, 1.5, "64", None, True])
def test_a_rollback_that_is_no_count_is_refused(rollback: Any) -> None:
    with pytest.raises(OptionError, match=f"rollback={rollback!r}"):
        DynamicSlidingWindowCache(shared_model("mistral").config, rollback=rollback)


@pytest.mark.parametrize(
    "config", [None, "mistral", {}, hf.BertConfig(), hf.Gemma3TextConfig(use_bidirectional_attention=True)]
)
def test_what_is_no_config_of_a_causal_decoder_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError):
        DynamicSlidingWindowCache(config)


def test_a_kind_of_layer_that_nobody_knows_is_named() -> None:
    config = hf.Qwen2Config(num_hidden_layers=1)
    config.layer_types = ["moebius_attention"]
    with pytest.raises(ConfigError, match="moebius_attention"):
        DynamicSlidingWindowCache(config)


@pytest.mark.parametrize("back", range(0, 3 * WINDOW + 3, 3))
@pytest.mark.parametrize("length", [0, 1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_crop_is_exact_or_refused(name: str, length: int, back: int) -> None:
    model, ids = shared_model(name), tokens(1, length + 10)
    cache = DynamicSlidingWindowCache(model.config, rollback=4)
    if length:
        fed(model, cache, ids[:, :length], length)
    if back > length:
        with pytest.raises(RollbackError, match=f"take back {back} tokens"):
            cache.crop(-back)
        back = 0
    else:
        cache.crop(-back)  # nothing has been dropped at these lengths, so any point can be returned to
    assert {layer.get_seq_length() for layer in cache.layers} == {length - back}
    rest = ids[:, length - back :]
    torch.testing.assert_close(fed(model, cache, rest, 5), logits(model, ids)[:, length - back :], atol=1e-4, rtol=0)


def test_crop_far_past_the_window_reaches_every_point_within_rollback() -> None:
    model, ids = shared_model("gemma3n"), tokens(1, 120)
    expected = logits(model, ids)
    cache = DynamicSlidingWindowCache(model.config, rollback=6)
    fed(model, cache, ids[:, :100], 100)
    for back in (6, 2, 5, 1, 6):
        cache.crop(-back)
        torch.testing.assert_close(
            fed(model, cache, ids[:, 100 - back : 100]), expected[:, 100 - back : 100], atol=1e-4, rtol=0
        )
    torch.testing.assert_close(fed(model, cache, ids[:, 100:]), expected[:, 100:], atol=1e-4, rtol=0)


def test_a_refused_crop_leaves_every_layer_as_it_was() -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config, rollback=3)
    fed(model, cache, tokens(1, 100), 100)
    before = snapshot(cache)
    with pytest.raises(RollbackError, match="cannot take back 60 tokens: 0 to 3 of the 100 seen"):
        cache.crop(-60)
    assert same(snapshot(cache), before)


@pytest.mark.parametrize("argument", [1, 100, 1.5, None, True])
def test_crop_takes_minus_the_number_of_tokens(argument: Any) -> None:
    cache = DynamicSlidingWindowCache(shared_model("mistral").config)
    with pytest.raises(RollbackError, match="an integer <= 0"):
        cache.crop(argument)


def test_draft_and_accept_stays_exact_and_within_the_bound() -> None:
    model, ids = shared_model("mistral"), tokens(1, 64)
    expected = logits(model, ids)
    cache = DynamicSlidingWindowCache(model.config, rollback=4)
    fed(model, cache, ids[:, :20], 20)
    for position in range(20, 60):
        draft = torch.cat((ids[:, position : position + 1], tokens(1, 3, seed=position)), dim=1)
        first = fed(model, cache, draft, 4)[:, :1]
        torch.testing.assert_close(first, expected[:, position : position + 1], atol=1e-4, rtol=0)
        cache.crop(-3)
    assert all(layer.buffer.storages[0].shape[2] <= WINDOW - 1 + 4 + 32 for layer in cache.layers)


@pytest.mark.parametrize("name", STATEFUL)
def test_layers_with_a_state_are_transformers_own_and_give_the_same_tokens(name: str) -> None:
    model, ids = STATEFUL[name](), tokens(1, 40)
    cache = DynamicSlidingWindowCache(model.config)
    assert torch.equal(generated(model, ids, 12, **cache_argument(model, cache)), uncached(model, ids, 12))


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_that_has_no_way_back_refuses_before_any_layer_changes(name: str) -> None:
    model, ids = STATEFUL[name](), tokens(1, 40)
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, ids, 40)
    before = copy.deepcopy([getattr(layer, "conv_states", {}) for layer in cache.layers])
    with pytest.raises(RollbackError, match="LinearAttentionLayer"):
        cache.crop(-3)
    assert cache.get_seq_length() == 40
    after = [getattr(layer, "conv_states", {}) for layer in cache.layers]
    assert any(before)
    assert all(torch.equal(then[0], now[0]) for then, now in zip(before, after, strict=True) if then)


def test_crop_leaves_alone_what_an_encoder_saw() -> None:
    config = hf.MllamaConfig(text_config={"num_hidden_layers": 2, "cross_attention_layers": [1]})
    cache = DynamicSlidingWindowCache(config)
    text, image = torch.randn(1, 8, 10, 128), torch.randn(1, 8, 7, 128)
    cache.update(text, text, 0)
    cache.update(image, image, 1)
    cache.crop(-3)
    assert cache.get_seq_length() == 7
    assert torch.equal(cache.layers[1].keys, image)


def test_reset_frees_everything_and_takes_another_batch_and_dtype() -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(2, 50), 50)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    ids = tokens(3, 30)
    torch.testing.assert_close(fed(model, cache, ids, 20), logits(model, ids), atol=1e-4, rtol=0)


def test_early_initialization_fixes_the_shapes_and_holds_nothing() -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config)
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    assert (cache.is_initialized, cache.nbytes, cache.get_seq_length()) == (True, 0, 0)
    with pytest.raises(InputError, match="batch 2"):
        cache.update(torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16), 0)
    ids = tokens(2, 30)
    torch.testing.assert_close(fed(model, cache, ids, 20), logits(model, ids), atol=1e-4, rtol=0)


def test_rows_that_stay_are_not_copied() -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(3, 20), 20)
    before = [storage.data_ptr() for layer in cache.layers for storage in layer.buffer.storages]
    cache.reorder_cache(torch.tensor([0, 1, 2]))
    cache.batch_select_indices(torch.tensor([True, True, True]))
    cache.batch_repeat_interleave(1)
    assert [storage.data_ptr() for layer in cache.layers for storage in layer.buffer.storages] == before


class Copied(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of keys and values that are gathered or written."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::index_select", "aten::index_copy_") and args[0].ndim == 4:
            moved = func(*args, **(kwargs or {}))
            self.nbytes += (moved if func._schema.name == "aten::index_select" else args[3]).nbytes
            return moved
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize(("order", "changed"), [([0, 1, 2], 0), ([0, 2, 1], 2), ([0, 1, 1], 1), ([2, 0, 1], 3)])
@torch.no_grad()
def test_a_permutation_moves_in_place_what_is_held_of_rows_that_change(
    order: list[int], changed: int, kv_dtype: str | None
) -> None:
    model, ids = shared_model("gemma3"), tokens(3, 300)
    cache = DynamicSlidingWindowCache(model.config, kv_dtype=kv_dtype)
    fed(model, cache, ids, 300)
    storages = [storage for layer in cache.layers for storage in layer.buffer.storages]
    places, before = [storage.data_ptr() for storage in storages], [storage.clone() for storage in storages]
    with Copied() as copied:
        cache.reorder_cache(torch.tensor(order))
    assert [storage.data_ptr() for layer in cache.layers for storage in layer.buffer.storages] == places
    held = [layer.buffer for layer in cache.layers]
    buffers = [part for each in held for part in ((each.recent, each.packed) if hasattr(each, "packed") else (each,))]
    for storage, old, span in zip(storages, before, [b.span for b in buffers for _ in b.storages], strict=True):
        assert torch.equal(storage[:, :, : span.held].float(), old[order][:, :, : span.held].float())
    row = sum(storage[:1, :, : b.span.held].nbytes for b in buffers for storage in b.storages)
    assert copied.nbytes == 2 * changed * row, "gathered once and written once"


@torch.no_grad()
def test_a_permutation_of_a_fork_leaves_the_other_side_its_storage() -> None:
    model, ids = shared_model("gemma3"), tokens(2, 40)
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, ids, 40)
    fork = cache.fork()
    places = [layer.buffer.storages[0].data_ptr() for layer in cache.layers]
    fork.reorder_cache(torch.tensor([1, 0]))
    assert not {layer.buffer.storages[0].data_ptr() for layer in fork.layers} & set(places)
    own = [layer.buffer.storages[0].data_ptr() for layer in fork.layers]
    fork.reorder_cache(torch.tensor([1, 0]))
    fork.reorder_cache(torch.tensor([1, 0]))
    assert [layer.buffer.storages[0].data_ptr() for layer in fork.layers] == own, "what it moved to is its own"
    more = tokens(2, 10, seed=1)
    for one, text in ((fork, ids.flip(0)), (cache, ids)):
        expected = logits(model, torch.cat((text, more), dim=1))[:, 40:]
        torch.testing.assert_close(fed(model, one, more), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_quantised_row_that_became_several_is_reordered() -> None:
    model = shared_model("mistral-full")
    cache = DynamicSlidingWindowCache(model.config, rollback=0, kv_dtype="int8")
    fed(model, cache, tokens(1, 127), 127)
    fed(model, cache, tokens(3, 1))  # which packs tokens of before alone
    assert [layer.buffer.packed.rows for layer in cache.layers] == [3] * 4
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.rows == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: (model, tokens(3, 1)), "batch 2"),
        (lambda model: (copy.deepcopy(model).bfloat16(), tokens(2, 1)), "torch.bfloat16"),
        (lambda model: (copy.deepcopy(model).to("meta"), tokens(2, 1).to("meta")), "meta"),
    ],
)
def test_another_batch_dtype_or_device_is_refused_and_the_cache_goes_on(change: Any, named: str) -> None:
    model, ids = shared_model("gemma3"), tokens(2, 41)
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, ids[:, :40], 40)
    before = snapshot(cache)
    other, token = change(model)
    with pytest.raises(InputError, match=named):
        fed(other, cache, token)
    assert same(snapshot(cache), before)
    torch.testing.assert_close(fed(model, cache, ids[:, 40:]), logits(model, ids)[:, 40:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [torch.tensor([0, 2]), torch.tensor([-3])])
@pytest.mark.parametrize("operation", ["reorder_cache", "batch_select_indices"])
def test_rows_that_are_not_there_are_refused(operation: str, rows: Tensor) -> None:
    cache = DynamicSlidingWindowCache(shared_model("gemma3").config)
    fed(shared_model("gemma3"), cache, tokens(2, 40), 40)
    before = snapshot(cache)
    with pytest.raises(InputError, match="rows 0 to 1"):
        getattr(cache, operation)(rows)
    assert same(snapshot(cache), before)


@pytest.mark.parametrize("rows", [torch.tensor([True, False]), torch.tensor([0.0, 1.0])])
def test_a_selection_of_another_shape_or_kind_is_refused(rows: Any) -> None:
    model = shared_model("mistral")
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(3, 20), 20)
    before = snapshot(cache)
    with pytest.raises(InputError):
        cache.batch_select_indices(rows)
    assert same(snapshot(cache), before)


def test_a_batch_for_one_row_is_refused_where_some_layer_cannot_repeat_it() -> None:
    model = STATEFUL["lfm2"]()
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(1, 25), 25)
    before = cache.nbytes
    with pytest.raises(InputError, match="a batch of 3, but this cache holds 1 rows"):
        cache.update(torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16), 1)
    assert (cache.get_seq_length(1), cache.get_seq_length(3), cache.nbytes) == (25, 25, before)


@pytest.mark.parametrize("repeats", [0, -1, 1.5])
def test_repeating_less_than_once_is_refused(repeats: Any) -> None:
    cache = DynamicSlidingWindowCache(shared_model("mistral").config)
    with pytest.raises(InputError, match=f"repeats={repeats}"):
        cache.batch_repeat_interleave(repeats)


@pytest.mark.parametrize("rows", [torch.tensor([True, False, True]), torch.tensor([0, -1]), [0, 2]])
def test_rows_are_selected_as_a_tensor_would(rows: Any) -> None:
    model, ids = shared_model("mistral"), tokens(3, 30)
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, ids[:, :20], 20)
    cache.batch_select_indices(rows)
    torch.testing.assert_close(
        fed(model, cache, ids[[0, 2], 20:]), logits(model, ids[[0, 2]])[:, 20:], atol=1e-4, rtol=0
    )


class TwoWindows(torch.nn.Module):
    """Two attention layers with a window each, masked by transformers' own functions for that layer."""

    windows = (4, 9)

    def __init__(self) -> None:
        super().__init__()
        self.configs = [hf.MistralConfig(sliding_window=window, attn_implementation="eager") for window in self.windows]

    def forward(self, states: Tensor, cache: Any = None) -> Tensor:
        for index, config in enumerate(self.configs):
            heads = states[:, None]  # one head
            seen = 0 if cache is None else cache.get_seq_length(index)
            length, offset = (states.shape[1], 0) if cache is None else cache.get_mask_sizes(states.shape[1], index)
            keys, values = (heads, heads) if cache is None else cache.update(heads, heads, index)
            query = torch.arange(seen, seen + states.shape[1])[:, None]
            key = torch.arange(offset, offset + length)[None]
            mask = (key <= query) & (key > query - config.sliding_window)
            states = (
                states + torch.nn.functional.scaled_dot_product_attention(heads, keys, values, attn_mask=mask)[:, 0]
            )
        return states


def test_two_windows_in_one_model_are_each_bounded_and_masked_by_their_own() -> None:
    config = hf.MistralConfig(num_hidden_layers=2, sliding_window=4)
    cache = DynamicSlidingWindowCache(config, rollback=0)
    if hasattr(config, "per_layer_config"):
        config = hf.MistralConfig(num_hidden_layers=2, sliding_window=4, per_layer_config={1: {"sliding_window": 9}})
        cache = DynamicSlidingWindowCache(config, rollback=0)
    else:  # before per-layer configs, layers can only differ by hand
        cache.layers[1] = type(cache.layers[1])(type(cache.layers[1].buffer.retention)(9, 0))
    model, states = TwoWindows(), torch.randn(1, 60, 16)
    parts = torch.cat([model(part, cache) for part in states.split([20, *[1] * 20, 20], dim=1)], dim=1)
    torch.testing.assert_close(parts, model(states), atol=1e-5, rtol=0)
    assert [layer.buffer.storages[0].shape[2] for layer in cache.layers] == [4 - 1 + 32, 9 - 1 + 32]
