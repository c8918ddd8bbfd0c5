"""Every cache with every architecture that can have a window, doing all that a cache is used for.

A sample in the normal run; all of them with `--every-architecture` (`make test-all`).
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import windowkv
from tiny import MODELS, WINDOW, build, generated, uncached
from windowkv import DynamicSlidingWindowCache, PrefixStore
from windowkv.architectures import windowed_configs
from windowkv.cache import layers_nbytes
from windowkv.continuation import cache_name
from windowkv.doctor import CACHES, Examination, examine
from windowkv.errors import ConfigError, TinyModelError
from windowkv.layout import read_layout
from windowkv.operations import OPERATIONS, text
from windowkv.tiny_model import tiny_model

OURS = [kind for kind in CACHES if kind.ours]
# One of each kind of layers, and of each way to name them.
SAMPLE = [
    "deepseek_v4",  # compressed
    "dory",  # layers run several times
    "dots3_note_text",  # indexed
    "gemma3",  # the text part of a multimodal model
    "gemma3n_text",  # shared
    "gpt_oss",  # sink logits
    "inkling_text",  # hybrid
    "lara_mini",  # full, sliding and linear
    "lfm3",  # convolutions
    "llama4_text",  # chunked
    "minimax",  # a cache class of its own
    "modernbert-decoder",  # a window by another name
    "moshi",  # a window that no code applies
    "recurrent_gemma",  # recurrent
]


def _qwen2(**options: Any) -> Any:
    return build(hf.Qwen2ForCausalLM, hf.Qwen2Config, **{"sliding_window": WINDOW} | options)


ROWS: Mapping[str, Callable[[], Any]] = {
    **{name: MODELS[name] for name in MODELS if name.startswith("mistral")},
    "qwen2-off": lambda: _qwen2(use_sliding_window=False),
    "qwen2-off-from-the-first": lambda: _qwen2(use_sliding_window=False, max_window_layers=0),
    "qwen2-from-layer-28-of-4": lambda: _qwen2(use_sliding_window=True),
    "qwen2-from-the-third": lambda: _qwen2(use_sliding_window=True, max_window_layers=2),
    "qwen2-from-the-first": lambda: _qwen2(use_sliding_window=True, max_window_layers=0),
    "qwen2-on-without-a-window": lambda: _qwen2(use_sliding_window=True, max_window_layers=0, sliding_window=None),
    "qwen2-by-layer-types": lambda: _qwen2(
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    ),
}

# What windowkv's caches do not do the same, and why: how the cell begins. All else must be the same.
_THEIRS = "transformers' own fault: token .* without a cache; so with its own cache"
_MAYBE_THEIRS = f"same$|{_THEIRS}"  # depends on the release
_NO_WAY_BACK = {"crop": "refused, because cannot take back 5 tokens"}  # states of transformers' own layers
_STATEFUL = _NO_WAY_BACK | {"assisted": "refused, because assisted generation is not supported with stateful models"}
# It takes no cache class but its own; its beams go wrong with that one too.
_OWN_CACHE = "same$|refused, because (MiniMax uses cache|[Aa]ssisted decoding requires a cache)|transformers' own fault"
_EXPECTED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(["lara_mini", "nemo_speechlm", "nemotron_h", "nemotron_h_omni", "zaya"], _STATEFUL),
    **dict.fromkeys(["inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text"], _NO_WAY_BACK),
    **dict.fromkeys(["inkling_mm_model", "inkling_text", "lfm3", "lfm3_vl"], _NO_WAY_BACK),
    # Padding is compressed together with tokens.
    "deepseek_v4": _STATEFUL | {"padded batch": _THEIRS, "beams": _MAYBE_THEIRS},
    # Its mask depends on what it is fed at once, in older releases.
    "doge": dict.fromkeys(["generate short", "generate at the window"], _MAYBE_THEIRS),
    "minimax": dict.fromkeys(OPERATIONS, _OWN_CACHE),
    # Several tokens on top of a recurrent state.
    "recurrent_gemma": _STATEFUL | {"two turns": _THEIRS},
    # Its windows begin with the prompt, and a second prompt has none.
    "unlimited_ocr": _NO_WAY_BACK | dict.fromkeys(["two turns", "fork", "save and load"], _THEIRS),
    # It reads and writes sound, by a generate of its own that wants a scheduler.
    "vibevoice": dict.fromkeys(OPERATIONS, "same$|refused|transformers' own fault"),
}
_TAKES_NO_CACHE = ("minimax", "vibevoice")  # of another class than its own, or handed to generate
# The same of static caches.
_STATIC = {
    "fork": "refused, because a static cache shares no storage",
    "save and load": "refused, because a static cache is not saved",
}
_NO_STATIC_LAYERS = "refused, because transformers has no static layers of kind"
_MASKED_BY_GENERATE = "refused, because .* that its model never applies, and generate would apply to a static cache"
# Masks of layers with states and a window are made for layers with states alone.
_MASKED_TOO_SHORT = "refused, because static hybrid_sliding layers get masks of another length"
_EXPECTED_STATIC: dict[str, Mapping[str, str]] = {
    "deepseek_v4": dict.fromkeys(OPERATIONS, _NO_STATIC_LAYERS),
    "unlimited_ocr": dict.fromkeys(OPERATIONS, "refused, because static reference_sliding_attention layers"),
    **{name: {"assisted": "refused, because cannot take back"} for name in ("lfm3", "lfm3_vl")},
    **dict.fromkeys(
        ["moshi", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe"],
        dict.fromkeys(OPERATIONS, _MASKED_BY_GENERATE),
    ),
    **dict.fromkeys(
        ["inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text", "inkling_mm_model", "inkling_text"],
        dict.fromkeys(OPERATIONS, _MASKED_TOO_SHORT),
    ),
}
# Whose forward asks for more than text.
_NOT_BUILT = {"kyutai_speech_to_text", "voxtral_realtime"}
_release = Version(hf.__version__)
if _release < Version("5.24"):  # its sliding layers need rotary parameters that its config lacks
    _NOT_BUILT |= {"step3p7"}
_NOT_PLANNED = {*_NOT_BUILT, *_TAKES_NO_CACHE}
if _release < Version("5.23"):  # its config does not tell which of its layers are recurrent
    _EXPECTED_STATIC |= {"recurrent_gemma": dict.fromkeys(OPERATIONS, "refused, because RecurrentGemmaConfig has no")}
if _release < Version("5.20"):  # generate hands a chunked mask's function an argument that it lacks
    _unmasked = r"(transformers' own fault|failure): TypeError: create_chunked_causal_mask\(\) got an unexpected"
    _EXPECTED_STATIC |= {"llama4_text": dict.fromkeys(OPERATIONS, _unmasked) | {"instantiate": "same$"}}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function in (test_every_cache_with, test_a_plan_is_exact_for):
        every = metafunc.config.getoption("every_architecture")
        found = [name for name, _ in windowed_configs()] if every else SAMPLE
        without = _NOT_PLANNED if metafunc.function is test_a_plan_is_exact_for else ()
        metafunc.parametrize("architecture", [name for name in found if name in CONFIG_MAPPING and name not in without])


def unexpected(examination: Examination, architecture: str = "") -> dict[tuple[str, str], str]:
    """The cells of windowkv's caches that are not as expected, by operation and cache."""
    expected = _EXPECTED.get(architecture, {})
    of_static = {} if architecture in _TAKES_NO_CACHE else _STATIC | _EXPECTED_STATIC.get(architecture, {})
    return {
        (operation, kind.name): str(row[kind.name])
        for operation, row in examination.cells.items()
        for kind in OURS
        if not re.match(
            (expected | of_static if kind.name == "SlidingWindowCache" else expected).get(operation, "same$"),
            str(row[kind.name]),
        )
    }


def packing_error(model: Any) -> float:
    """How far packed keys and values move the next logits, as a share of them: the operations' texts are too short.

    The median of some tokens: a router that decides otherwise moves one of them far.
    """

    def logits(**options: Any) -> torch.Tensor:
        cache = DynamicSlidingWindowCache(model.config, **options)
        with torch.no_grad():
            outputs = [model(ids, **{cache_name(model): cache}, use_cache=True) for ids in texts]
        return torch.cat([out.logits[:, -1] for out in outputs[1:]])

    texts = text(1, 130).split([120] + [1] * 10, dim=1)
    plain = logits()
    return float(((logits(kv_dtype="int8") - plain).norm(dim=-1) / plain.norm(dim=-1)).median())


def test_every_cache_with(architecture: str) -> None:
    config = CONFIG_MAPPING[architecture]()
    if architecture in _NOT_BUILT:
        with pytest.raises(TinyModelError, match="can be built that reads text alone"):
            tiny_model(config, windows=True)
        return
    model = tiny_model(config, windows=True)
    assert unexpected(examine(model, caches=OURS), architecture) == {}
    if architecture not in _TAKES_NO_CACHE:
        assert packing_error(model) < 0.03


def planned_caches(config: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """`(options of plan, empty cache)` of every kind that a model can have."""
    for options in ({}, {"kv_dtype": "int8"}, {"kv_dtype": "int4", "quantize": "all", "rollback": 5}):
        yield options, DynamicSlidingWindowCache(config, **options)
    with contextlib.suppress(ConfigError):  # some cannot be static
        yield {"cache": "static", "max_cache_len": 180}, windowkv.SlidingWindowCache(config, max_cache_len=180)


def test_a_plan_is_exact_for(architecture: str) -> None:
    model = tiny_model(CONFIG_MAPPING[architecture](), windows=True)
    for options, cache in planned_caches(model.config):
        seen = 0
        for chunk in text(2, 175).split([5, 1, 60, 1, 108], dim=1):
            with torch.no_grad():
                model(chunk, **{cache_name(model): cache}, use_cache=True)
            seen += chunk.shape[1]
            planned = windowkv.plan(model.config, tokens=seen, batch_size=2, dtype=torch.float32, **options)
            ours = [layer for i, layer in enumerate(cache.layers) if i not in planned.uncounted]
            assert planned.total_bytes == layers_nbytes(ours), (options, seen)
            assert planned.uncounted or planned.total_bytes == cache.nbytes


@pytest.mark.parametrize("architecture_without_window", ["moshi", "qwen3_omni_moe_thinker", "nemotron_h"])
def test_a_window_that_no_code_applies_makes_full_layers(architecture_without_window: str) -> None:
    config = tiny_model(CONFIG_MAPPING[architecture_without_window](), windows=True).config
    assert config.get_text_config(decoder=True).sliding_window == WINDOW
    assert not any(layer.bounded for layer in read_layout(config).layers)


@pytest.mark.parametrize(
    ("architecture", "resumed"),
    [(name, resumed) for name, resumed in {"dory": True, "unlimited_ocr": False}.items() if name in CONFIG_MAPPING],
)
def test_a_store_resumes_layers_or_keeps_nothing_of_them(architecture: str, resumed: bool) -> None:
    """Layers that are run several times, and windows that begin where the first forward ended."""
    model, store = tiny_model(CONFIG_MAPPING[architecture](), windows=True), PrefixStore(1 << 20)
    ids = text(1, 5 * WINDOW)
    expected = uncached(model, ids, 9)
    windowkv.enable(model, prefix_store=store)
    generated(model, ids[:, : 3 * WINDOW], 9)
    assert torch.equal(generated(model, ids, 9), expected)
    assert (store.stats.tokens_reused > 0) == resumed


@pytest.mark.parametrize("name", ROWS)
def test_every_cache_with_the_window_settings_of(name: str) -> None:
    model = ROWS[name]()
    assert unexpected(examine(model, caches=OURS)) == {}
    assert packing_error(model) < 0.03
