"""What a model config says of its cache: one LayerSpec per layer.

Reads attributes of a config object. Knows nothing of tensors, and does not import torch or transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from windowkv.errors import ConfigError, OptionError

_KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    # layers without attention, kept in `layer_types` only to be counted
    "dummy": "shared",
    "moe": "shared",
    "mlp": "shared",
}
_WINDOW_NAMES = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
# The config names a window that the modeling code never applies: dropping tokens would change what these compute.
_WINDOW_NOT_APPLIED = frozenset(
    {"kyutai_speech_to_text", "moshi", "moshi_depth", "qwen3_omni_moe_talker_text", "qwen3_omni_moe_text"}
)
# Attention whose sliding layers have more heads of keys and values than the config says: how many times as many.
_SLIDING_KV_HEADS = {"mimo_v2_flash": 2}
# Decoders whose config says `is_decoder=False` for historical reasons.
_DECODERS_NOT_SO_CALLED = frozenset(
    {"evolla", "gpt_neox", "gpt_neox_japanese", "musicgen_decoder", "musicgen_melody_decoder", "trocr"}
)
# Only the prompt sees later tokens here, and it is fed whole: what is generated after it is causal.
BIDIRECTIONAL_PROMPT = frozenset({"paligemma"})


@dataclass(frozen=True)
class LayerSpec:
    """One layer's share of the cache.

    `kind` is "full", "sliding", "chunked", "shared" (keeps nothing: no attention, or another layer's keys and values),
    or the name of a kind that windowkv leaves to transformers, such as "linear_attention".
    """

    kind: str
    window: int | None  # tokens that a query sees, itself included; None without a window
    kv_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def bounded(self) -> bool:
        """Whether windowkv keeps only the window's tail of this layer."""
        return self.kind in ("sliding", "chunked")

    @property
    def buffered(self) -> bool:
        """Whether windowkv stores this layer itself."""
        return self.bounded or self.kind == "full"


@dataclass(frozen=True)
class CacheLayout:
    """The layers of one model's cache, in order."""

    layers: tuple[LayerSpec, ...]

    @cached_property
    def foreign(self) -> tuple[int, ...]:
        """Indices of the layers whose kind windowkv leaves to transformers."""
        return tuple(i for i, layer in enumerate(self.layers) if not layer.buffered and layer.kind != "shared")


def difference(one: CacheLayout, other: CacheLayout) -> str | None:
    """What the first layer that differs has in one layout instead of in the other; None when they are equal."""
    if len(one.layers) != len(other.layers):
        return f"{len(one.layers)} layers instead of {len(other.layers)}"
    for i, pair in enumerate(zip(one.layers, other.layers, strict=True)):
        theirs, ours = (vars(spec) for spec in pair)
        unlike = [f"{key} {theirs[key]} instead of {ours[key]}" for key in ours if theirs[key] != ours[key]]
        if unlike:
            return f"layer {i} has {', '.join(unlike)}"
    return None


def read_layout(config: Any, *, ranks: int = 1) -> CacheLayout:
    """The cache layout of a transformers config; of the text part when there are several.

    With `ranks`, what each of so many tensor-parallel ranks keeps: its share of the heads. Where there are fewer heads
    of keys and values than ranks, several ranks keep the same one.

    Raises ConfigError when it is no config of a causal decoder, or says that a layer slides and names no window, and
    OptionError when heads cannot be shared out among that many ranks.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise OptionError(f"ranks={ranks!r}: it is a number of tensor-parallel ranks, an integer >= 1")
    decoder = _decoder_config(config)
    layer_configs = _layer_configs(decoder)
    kinds = _kinds(decoder, layer_configs)
    specs = [
        _share(_spec(kind, layer_config, i), layer_config, ranks)
        for i, (kind, layer_config) in enumerate(zip(kinds, layer_configs, strict=False))
    ]
    return CacheLayout(tuple(specs + [specs[i] for i in _run_again(decoder)]))


def keys_follow_length(config: Any) -> bool:
    """Whether keys are rotated by how long the whole text is, so that reading it in parts gives others."""
    decoder = config.get_text_config(decoder=True)
    told = [getattr(decoder, name, None) for name in ("rope_parameters", "rope_scaling")]
    settings = [each for each in told if isinstance(each, dict)]
    settings += [each for setting in settings for each in setting.values() if isinstance(each, dict)]
    return any(each.get("rope_type", each.get("type")) in ("dynamic", "longrope") for each in settings)


def _decoder_config(config: Any) -> Any:
    if not callable(getattr(config, "get_text_config", None)):
        raise ConfigError(f"a {type(config).__name__} is no transformers config; pass model.config")
    decoder = config.get_text_config(decoder=True)
    if not isinstance(getattr(decoder, "num_hidden_layers", None), int):
        raise ConfigError(
            f"{type(config).__name__} names no num_hidden_layers: it describes no decoder with layers to cache"
        )
    if not getattr(config, "is_encoder_decoder", False) and config.model_type not in BIDIRECTIONAL_PROMPT:
        _check_causal(decoder)
    return decoder


def _check_causal(decoder: Any) -> None:
    for name, is_set in (
        ("is_causal", getattr(decoder, "is_causal", True) is False),
        ("use_bidirectional_attention", getattr(decoder, "use_bidirectional_attention", None) in (True, "all")),
        (
            "is_decoder",
            getattr(decoder, "is_decoder", True) is False and decoder.model_type not in _DECODERS_NOT_SO_CALLED,
        ),
    ):
        if is_set:
            raise ConfigError(
                f"{type(decoder).__name__} has {name}={getattr(decoder, name)!r}: its tokens see later ones, so past "
                "keys and values cannot be cached; only causal decoders have a cache"
            )


def _layer_configs(decoder: Any) -> Sequence[Any]:
    """One config per layer; the same one for all where layers do not differ."""
    layer_configs = getattr(decoder, "per_layer_config", None)
    # T5 and its kin count the encoder's layers in num_hidden_layers.
    layers = getattr(decoder, "num_decoder_layers", None) or decoder.num_hidden_layers
    return [decoder] * layers if layer_configs is None or len(layer_configs) != layers else list(layer_configs)


def _kinds(decoder: Any, layer_configs: Sequence[Any]) -> list[str]:
    kinds = [_KINDS.get(layer_type, layer_type) for layer_type in _layer_types(decoder, layer_configs)]
    if decoder.model_type in _WINDOW_NOT_APPLIED:
        kinds = ["full" if kind in _WINDOW_NAMES else kind for kind in kinds]
    # These hold what an encoder saw, so their length is not the number of tokens.
    cross = getattr(decoder, "cross_attention_layers", None) or ()
    kinds = ["cross_attention" if i in cross else kind for i, kind in enumerate(kinds)]
    return ["shared" if reuses else kind for kind, reuses in zip(kinds, _reuses(decoder, len(kinds)), strict=False)]


def _layer_types(decoder: Any, layer_configs: Sequence[Any]) -> Sequence[str]:
    told: Sequence[str] | None = getattr(decoder, "layer_types", None)
    if told is not None:
        return told
    inferred = [_inferred_type(layer_config) for layer_config in layer_configs]
    # RecurrentGemma's layers in older releases; those with a state never reach the cache.
    blocks = getattr(decoder, "layers_block_type", None) or ["attention"] * len(inferred)
    return ["linear_attention" if block == "recurrent" else kind for block, kind in zip(blocks, inferred, strict=True)]


def _inferred_type(layer_config: Any) -> str:
    for kind, name in _WINDOW_NAMES.items():
        if _knows(layer_config, name) and getattr(layer_config, name) is not None:
            return f"{kind}_attention"
    return "full_attention"


def _knows(config: Any, name: str) -> bool:
    """Whether the class of a config declares a key: one that it does not is read by no code of its model."""
    return hasattr(type(config), config.attribute_map.get(name, name))


def _reuses(decoder: Any, layers: int) -> list[bool]:
    """Which layers read another layer's keys and values instead of keeping their own."""
    modes = getattr(decoder, "kv_sharing_modes", None)
    if modes is not None:
        return [mode == "reuse" for mode in modes]
    shared = getattr(decoder, "num_kv_shared_layers", None) or 0
    return [i >= layers - shared for i in range(layers)]


def _run_again(decoder: Any) -> list[int]:
    """The layers that are run once more with keys and values of their own, which lie behind those of all layers."""
    if getattr(decoder, "recurrent_kv_cache_mode", None) != "per_loop":
        return []
    first, loops = decoder.n_input_layers, decoder.n_recurrent_loops
    return [*range(first, first + decoder.n_recurrent_layers)] * (loops - 1)


def _spec(kind: str, layer_config: Any, index: int) -> LayerSpec:
    kv_heads, head_dim, value_head_dim = _dimensions(layer_config, kind)
    return LayerSpec(kind, _window(kind, layer_config, index), kv_heads, head_dim, value_head_dim)


def _window(kind: str, layer_config: Any, index: int) -> int | None:
    if kind not in _WINDOW_NAMES:
        return None
    name = _WINDOW_NAMES[kind]
    window = getattr(layer_config, name, None)
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(
            f"layer {index} of {type(layer_config).__name__} is {kind} but {name}={window!r}: a {kind} layer needs a "
            f'positive {name}, and a layer without one is "full_attention" in layer_types'
        )
    return window


def _dimensions(layer_config: Any, kind: str) -> tuple[int, int, int]:
    """`(kv_heads, head_dim, value_head_dim)` of what attention hands to the cache."""
    latent = getattr(layer_config, "kv_lora_rank", None)
    if latent is not None:  # multi-head latent attention: what keys and values are made from, and the rotated part
        return 1, latent, layer_config.qk_rope_head_dim
    heads = getattr(layer_config, "num_attention_heads", None)
    if heads is None:
        return 0, 0, 0  # a recurrent model
    head_dim = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // heads
    return _kv_heads(layer_config, kind), head_dim, getattr(layer_config, "v_head_dim", None) or head_dim


def _kv_heads(layer_config: Any, kind: str) -> int:
    # An older name for a single head, which Falcon's newer architecture overrules.
    if getattr(layer_config, "multi_query", False) and not getattr(layer_config, "new_decoder_architecture", False):
        return 1
    kv_heads: int = getattr(layer_config, "num_key_value_heads", None) or layer_config.num_attention_heads
    return kv_heads * _SLIDING_KV_HEADS.get(layer_config.model_type, 1) if kind == "sliding" else kv_heads


def _share(spec: LayerSpec, layer_config: Any, ranks: Any) -> LayerSpec:
    """What one of several tensor-parallel ranks keeps of a layer."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise OptionError(f"ranks={ranks!r}: it is a number of tensor-parallel ranks, an integer >= 1")
    if not spec.buffered:
        return spec
    heads = layer_config.num_attention_heads
    if heads % ranks or max(spec.kv_heads, ranks) % min(spec.kv_heads, ranks):
        fitting = [
            n for n in range(1, heads + 1) if not heads % n and not max(spec.kv_heads, n) % min(spec.kv_heads, n)
        ]
        raise OptionError(
            f"ranks={ranks}: {heads} heads, and {spec.kv_heads} of keys and values, cannot be shared out among them; "
            f"{', '.join(map(str, fitting))} would work"
        )
    return replace(spec, kv_heads=max(1, spec.kv_heads // ranks))
