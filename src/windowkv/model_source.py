"""A model by what a user calls it: the embedded one, a local folder, a hub id, or one whose shape alone is known.

Knows where models come from. Knows nothing of caches.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import windowkv.demo_model as demo_model
from windowkv.errors import ModelSourceError
from windowkv.known_models import known_model

T = TypeVar("T")


def load_model(source: str, *, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`(model, tokenizer)` of "gemma-3-270m", a folder, or a hub id. Raises ModelSourceError, naming the source."""
    if source == demo_model.MODEL_NAME:
        return demo_model.load(dtype=dtype)

    def read() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        # False, not None: otherwise transformers would stop and ask on the terminal.
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False)
        return model.eval(), AutoTokenizer.from_pretrained(source, trust_remote_code=False)

    return _read(source, read)


def load_config(source: str | Path) -> PreTrainedConfig:
    """The config alone, of the same, of a config.json, or of a known model. Raises ModelSourceError, naming the source.

    What is in the file system goes before a known model of the same name.
    """
    if str(source) == demo_model.MODEL_NAME:
        return demo_model.load_config()
    known = known_model(str(source))
    if known is not None and not Path(source).exists():
        return known.load_config()
    return _read(source, lambda: AutoConfig.from_pretrained(source, trust_remote_code=False))


def _read(source: str | Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelSourceError(
            f"cannot read a model from {str(source)!r}: {reason} "
            f"(a folder with a config.json, a model id on the hub, or {demo_model.MODEL_NAME!r} would work; "
            "for its bytes alone, a name that `windowkv plan --list` tells)"
        ) from error
