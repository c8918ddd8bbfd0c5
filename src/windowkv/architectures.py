"""The architectures of the installed transformers whose layers have a window, found by reading their configs.

Knows which model types exist and which of them generate text. Builds no model.
"""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from windowkv.errors import TinyModelError
from windowkv.tiny_model import generating_class
from windowkv.tiny_sizes import WINDOWS


def windowed_configs() -> Iterator[tuple[str, PreTrainedConfig]]:
    """`(model_type, config)` of every decoder that generates text and whose config can name a window, in order.

    Of a model of several parts the text part counts. Configs that cannot be made without arguments are left out.
    """
    for model_type in sorted(CONFIG_MAPPING):
        config = _default_config(model_type)
        if config is not None and not config.is_encoder_decoder and _generates(config) and _can_slide(config):
            yield model_type, config


def _default_config(model_type: str) -> PreTrainedConfig | None:
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception:  # each class validates in its own way
        return None


def _generates(config: PreTrainedConfig) -> bool:
    try:
        return generating_class(config) is not None
    except TinyModelError:
        return False


def _can_slide(config: PreTrainedConfig) -> bool:
    # vars, for a config whose layers differ refuses to name a value of all.
    own: dict[str, Any] = vars(config.get_text_config(decoder=True))
    names = getattr(type(config), "attribute_map", {})
    slides = any("sliding" in kind or "chunked" in kind for kind in own.get("layer_types") or ())
    return slides or any(name in own or names.get(name) in own for name in WINDOWS)
