"""Which model it is, by its config and all of its weights, so that two fine-tunes differ; and how it computes now.

A write past autograd (`.data`) that moves none of the values that are looked at each time is not seen before the next
`PrefixStore.bind`. Knows parameters, configs and hooks. Knows nothing of caches.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

_SAMPLES = 16  # values of each tensor that are looked at each time, evenly spaced: a fine-tune moves nearly all of them
_PIECE = 1 << 26  # bytes of a tensor that are brought to the CPU at a time
_PLAIN = (bool, int, float, str, type(None))
_UNTOLD = frozenset({"training"})  # what says nothing of the weights
_PATHS = frozenset({"_name_or_path", "transformers_version"})  # where a config was read from, and by what
_NO_CHANGE = frozenset({"accelerate", "torch", "transformers", "windowkv"})  # whose hooks move tensors, or only look


def fingerprint(model: Any) -> str:
    """SHA-256 over class, config, adapters, and every parameter's and buffer's name, shape, dtype and values."""
    digest = sha256(f"{type(model).__module__}.{type(model).__qualname__}".encode())
    digest.update(f"{_config(model)}{_adapters(model)}".encode())
    for name, tensor in _tensors(model):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        digest.update(_values(tensor))
    return digest.hexdigest()


def weights_version(model: Any) -> tuple[Any, ...]:
    """What changes whenever weights are replaced or written, and costs less than a fingerprint."""
    tensors = [tensor for _, tensor in _tensors(model)]
    traces = tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
    return traces, _samples(tensors), _config(model), _adapters(model)


def circumstances(model: Any) -> tuple[str, str]:
    """Where a model's weights are, and what autocast makes it compute in."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    kind = devices[0].partition(":")[0] if devices else "cpu"
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return ",".join(devices), str(cast)


def is_as_given(model: Any) -> bool:
    """Whether nothing changes what the model computes from call to call: no dropout, no hooks of others in it."""
    hooks = (
        hook
        for module in model.modules()
        for each in (module._forward_hooks, module._forward_pre_hooks)
        for hook in each.values()
    )
    origins = {str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0] for hook in hooks}
    return not model.training and origins <= _NO_CHANGE


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All that hold values, those of a tensor subclass (quantised, distributed) one by one."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield from _plain_tensors(name, tensor.detach())


def _plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(tensor, "__tensor_flatten__"):
        if not tensor.is_meta and tensor.numel():
            yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))


def _config(model: Any) -> str:
    said = {name: value for name, value in model.config.to_dict().items() if name not in _PATHS}
    return json.dumps(said, sort_keys=True, default=str)


def _adapters(model: Any) -> str:
    """The settings of all layers of PEFT: which adapters are on, and how strong they are."""
    told = []
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "active_adapters", None), property):
            plain = {key: value for key, value in vars(module).items() if key not in _UNTOLD and _is_plain(value)}
            told.append((name, sorted(plain.items())))
    return repr(told)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(_is_plain(each) for each in value))


def _values(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    digest = xxh3_128()
    for piece in torch.split(flat, max(1, _PIECE // flat.element_size())):
        digest.update(bytes_of(piece))
    return digest.digest()


def _samples(tensors: list[Tensor]) -> bytes:
    """A digest of some values of each; one transfer for all of a dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor))
    digest = xxh3_128()
    for samples in alike.values():
        digest.update(bytes_of(torch.cat(samples)))
    return digest.digest()


def _sample(tensor: Tensor) -> Tensor:
    """Evenly spaced values of what a tensor spans in its storage, which needs no copy of it, however it lies there."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(span, _SAMPLES)
    return tensor.as_strided((count,), ((span - 1) // (count - 1) if count > 1 else 1,))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, on the CPU, as a digest takes them."""
    values: Any = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return memoryview(values)
