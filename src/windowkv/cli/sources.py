"""Where a command's text and model come from.

Knows files, stdin and how a model is named. Knows nothing of caches.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windowkv.cli.terminal import waiting_for
from windowkv.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

WITH_MODEL = (
    "windowkv.comparison",
    "windowkv.model_source",
    "transformers.modeling_utils",
)
DEMO_MODEL = "gemma-3-270m"  # demo_model.MODEL_NAME, whose module imports torch


def python_documentation() -> str:
    """The language reference that every Python carries along: real text, more than 100,000 tokens of it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_file(path: Path) -> str:
    """The text in a file, without the newline that ends it. Raises OptionError when it is not UTF-8."""
    return _decode(str(path), path.read_bytes())


def read_stdin() -> str:
    """All that is piped in, without the newline that ends it. Raises OptionError when it is not UTF-8."""
    return _decode("stdin", sys.stdin.buffer.read())


def _decode(source: str, content: bytes) -> str:
    try:
        return content.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"{source} is no UTF-8 text: {error.reason} at byte {error.start:,}") from error


def encode(tokenizer: Any, text: str) -> "Tensor":
    """Token ids `[1, n]`. Raises OptionError for a text that has none."""
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    if not text.strip() or not ids.numel():
        raise OptionError("the text is empty: there is nothing to continue")
    return ids.long()  # no tokens at all come as floats


def import_slowly(*modules: str) -> None:
    """Import modules that bring torch and transformers along, and silence those: the command says itself what it does.

    Ctrl-C ends the process on the spot meanwhile: numpy and torch swallow an exception that comes in the middle of
    their imports, and are broken afterwards.
    """
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        with waiting_for("importing torch"):
            for module in modules:
                import_module(module)
    finally:
        signal.signal(signal.SIGINT, before)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def load(model: str, dtype: str) -> tuple[Any, Any]:
    """`(model, tokenizer)` by name, in the dtype that torch calls so. Raises ModelSourceError."""
    import torch

    from windowkv.model_source import load_model

    return load_model(model, dtype=getattr(torch, dtype))


@contextmanager
def enough_positions(network: Any, tokens: int) -> Iterator[None]:
    """Explain what a model with a table of positions says of a text that is longer than its table."""
    try:
        yield
    except IndexError as error:
        limit = getattr(network.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is None or tokens <= limit:
            raise
        raise OptionError(
            f"{tokens:,} tokens: this model has positions for {limit:,} (max_position_embeddings)"
        ) from error
