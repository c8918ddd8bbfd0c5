"""What a config says of its cache, by values; and the same as transformers says, but for named exceptions."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tiny import WINDOW, cache_argument, fed, logits, tokens
from windowkv import ConfigError, DynamicSlidingWindowCache, SlidingWindowCache
from windowkv.layers import BufferedLayer
from windowkv.layout import read_layout

SLIDING, FULL = "sliding_attention", "full_attention"
WIDE = 1 << 40


def pattern(config: Any) -> str:
    """One letter a layer: s(liding), c(hunked), f(ull), - where nothing is kept, x where it is left to transformers."""
    layout = read_layout(config)
    letters = {"sliding": "s", "chunked": "c", "full": "f", "shared": "-"}
    assert layout.foreign == tuple(i for i, layer in enumerate(layout.layers) if layer.kind not in letters)
    return "".join(letters.get(layer.kind, "x") for layer in layout.layers)


def windows(config: Any) -> list[int | None]:
    return [layer.window for layer in read_layout(config).layers]


def test_explicit_layer_types_decide() -> None:
    config = hf.MinistralConfig(num_hidden_layers=3, sliding_window=WINDOW, layer_types=[FULL, SLIDING, FULL])
    assert pattern(config) == "fsf"
    assert windows(config) == [None, WINDOW, None]


@pytest.mark.parametrize("window", [1, 2, 4096, WIDE])
def test_without_layer_types_a_window_is_for_every_layer(window: int) -> None:
    config = hf.MistralConfig(num_hidden_layers=3, sliding_window=window)
    assert pattern(config) == "sss"
    assert windows(config) == [window] * 3


def test_a_window_may_go_by_another_name() -> None:
    class RenamedConfig(hf.PreTrainedConfig):
        attribute_map: ClassVar[dict[str, str]] = {"sliding_window": "attention_window_size"}
        num_hidden_layers: int = 2
        num_attention_heads: int = 4
        hidden_size: int = 64
        attention_window_size: int = WINDOW

    assert windows(RenamedConfig()) == [WINDOW] * 2


def test_without_a_window_every_layer_is_full() -> None:
    config = hf.MistralConfig(num_hidden_layers=3, sliding_window=None)
    assert pattern(config) == "fff"
    assert windows(config) == [None] * 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "ffff"),  # present, but switched off
        ({"use_sliding_window": False, "max_window_layers": 0}, "ffff"),
        ({"use_sliding_window": True}, "ffff"),  # from layer 28 on, of 4
        ({"use_sliding_window": True, "max_window_layers": 4}, "ffff"),
        ({"use_sliding_window": True, "max_window_layers": 2}, "ffss"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "ssss"),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, "ffff"),
        ({"use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL, SLIDING]}, "sffs"),
    ],
)
def test_qwen2_slides_where_its_three_settings_agree(options: dict[str, Any], expected: str) -> None:
    config = hf.Qwen2Config(**{"num_hidden_layers": 4, "sliding_window": WINDOW} | options)
    assert pattern(config) == expected
    assert windows(config) == [WINDOW if letter == "s" else None for letter in expected]


@pytest.mark.parametrize(
    ("config_class", "options", "expected"),
    [
        (hf.Gemma2Config, {}, "sfsfsfs"),
        (hf.Gemma3TextConfig, {}, "sssssfs"),
        (hf.Gemma3TextConfig, {"sliding_window_pattern": 3}, "ssfssfs"),
        (hf.Cohere2Config, {}, "sssfsss"),
        (hf.Cohere2Config, {"sliding_window_pattern": 2}, "sfsfsfs"),
        (hf.Llama4TextConfig, {"attention_chunk_size": WINDOW}, "cccfccc"),
        (hf.GptOssConfig, {}, "sfsfsfs"),
    ],
)
def test_patterns_of_models(config_class: Any, options: dict[str, Any], expected: str) -> None:
    config = config_class(num_hidden_layers=7, **{"sliding_window": WINDOW} | options)
    assert pattern(config) == expected
    assert windows(config) == [None if letter == "f" else WINDOW for letter in expected]


def test_layers_may_differ_in_window_and_heads() -> None:
    config = hf.MistralConfig(
        num_hidden_layers=3,
        sliding_window=WINDOW,
        num_key_value_heads=8,
        per_layer_config={1: {"sliding_window": None}, 2: {"sliding_window": 16, "num_key_value_heads": 4}},
    )
    assert [(layer.kind, layer.window, layer.kv_heads) for layer in read_layout(config).layers] == [
        ("sliding", WINDOW, 8),
        ("full", None, 8),
        ("sliding", 16, 4),
    ]


@pytest.mark.parametrize("config_class", [hf.Gemma3nTextConfig, hf.Gemma4TextConfig])
def test_layers_that_read_the_keys_of_another_keep_nothing(config_class: Any) -> None:
    types = [SLIDING, SLIDING, FULL] * 2
    config = config_class(num_hidden_layers=6, num_kv_shared_layers=3, sliding_window=WINDOW, layer_types=types)
    assert pattern(config) == "ssf---"
    assert windows(config) == [WINDOW, WINDOW, None, None, None, None]


def test_layers_without_attention_keep_nothing() -> None:
    assert pattern(hf.NemotronHConfig(layers_block_type=["linear_attention", "moe", FULL, "mlp"])) == "x-f-"


def test_a_text_config_within_another_is_found() -> None:
    text = hf.Gemma3TextConfig(num_hidden_layers=3, sliding_window=WINDOW, layer_types=[SLIDING, FULL, SLIDING])
    assert read_layout(hf.Gemma3Config(text_config=text)) == read_layout(text)
    assert pattern(text) == "sfs"


def test_of_an_encoder_decoder_the_decoder_counts() -> None:
    assert pattern(hf.BartConfig(encoder_layers=2, decoder_layers=3)) == "fff"
    decoder = {"num_hidden_layers": 3, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]}
    config = hf.T5GemmaConfig(encoder={"num_hidden_layers": 2}, decoder=decoder)
    assert pattern(config) == "sfs"
    assert windows(config) == [WINDOW, None, WINDOW]


def test_cross_attention_layers_are_left_to_transformers() -> None:
    assert (
        pattern(hf.MllamaConfig(text_config={"num_hidden_layers": 5, "cross_attention_layers": [1, 3, 8]})) == "fxfxf"
    )


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_is_no_number_of_tokens_is_refused(window: int) -> None:
    with pytest.raises(
        ConfigError, match=f"layer 0 of MistralConfig is sliding but sliding_window={window}: .* positive"
    ):
        read_layout(hf.MistralConfig(sliding_window=window))


@pytest.mark.parametrize("window", [True, False, 8.0, "8", [8]])
def test_a_window_of_another_type_is_refused(window: Any) -> None:
    class LooseConfig(hf.PreTrainedConfig):
        num_hidden_layers: int = 2
        num_attention_heads: int = 4
        hidden_size: int = 64
        sliding_window: Any = None

    with pytest.raises(ConfigError, match="layer 0 of LooseConfig is sliding but sliding_window="):
        read_layout(LooseConfig(sliding_window=window))


def test_a_sliding_layer_without_a_window_is_refused_by_its_number() -> None:
    config = hf.Qwen2Config(
        num_hidden_layers=2, sliding_window=WINDOW, layer_types=[FULL, SLIDING]
    )  # use_sliding_window=False
    with pytest.raises(ConfigError, match="layer 1 of Qwen2Config is sliding but sliding_window=None"):
        read_layout(config)


def test_a_chunked_layer_without_a_chunk_size_is_refused() -> None:
    config = hf.Llama4TextConfig(num_hidden_layers=2, layer_types=["chunked_attention"] * 2)
    config.attention_chunk_size = None
    with pytest.raises(ConfigError, match="layer 0 of Llama4TextConfig is chunked but attention_chunk_size=None"):
        read_layout(config)


UNUSED_WINDOWS = {
    "moshi": hf.MoshiConfig,
    "moshi_depth": lambda **options: CONFIG_MAPPING["moshi_depth"](**options),
    "kyutai_speech_to_text": hf.KyutaiSpeechToTextConfig,
    "qwen3_omni_moe_text": lambda **options: type(hf.Qwen3OmniMoeThinkerConfig().text_config)(**options),
    "qwen3_omni_moe_talker_text": lambda **options: type(hf.Qwen3OmniMoeTalkerConfig().text_config)(**options),
    "llama": hf.LlamaConfig,  # any class that does not declare the key
    "minimax_m2": hf.MiniMaxM2Config,
}


@pytest.mark.parametrize("name", UNUSED_WINDOWS)
def test_a_window_that_no_code_applies_is_no_window(name: str) -> None:
    config = UNUSED_WINDOWS[name](num_hidden_layers=2, sliding_window=WINDOW)
    assert config.sliding_window == WINDOW
    assert config.get_text_config(decoder=True).model_type == name
    assert pattern(config) == "ff"


@pytest.mark.parametrize(
    "config",
    [
        hf.Gemma3TextConfig(use_bidirectional_attention=True),  # EmbeddingGemma
        hf.Gemma3Config(text_config={"use_bidirectional_attention": True}),
        hf.Gemma4TextConfig(use_bidirectional_attention="all"),
        hf.BertConfig(),
        hf.RobertaConfig(is_decoder=False),
        hf.Qwen2Config(is_causal=False),
    ],
    ids=lambda config: type(config).__name__,
)
def test_models_that_see_later_tokens_are_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="its tokens see later ones"):
        read_layout(config)


@pytest.mark.parametrize(
    "config",
    [
        hf.BertConfig(is_decoder=True),
        hf.GPTNeoXConfig(),  # is_decoder is False in these, for historical reasons
        hf.GPTNeoXJapaneseConfig(),
        hf.MusicgenDecoderConfig() if hasattr(hf, "MusicgenDecoderConfig") else CONFIG_MAPPING["musicgen_decoder"](),
        hf.TrOCRConfig(),
        hf.Gemma4TextConfig(use_bidirectional_attention="vision"),  # images only
        hf.PaliGemmaConfig(),  # the prompt only
    ],
    ids=lambda config: type(config).__name__,
)
def test_causal_models_are_served(config: Any) -> None:
    assert set(pattern(config)) <= {"f", "s"}


@pytest.mark.parametrize("source", [None, "mistral", {"num_hidden_layers": 2}, 3, object()])
def test_what_is_no_config_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"no transformers config; pass model\.config"):
        read_layout(source)


def test_a_config_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="PreTrainedConfig names no num_hidden_layers"):
        read_layout(hf.PreTrainedConfig())


@pytest.mark.parametrize(
    "config", [hf.MambaConfig(num_hidden_layers=2), hf.RecurrentGemmaConfig(attention_window_size=WINDOW)]
)
def test_recurrent_models_are_served(config: Any) -> None:
    assert len(read_layout(config).layers) == config.num_hidden_layers
    assert set(windows(config)) <= {None, WINDOW}


def test_recurrent_layers_have_no_window_however_a_release_names_them() -> None:
    class OlderConfig(hf.RecurrentGemmaConfig):
        attribute_map: ClassVar[dict[str, str]] = {"sliding_window": "attention_window_size"}

        @property
        def layers_block_type(self) -> list[str]:
            return (self.block_types * 100)[: self.num_hidden_layers]

    sizes = {"num_hidden_layers": 5, "attention_window_size": WINDOW}
    assert windows(OlderConfig(**sizes)) == [None, None, WINDOW, None, None]
    assert read_layout(OlderConfig(**sizes)).foreign == (0, 1, 3, 4)
    assert read_layout(OlderConfig(**sizes)) == read_layout(hf.RecurrentGemmaConfig(**sizes))
    with pytest.raises(ConfigError, match="OlderConfig has no layer_types"):
        SlidingWindowCache(OlderConfig(**sizes), max_cache_len=50)


# --- Sizes, against what attention really hands to the cache ---

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "pad_token_id": 0,
}
NAMED_OTHERWISE: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 1,
    "n_routed_experts": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}


def _falcon(**options: Any) -> Any:
    return hf.FalconForCausalLM(hf.FalconConfig(**SIZES, **options))


HANDED_TO_THE_CACHE: dict[str, tuple[Callable[[], Any], list[tuple[int, int, int]]]] = {
    "grouped heads": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=12)),
        [(2, 12, 12)] * 2,
    ),
    "one head for all": (lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**NAMED_OTHERWISE)), [(1, 16, 16)] * 2),
    "not one for all": (
        lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**NAMED_OTHERWISE, multi_query=False)),
        [(4, 16, 16)] * 2,
    ),
    "falcon-7b": (_falcon, [(1, 16, 16)] * 2),
    "falcon-rw": (lambda: _falcon(multi_query=False), [(4, 16, 16)] * 2),
    "falcon-40b": (lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2), [(4, 16, 16)] * 2),
    "latent attention": (
        lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES, **EXPERTS, **LATENT, n_group=1, topk_group=1)),
        [(1, 24, 8)] * 2,
    ),
    "values of their own size": (
        lambda: hf.MiMoV2FlashForCausalLM(
            hf.MiMoV2FlashConfig(
                **SIZES,
                **EXPERTS,
                head_dim=16,
                v_head_dim=20,
                num_key_value_heads=2,
                sliding_window=8,
                layer_types=[FULL, SLIDING],
            )
        ),
        [(2, 16, 20), (4, 16, 20)],
    ),
    "full layers of their own": (
        lambda: hf.Gemma4ForCausalLM(
            hf.Gemma4TextConfig(
                **SIZES,
                intermediate_size=32,
                num_key_value_heads=2,
                head_dim=16,
                global_head_dim=24,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                hidden_size_per_layer_input=0,
                layer_types=[SLIDING, FULL],
            )
        ),
        [(2, 16, 16), (1, 24, 24)],
    ),
}


@pytest.mark.parametrize("name", HANDED_TO_THE_CACHE)
@torch.no_grad()
def test_heads_and_sizes_are_those_that_the_cache_gets(name: str) -> None:
    build, expected = HANDED_TO_THE_CACHE[name]
    model = build().eval()
    cache = DynamicSlidingWindowCache(model.config)
    model(tokens(1, 3), **cache_argument(model, cache))
    assert [
        tuple(size for states in layer.buffer.storages for size in states.shape[1::2]) for layer in cache.layers
    ] == [(kv_heads, head_dim, kv_heads, value_head_dim) for kv_heads, head_dim, value_head_dim in expected]
    assert [(layer.kv_heads, layer.head_dim, layer.value_head_dim) for layer in cache.layout.layers] == expected


@pytest.mark.parametrize(
    ("model_class", "config_class"), [(hf.MoshiForCausalLM, hf.MoshiConfig), (hf.LlamaForCausalLM, hf.LlamaConfig)]
)
def test_output_is_exact_beyond_a_window_that_no_code_applies(model_class: Any, config_class: Any) -> None:
    torch.manual_seed(0)
    config = config_class(
        **SIZES, sliding_window=WINDOW, initializer_range=0.15, max_position_embeddings=64, ffn_dim=64
    )
    model, ids = model_class(config).eval(), tokens(1, 3 * WINDOW)
    cache = DynamicSlidingWindowCache(model.config)
    torch.testing.assert_close(fed(model, cache, ids, 2 * WINDOW), logits(model, ids), atol=1e-4, rtol=0)


# --- Against transformers ---

# Where transformers bounds a layer, or does not, and windowkv for a reason does otherwise.
DIFFERENT_FOR_A_REASON = {
    "dory": "its code adds layers to transformers' cache during the first forward",
    "moshi": "its code never applies the window",
}
# Transformers knows their layers only once their code is imported, and windowkv leaves every one of them alone.
WITH_LAYERS_OF_THEIR_OWN = {"deepseek_v4"}
if not hasattr(hf.RecurrentGemmaConfig(), "layer_types"):  # older releases give layers with a state a window instead
    DIFFERENT_FOR_A_REASON["recurrent_gemma"] = "its config does not tell which of its layers are recurrent"


def _theirs(layer: Any) -> tuple[str, int | None]:
    if type(layer) is DynamicSlidingWindowLayer:
        return "bounded", layer.sliding_window
    return ("full" if type(layer) is DynamicLayer else "left to transformers"), None


def _ours(layer: Any) -> tuple[str, int | None]:
    if not isinstance(layer, BufferedLayer):
        return "left to transformers", None
    return "full" if layer.buffer.retention.window is None else "bounded", layer.buffer.retention.window


def _default_config(model_type: str) -> Any:
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception:  # a few cannot be made without arguments
        return None


def test_default_configs_with_a_window_get_the_layers_that_transformers_gives_them() -> None:
    windowed, different = set(), set()
    for model_type in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - WITH_LAYERS_OF_THEIR_OWN:
        config = _default_config(model_type)
        if config is None or not hasattr(config.get_text_config(decoder=True), "num_hidden_layers"):
            continue
        theirs = [_theirs(layer) for layer in DynamicCache(config=config).layers]
        if any(kind == "bounded" for kind, _ in theirs):
            windowed.add(model_type)
            if theirs != [_ours(layer) for layer in DynamicSlidingWindowCache(config).layers]:
                different.add(model_type)
    assert len(windowed) > 25
    assert different == set(DIFFERENT_FOR_A_REASON) & set(CONFIG_MAPPING)
