"""What a model's weights weigh, without loading them: by its files, or by a model without storage.

Knows configs and safetensors files. Knows nothing of caches.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from windowkv.errors import ModelSourceError, TinyModelError
from windowkv.tiny_model import generating_class

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LENGTH = 8  # bytes in which a safetensors file says how long its header is


def stored_bytes(folder: Path) -> int | None:
    """Bytes of all tensors that a folder's safetensors files hold; None where it has no such files.

    An index tells them for files that are not there yet, too. Raises ModelSourceError when the files cannot be read.
    """
    try:
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            total = (index.get("metadata") or {}).get("total_size")
            names = set(index["weight_map"].values())
            return int(total) if total else sum(_tensor_bytes(folder / name) for name in names)
        return _tensor_bytes(folder / _SINGLE) if (folder / _SINGLE).is_file() else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelSourceError(f"cannot read the weights' sizes in {str(folder)!r}: {error}") from error


def _tensor_bytes(path: Path) -> int:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(_LENGTH), "little")
    nbytes = path.stat().st_size - _LENGTH - header
    if nbytes < 0:
        raise ValueError(f"{path.name} is no safetensors file, or not all of one")
    return nbytes


def parameter_count(config: Any) -> int | None:
    """How many parameters the model that generates text for a config has, each shared one counted once.

    None where nobody can say: no such model can be built without its own code, or its weights are packed.
    """
    if getattr(config, "quantization_config", None) is not None:
        return None
    try:
        model_class = generating_class(config)
        with torch.device("meta"):
            model = model_class._from_config(copy.deepcopy(config))  # which chooses an attention for it
    except (TinyModelError, ImportError, ValueError, TypeError, AttributeError, KeyError, RuntimeError):
        return None  # whatever modeling files do with a config that they do not expect
    return sum(int(parameter.numel()) for parameter in model.parameters())
