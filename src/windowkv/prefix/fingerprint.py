"""Which model it is, by its config and a sample of its weights: two fine-tunes of one config differ.

A change that moves none of the sampled values, or that leaves no trace in a parameter's address and version (`.data`),
is not seen; nor are an adapter's scale, and adapters that are chosen for one call.

Knows parameters and configs. Knows nothing of caches.
"""

import json
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

_SAMPLES = 64  # values of each tensor that are read, evenly spaced: a fine-tune moves nearly all of them


def fingerprint(model: Any) -> str:
    """SHA-256 over the class, the config, and every parameter's and buffer's name, shape, dtype and sampled values.

    Adapters that are on count by name as well as by their weights, so that switching one changes the fingerprint.
    """
    digest = sha256(f"{type(model).__module__}.{type(model).__qualname__}".encode())
    digest.update(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, module in model.named_modules():
        switches = (getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None))
        plain = [switch for switch in switches if isinstance(switch, (bool, str, list, tuple))]
        if plain:
            digest.update(f"{name}:{plain}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def weights_version(model: Any) -> tuple[Any, ...]:
    """What changes whenever weights are replaced or written in place, and costs less than a fingerprint."""
    tensors = tuple((tensor.data_ptr(), tensor._version) for tensor in model.parameters())
    adapters = tuple(
        str(getattr(module, "active_adapters", "")) + str(getattr(module, "disable_adapters", ""))
        for module in model.modules()
        if hasattr(module, "active_adapters")
    )
    return tensors, adapters


def _sample(tensor: Tensor) -> bytes:
    if tensor.is_meta or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    places = torch.arange(_SAMPLES, device=flat.device) * (flat.numel() - 1) // (_SAMPLES - 1)
    return flat[places].cpu().contiguous().view(torch.uint8).numpy().tobytes()
