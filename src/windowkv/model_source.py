"""A model by what a user calls it: the embedded one, a local folder, or a hub id.

Knows where models come from. Knows nothing of caches.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import windowkv.demo_model as demo_model
from windowkv.errors import ModelSourceError

T = TypeVar("T")


def load_model(source: str, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """`(model, tokenizer)` of "gemma-3-270m", a folder, or a hub id. Raises ModelSourceError, naming the source."""
    if source == demo_model.MODEL_NAME:
        return demo_model.load(dtype=dtype)
    return _read(
        source,
        lambda: (
            AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval(),
            AutoTokenizer.from_pretrained(source),
        ),
    )


def load_config(source: str | Path) -> Any:
    """The config alone, of the same or of a config.json. Raises ModelSourceError, naming the source."""
    if str(source) == demo_model.MODEL_NAME:
        return demo_model.load_config()
    return _read(source, lambda: AutoConfig.from_pretrained(source))


def _read(source: str | Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelSourceError(
            f"cannot read a model from {str(source)!r}: {reason} "
            f"(a folder with a config.json, a model id on the hub, or {demo_model.MODEL_NAME!r} would work)"
        ) from error
