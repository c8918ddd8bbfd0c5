"""What an enabled model computes itself, what it hands over, and that neither changes the result."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import windowkv
from tiny import (
    ARCHITECTURES,
    MODELS,
    STATEFUL,
    WINDOW,
    cache_argument,
    fed,
    generated,
    left_padded,
    logits,
    shared_model,
    tokens,
    uncached,
)
from windowkv import DynamicSlidingWindowCache, OptionError, attention_interface, chunks
from windowkv.attention import visible
from windowkv.attention_interface import ranges_mask

LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW]


@contextmanager
def counted(name: str) -> Iterator[Any]:
    """A function of the interface, as before but counting its calls."""
    with mock.patch.object(attention_interface, name, wraps=getattr(attention_interface, name)) as function:
        yield function


def enabled(name: str, **options: Any) -> Any:
    return windowkv.enable(MODELS[name](), **options)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_a_forward_without_cache(name: str, length: int) -> None:
    ids = tokens(2, length)
    model = enabled(name, prefill_chunk=11)
    with (
        counted("ranges_attention") as ranges,
        counted("unmasked_attention") as steps,
        counted("_hand_over") as handed_over,
    ):
        out = generated(model, ids, 2 * WINDOW)
    assert torch.equal(out, uncached(shared_model(name), ids, 2 * WINDOW))
    computed = ranges.called or steps.called
    # Older releases run Gemma 2 by sdpa, which knows no softcap and leaves it out: so that is what the model computes.
    own = name == "gemma2" and implementation(model) == "windowkv_sdpa"
    assert (computed, handed_over.called) == (not own, own)


@pytest.mark.parametrize("prefill_chunk", [None, 7, "auto"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_rows_equal_each_row_alone(name: str, prefill_chunk: Any) -> None:
    rows = [tokens(1, length, seed=length)[0] for length in (30, 5, 17, 8, 20)]
    ids, mask = left_padded(rows)
    alone = torch.cat([uncached(shared_model(name), row[None], 20) for row in rows])
    assert torch.equal(generated(enabled(name, prefill_chunk=prefill_chunk), ids, 20, mask), alone)


@pytest.mark.parametrize("chunks", [(20,), (6, *[1] * 6), (8, 5, 7, 8, 9, 20), (62,), ()])
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_every_position_equal_the_models_own(name: str, chunks: tuple[int, ...]) -> None:
    model, ids = enabled(name), tokens(2, 62)
    expected = logits(shared_model(name), ids)
    cache = DynamicSlidingWindowCache(model.config)
    torch.testing.assert_close(fed(model, cache, ids, *chunks), expected, atol=1e-4, rtol=0)
    if name != "mistral-w1":  # transformers' own cache keeps one token too many there
        theirs = DynamicCache(config=model.config)
        torch.testing.assert_close(fed(model, theirs, ids, *chunks), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3n", "gpt_oss", "llama4-chunk8"])
def test_beams_drafts_and_samples_equal_the_models_own(name: str) -> None:
    model, plain, ids = enabled(name), shared_model(name), tokens(1, 20)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"num_beams": 2, "num_return_sequences": 2}):
        assert torch.equal(generated(model, ids, 12, **options), generated(plain, ids, 12, **options))
    for options in ({"do_sample": True, "top_k": 5, "num_return_sequences": 3},):
        torch.manual_seed(5)
        expected = generated(plain, ids, 12, **options)
        torch.manual_seed(5)
        assert torch.equal(generated(model, ids, 12, **options), expected)


@pytest.mark.parametrize("matrix_units", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "mistral", "mistral-full", "gpt_oss", "gemma2"])
def test_autocast_is_what_it_is_without(name: str, matrix_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated queries and keys are float32 there, and values are not."""
    monkeypatch.setattr("windowkv.attention.has_matrix_units", lambda: matrix_units)
    monkeypatch.setattr("windowkv.attention._LONG", 20)
    monkeypatch.setattr("windowkv.attention._SHORT", 10)
    ids, ours, theirs = tokens(1, 40), enabled(name), shared_model(name)
    exact, errors = logits(theirs, ids), []
    for model, cache in ((theirs, DynamicCache(config=theirs.config)), (ours, DynamicSlidingWindowCache(ours.config))):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            parts = [model(part, **cache_argument(model, cache)).logits for part in ids.split([20, 18, 1, 1], dim=1)]
        errors.append((torch.cat(parts, dim=1).float() - exact).norm())
    assert errors[1] < 1.3 * errors[0]


@pytest.mark.parametrize("matrix_units", [True, False])
def test_bfloat16_is_as_near_to_full_precision_as_the_models_own(
    matrix_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windowkv.attention.has_matrix_units", lambda: matrix_units)
    plain, ids = MODELS["gemma3"](), tokens(4, 60)
    exact = logits(plain, ids)
    plain.to(torch.bfloat16)
    own_error = (logits(plain, ids).float() - exact).norm()
    assert (logits(windowkv.enable(plain), ids).float() - exact).norm() < 1.2 * own_error


# --- what the mask function says


def starts_of(mask: Tensor | None) -> list[list[int]]:
    assert mask is not None
    assert mask.dtype == torch.int32
    return mask[:, 0, :, 0].tolist()


def sizes(queries: int, past: int, window: int | None = None) -> dict[str, Any]:
    """Arguments of a mask for queries after a past, over a cache that holds `window - 1` tokens of it."""
    held = past if window is None else min(past, window - 1)
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return {
        "q_length": queries,
        "kv_length": held + queries,
        "q_offset": past,
        "kv_offset": past - held,
        "mask_function": function,
    }


@pytest.mark.parametrize("rows", [None, (0, 0), (0, 3), (9, 5)])
@pytest.mark.parametrize("past", [0, 5, 30])
@pytest.mark.parametrize("queries", [1, 4, 20])
@pytest.mark.parametrize("window", [None, 1, 4, 64])
def test_the_starts_say_what_the_mask_of_transformers_says(
    window: int | None, queries: int, past: int, rows: tuple[int, int] | None
) -> None:
    total = queries + past
    padding = None if rows is None else torch.arange(total) >= torch.tensor(rows)[:, None]
    arguments = sizes(queries, past, window) | {"batch_size": 2, "attention_mask": padding}
    ranges = ranges_mask(**arguments, base="sdpa")
    theirs = sdpa_mask(**arguments, allow_is_causal_skip=False)
    if ranges is None:
        assert queries == 1
        assert theirs.all()
        return
    ours = visible(torch.tensor(starts_of(ranges)), arguments["kv_length"])[:, None]
    real = theirs.any(dim=-1, keepdim=True)  # a query that is padding sees nothing there and itself here
    assert torch.equal((ours & real).expand_as(theirs), theirs)


@pytest.mark.parametrize("told", [{}, {"config": SimpleNamespace(attention_chunk_size=None)}], ids=["", "config"])
@pytest.mark.parametrize(
    ("past", "kv_length"), [(past, length) for past in range(12) for length in range(1, min(past + 1, 7) + 1)]
)
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_single_query_has_no_mask_where_it_sees_every_key(
    chunk: int | None, past: int, kv_length: int, told: dict[str, Any]
) -> None:
    """Over as many keys as a cache may show, and not only those that ours shows."""
    offset, local = past + 1 - kv_length, 4
    function = sliding_window_causal_mask_function(local)
    if chunk is not None:
        function = chunked_causal_mask_function(chunk, torch.zeros(2, dtype=torch.long))
        told = told and {"config": SimpleNamespace(attention_chunk_size=chunk)}
    mask = ranges_mask(2, 1, kv_length, past, offset, function, base="sdpa", local_size=local, **told)
    sees = [key > past - local if chunk is None else key // chunk == past // chunk for key in range(offset, past + 1)]
    assert (mask is None) == all(sees)
    if mask is not None:
        assert starts_of(mask) == [[sees.index(True)]]


def test_rows_that_see_the_same_are_said_once() -> None:
    mask = ranges_mask(batch_size=5, **sizes(3, 10, 4), attention_mask=torch.ones(5, 13), base="sdpa")
    assert starts_of(mask) == [[0, 1, 2]]


@pytest.mark.parametrize("base", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "change",
    [
        {"allow_is_causal_skip": False},
        {"use_vmap": True},
        {"q_offset": torch.tensor(6)},
        {"kv_length": 40},
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]).bool()},
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1, 1]]).bool()},
        {"attention_mask": torch.zeros(1, 7, dtype=torch.bool)},
        {"device": "meta", "attention_mask": None},
    ],
    ids=["not plain causal", "vmap", "tensor offset", "keys to come", "right padding", "a hole", "short", "device"],
)
def test_other_masks_are_the_models_own(change: dict[str, Any], base: str) -> None:
    arguments = sizes(4, 6, 5) | {"batch_size": 1, "attention_mask": torch.ones(1, 10, dtype=torch.bool)} | change
    theirs = (sdpa_mask if base == "sdpa" else eager_mask)(**arguments)
    ours = ranges_mask(**arguments, base=base)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.is_meta or torch.equal(ours, theirs)


# --- hand-overs, each on a model


def handed_over(model: Any, call: Any) -> Any:
    """What a call gives, which must have gone to the model's own attention."""
    with counted("ranges_attention") as computed:
        out = call(model)
    assert not computed.called
    return out


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_right_padding_is_handed_over(name: str) -> None:
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, 12:] = 0

    @torch.no_grad()
    def call(model: Any) -> Tensor:
        return model(ids, attention_mask=mask, use_cache=False).logits

    torch.testing.assert_close(handed_over(enabled(name), call), call(shared_model(name)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_packed_rows_are_handed_over(name: str) -> None:
    ids, positions = tokens(1, 20), torch.cat((torch.arange(12), torch.arange(8)))[None]

    @torch.no_grad()
    def call(model: Any) -> Tensor:
        return model(ids, position_ids=positions, use_cache=False).logits

    out = handed_over(enabled(name), call)
    torch.testing.assert_close(out, call(shared_model(name)), atol=1e-5, rtol=0)
    torch.testing.assert_close(out[:, 12:], logits(shared_model(name), ids[:, 12:]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_attention_outputs_that_are_asked_for_come_from_the_model(name: str) -> None:
    ids = tokens(1, 20)

    @torch.no_grad()
    def call(model: Any) -> tuple[Tensor, ...]:
        return model(ids, use_cache=False, output_attentions=True).attentions

    for ours, theirs in zip(handed_over(enabled(name), call), call(shared_model(name)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_gradients_are_the_models_own(name: str) -> None:
    ids = tokens(1, 20)

    def call(model: Any) -> Tensor:
        loss = model(ids, use_cache=False).logits.square().mean()
        return torch.autograd.grad(loss, model.get_input_embeddings().weight)[0]

    torch.testing.assert_close(handed_over(enabled(name), call), call(MODELS[name]()), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_dropout_is_the_models_own(name: str) -> None:
    ids = tokens(1, 20)

    @torch.no_grad()
    def call(model: Any) -> Tensor:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        torch.manual_seed(3)
        return model.train()(ids, use_cache=False).logits

    out = handed_over(enabled(name), call)
    torch.testing.assert_close(out, call(MODELS[name]()), atol=1e-5, rtol=0)
    assert not torch.allclose(out, logits(shared_model(name), ids), atol=1e-2)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_keys_that_are_yet_to_come_in_static_caches_are_handed_over(name: str) -> None:
    model, ids = enabled(name), tokens(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=40)
    with counted("ranges_attention") as computed:
        out = generated(model, ids, 12, **cache_argument(model, cache))
    assert torch.equal(out, uncached(shared_model(name), ids, 12))
    assert {call.args[0].shape[2] for call in computed.call_args_list} <= {20}  # while it is read, a prompt is plain


@torch.no_grad()
def test_a_mask_of_the_callers_own_is_handed_over() -> None:
    ids = tokens(1, 20)
    mask = torch.ones(20, 20).tril()[None, None].bool()
    out = handed_over(enabled("mistral"), lambda model: model(ids, attention_mask=mask, use_cache=False).logits)
    assert torch.equal(out, shared_model("mistral")(ids, attention_mask=mask, use_cache=False).logits)


def test_image_tokens_that_see_each_other_are_handed_over() -> None:
    config = hf.Gemma3Config(text_config=MODELS["gemma3"]().config.to_dict(), vision_config=_tiny_vision())
    config.image_token_id = 5
    torch.manual_seed(0)
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    ids = tokens(1, 30) + 6
    types = torch.zeros_like(ids)
    types[:, 4:12] = 1

    @torch.no_grad()
    def call(model: Any) -> Tensor:
        return model(ids % 120 + 6, token_type_ids=types, use_cache=False).logits

    expected = call(model)
    torch.testing.assert_close(handed_over(windowkv.enable(model), call), expected, atol=1e-5, rtol=0)


def _tiny_vision() -> Any:
    return hf.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )


def test_only_the_text_part_of_a_multimodal_model_is_switched() -> None:
    config = hf.Gemma3Config(text_config=MODELS["gemma3"]().config.to_dict(), vision_config=_tiny_vision())
    model = windowkv.enable(hf.Gemma3ForConditionalGeneration(config))
    assert model.config.text_config._attn_implementation == "windowkv_sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_a_compiled_forward_is_handed_over() -> None:
    model, ids = enabled("mistral"), tokens(1, 20)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)

    @torch.no_grad()
    def call(_: Any) -> Tensor:
        return compiled(ids, use_cache=False).logits

    torch.testing.assert_close(handed_over(model, call), logits(shared_model("mistral"), ids), atol=1e-4, rtol=0)


# --- enable and disable


def implementation(model: Any) -> str:
    return model.config.get_text_config()._attn_implementation


@pytest.mark.parametrize(("name", "before"), [("mistral", "sdpa"), ("gpt_oss", "eager")])
def test_enable_switches_and_disable_restores(name: str, before: str) -> None:
    model = MODELS[name]()
    config = copy.deepcopy(vars(model.config))
    assert implementation(windowkv.enable(model)) == f"windowkv_{before}"
    assert implementation(windowkv.enable(model)) == f"windowkv_{before}"
    windowkv.disable(model)
    assert vars(model.config) == config


def test_the_models_own_attention_can_be_kept() -> None:
    model = enabled("mistral")
    assert implementation(windowkv.enable(model, attention="model")) == "sdpa"
    out = handed_over(model, lambda model: generated(model, tokens(1, 20), 12))
    assert torch.equal(out, uncached(shared_model("mistral"), tokens(1, 20), 12))


def test_an_implementation_chosen_after_enable_stays() -> None:
    model = enabled("mistral")
    model.set_attn_implementation("eager")
    assert torch.equal(generated(model, tokens(1, 20), 12), uncached(shared_model("mistral"), tokens(1, 20), 12))
    assert implementation(windowkv.disable(model)) == "eager"


@pytest.mark.parametrize("name", STATEFUL)
def test_models_with_a_state_of_their_own_keep_their_attention(name: str) -> None:
    model = STATEFUL[name]()
    assert implementation(windowkv.enable(model)) == "sdpa"


@pytest.mark.parametrize("alibi", [False, True])
def test_a_model_that_does_not_attend_through_the_interface_keeps_its_attention(alibi: bool) -> None:
    config = hf.FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=alibi)
    model = hf.FalconForCausalLM(config).eval()
    before, expected = implementation(model), uncached(model, tokens(1, 20), 12)
    assert implementation(windowkv.enable(model, prefill_chunk=8)) == before
    assert torch.equal(generated(model, tokens(1, 20), 12), expected)


def test_copies_and_pickles_keep_the_fast_attention() -> None:
    model, ids = enabled("gemma3"), tokens(1, 20)
    expected = uncached(shared_model("gemma3"), ids, 12)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert implementation(twin) == "windowkv_sdpa"
        assert torch.equal(generated(twin, ids, 12), expected)


def test_a_saved_model_knows_nothing_of_it(tmp_path: Any) -> None:
    enabled("mistral").save_pretrained(tmp_path)
    assert "windowkv" not in (tmp_path / "config.json").read_text()
    assert implementation(hf.AutoModelForCausalLM.from_pretrained(tmp_path)) == "sdpa"


@pytest.mark.parametrize("attention", ["sdpa", None, True])
def test_a_bad_attention_is_refused_and_changes_nothing(attention: Any) -> None:
    model = MODELS["mistral"]()
    before = dict(vars(model))
    with pytest.raises(OptionError, match=r"attention=.*auto"):
        windowkv.enable(model, attention=attention)
    assert vars(model) == before


# --- chunks of the prompt


def chunks_of(model: Any, ids: Tensor, **options: Any) -> list[int]:
    """How many tokens each forward of generate is given."""
    given: list[int] = []
    hook = (
        model.get_decoder()
        .layers[0]
        .register_forward_pre_hook(
            lambda _, args, kwargs: given.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
            with_kwargs=True,
        )
    )
    generated(model, ids, 3, **options)
    hook.remove()
    return given


def test_a_long_prompt_is_read_in_chunks() -> None:
    ids = tokens(1, 50)
    assert chunks_of(enabled("gemma3", prefill_chunk=16), ids) == [16, 16, 16, 2, 1, 1]
    assert chunks_of(enabled("gemma3", prefill_chunk=None), ids) == [50, 1, 1]
    assert chunks_of(enabled("gemma3"), ids) == [50, 1, 1]
    assert chunks_of(enabled("gemma3", prefill_chunk=16), ids, prefill_chunk_size=40) == [40, 10, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "matrix_units", "expected"),
    [
        (torch.float32, True, [1024, 1024, 2]),
        (torch.bfloat16, True, [2048, 2]),
        (torch.bfloat16, False, [1024, 1024, 2]),
        (torch.float16, True, [1024, 1024, 2]),
    ],
)
def test_the_automatic_chunk_is_what_the_processor_is_best_at(
    dtype: torch.dtype, matrix_units: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "has_matrix_units", lambda: matrix_units)
    model = enabled("gemma3").to(dtype)  # after it was enabled
    assert chunks_of(model, tokens(1, 2050)) == [*expected, 1, 1]


def test_chunks_are_for_our_cache_only() -> None:
    model, ids = enabled("gemma3", prefill_chunk=16), tokens(1, 50)
    assert chunks_of(model, ids, use_cache=False) == [50, 51, 52]
    assert chunks_of(model, ids, **cache_argument(model, DynamicCache(config=model.config))) == [50, 1, 1]
    cache = DynamicSlidingWindowCache(model.config)
    assert chunks_of(model, ids, **cache_argument(model, cache)) == [16, 16, 16, 2, 1, 1]


def test_what_a_cache_has_seen_is_not_read_again() -> None:
    model = enabled("gemma3", prefill_chunk=16)
    cache = DynamicSlidingWindowCache(model.config)
    generated(model, tokens(1, 20), 1, **cache_argument(model, cache))
    read = sum(chunks_of(model, tokens(1, 60), **cache_argument(model, cache)))
    assert (read, cache.get_seq_length()) == (42, 62)


def test_embeddings_are_read_at_once() -> None:
    model, plain = enabled("gemma3", prefill_chunk=16), shared_model("gemma3")
    embeddings = plain.get_input_embeddings()(tokens(1, 50)).detach()
    options = {"inputs_embeds": embeddings, "attention_mask": torch.ones(1, 50), "max_new_tokens": 5}
    assert torch.equal(model.generate(**options), plain.generate(**options, use_cache=False))


def test_streaming_begins_after_the_last_chunk() -> None:
    model, ids, streamed = enabled("mistral", prefill_chunk=16), tokens(1, 50), []

    class Streamer:
        def put(self, value: Tensor) -> None:
            streamed.extend(value.flatten().tolist())

        def end(self) -> None:
            streamed.append(-1)

    out = generated(model, ids, 5, streamer=Streamer())
    assert streamed == [*ids[0].tolist(), *out[0].tolist(), -1]


def test_several_turns_are_read_in_chunks() -> None:
    model, plain = enabled("gemma3", prefill_chunk=8), shared_model("gemma3")
    cache, history = DynamicSlidingWindowCache(model.config), tokens(1, 21)
    for turn in range(3):
        reply = generated(model, history, 5, **cache_argument(model, cache))
        assert torch.equal(reply, uncached(plain, history, 5))
        history = torch.cat((history, reply, tokens(1, 19, seed=turn)), dim=1)


@pytest.mark.parametrize("prefill_chunk", [0, -1, 1.5, True, "large"])
def test_a_bad_chunk_is_refused_and_changes_nothing(prefill_chunk: Any) -> None:
    model = MODELS["mistral"]()
    before = dict(vars(model))
    with pytest.raises(OptionError, match="prefill_chunk="):
        windowkv.enable(model, prefill_chunk=prefill_chunk)
    assert vars(model) == before
