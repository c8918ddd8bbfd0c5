"""The layers of a cache as named tensors and a manifest, and back.

Knows which tensors a layer consists of. Knows nothing of files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from windowkv.buffers import Buffer
from windowkv.errors import CacheFileError
from windowkv.history import TokenHistory
from windowkv.layers import BufferedLayer, recurrent_states
from windowkv.layout import CacheLayout, LayerSpec
from windowkv.packed_buffer import Held, PackedBuffer
from windowkv.window import Span, tail_length

PACKED = "packed."  # where the names of tensors in a codec's own dtypes begin, after the layer's number
_IDS = "tokens"
_INITIALIZED = "_initialized"  # how transformers calls which of a layer's states there are
_PLAIN = (bool, int, float, str, type(None))


def take(
    layers: Sequence[Any], layout: CacheLayout, history: TokenHistory | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A manifest, of which all can be written as JSON, and tensors by name; views where that is possible."""
    manifest: dict[str, Any] = {"layout": [asdict(spec) for spec in layout.layers], "layers": []}
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        entry, named = take_layer(layer)
        manifest["layers"].append(entry)
        tensors |= {f"{i}.{name}": tensor for name, tensor in named.items()}
    states = [tensor for name, tensor in tensors.items() if not is_packed(name)]
    manifest["dtypes"] = sorted({_name(tensor.dtype) for tensor in states if tensor.is_floating_point()})
    if history is not None:
        tensors[_IDS] = history.tokens
        manifest["ids_sha256"] = ids_sha256(history.tokens)
    return manifest, tensors


def restore(
    layers: Sequence[Any], layout: CacheLayout, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Fill new layers with what `take` gave. Raises CacheFileError when it does not fit them."""
    entries = manifest.get("layers")
    if not isinstance(entries, list) or len(entries) != len(layers):
        raise CacheFileError(f"its layers are not the {len(layers)} of the model")
    # Older releases of transformers make no layers for those that share, which come last.
    for i, (layer, spec, entry) in enumerate(zip(layers, layout.layers, entries, strict=False)):
        restore_layer(layer, spec, entry, under(f"{i}.", tensors), manifest["tokens"])
    _check_rows(layers)
    strange = sorted(name for name in tensors if name != _IDS and not _belongs(name, layers))
    if strange:
        raise CacheFileError(f"{strange[0]!r} is no tensor of any of its layers")


def is_packed(name: str) -> bool:
    """Whether a tensor of that name is a codec's, whose dtype is no choice."""
    return name.partition(".")[2].startswith(PACKED)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by what comes after it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def take_layer(layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One layer's share of the manifest, and its tensors by name."""
    return _buffered(layer) if isinstance(layer, BufferedLayer) else _foreign(layer)


def restore_layer(
    layer: Any, spec: LayerSpec, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: int
) -> None:
    """Fill a new layer with what `take_layer` gave. Raises CacheFileError when it does not fit."""
    try:
        if isinstance(layer, BufferedLayer):
            _restore_buffered(layer, spec, entry, tensors, seen)
        else:
            _restore_foreign(layer, entry, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as wrong:
        raise CacheFileError(f"a layer cannot be one of {spec}: {wrong}") from wrong


def restore_history(
    tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], rows: int | None
) -> TokenHistory | None:
    """The ids that were saved; None where none were. Raises CacheFileError for ids that are not of these rows."""
    tokens, seen = tensors.get(_IDS), manifest["tokens"]
    if tokens is None:
        return None
    if tokens.ndim != 2 or tokens.dtype != torch.int32 or tokens.shape[1] > (seen or 0):
        raise CacheFileError(f"ids {tokens.dtype} {list(tokens.shape)} for {seen} tokens")
    if len(tokens) not in (1, rows or 1):
        raise CacheFileError(f"ids of {len(tokens)} rows for layers of {rows}")
    if ids_sha256(tokens) != manifest.get("ids_sha256"):
        raise CacheFileError("its ids are not those of which it names the digest")
    return TokenHistory(tokens.clone())


def ids_sha256(tokens: Tensor) -> str:
    """The digest by which a file names its ids, int32 `[B, n]`."""
    return sha256(tokens.cpu().contiguous().numpy().tobytes()).hexdigest()


def _check_rows(layers: Sequence[Any]) -> None:
    """Raise CacheFileError when layers hold different numbers of rows, or none."""
    held = [tensor for layer in layers if isinstance(layer, BufferedLayer) for tensor in layer.buffer.held_tensors]
    held += [state for layer in layers for state in recurrent_states(layer)]
    rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in held}
    if len(rows) > 1 or 0 in rows:
        raise CacheFileError(f"its layers hold {' and '.join(map(str, sorted(rows)))} rows")


def _belongs(name: str, layers: Sequence[Any]) -> bool:
    index, _, attribute = name.partition(".")
    if not index.isdigit() or int(index) >= len(layers):
        return False
    layer = layers[int(index)]
    if not isinstance(layer, BufferedLayer):
        return True
    packed = layer.buffer.names if isinstance(layer.buffer, PackedBuffer) else ()
    return attribute in ("keys", "values", *(PACKED + part for part in packed))


def _buffered(layer: BufferedLayer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    buffer = layer.buffer
    if isinstance(buffer, PackedBuffer):
        held = buffer.held()
        tensors = dict(zip(("keys", "values"), held.states, strict=False))
        tensors |= {PACKED + name: part for name, part in zip(buffer.names, held.parts, strict=False)}
        return {"start": held.packed.start, "packed": held.packed.end, "end": held.recent.end}, tensors
    span, states = buffer.kept()
    return {"start": span.start, "end": span.end}, dict(zip(("keys", "values"), states, strict=False))


def _restore_buffered(
    layer: BufferedLayer, spec: LayerSpec, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: int
) -> None:
    span, retention = Span(entry["start"], entry["end"]), layer.buffer.retention
    if span.end != seen or not 0 <= span.start <= span.end or span.held < tail_length(span.end, retention.window):
        raise ValueError(f"positions {span.start} to {span.end} of {seen} with a window of {retention.window}")
    if not tensors and not span.end:
        return
    states, packed = (tensors["keys"], tensors["values"]), Span(span.start, entry.get("packed", span.start))
    if ("packed" in entry) != isinstance(layer.buffer, PackedBuffer) or not span.start <= packed.end <= span.end:
        raise ValueError(f"positions {span.start} to {packed.end} of a {type(layer.buffer).__name__} are packed")
    recent = Span(packed.end, span.end)
    for state, dim in zip(states, (spec.head_dim, spec.value_head_dim), strict=True):
        if state.shape != (states[0].shape[0], spec.kv_heads, recent.held, dim) or not state.is_floating_point():
            raise ValueError(f"a {state.dtype} tensor {list(state.shape)} for positions {recent.start} to {recent.end}")
    if isinstance(layer.buffer, PackedBuffer):
        parts = _checked_parts(layer.buffer, spec, packed, tensors, rows=states[0].shape[0])
        layer.buffer = PackedBuffer.over(layer.buffer.parts, layer.buffer.codecs, Held(packed, parts, recent, states))
    else:
        layer.buffer = Buffer.over(retention, span, states)
        layer.buffer = Buffer.over(retention, *layer.buffer.kept())  # less, where the rollback is less than it was


def _checked_parts(
    buffer: PackedBuffer, spec: LayerSpec, span: Span, tensors: Mapping[str, Tensor], *, rows: int
) -> tuple[Tensor, ...]:
    """What is packed of a layer; nothing where nothing was."""
    if not span.held:
        return ()
    parts = tuple(tensors[PACKED + name] for name in buffer.names)
    keys, values = buffer.codecs
    shapes = (*keys.shapes(spec.head_dim), *values.shapes(spec.value_head_dim))
    for part, (dim, dtype) in zip(parts, shapes, strict=True):
        if part.shape != (rows, spec.kv_heads, span.held, dim) or part.dtype != dtype:
            raise ValueError(f"{part.dtype} {list(part.shape)} for packed positions {span.start} to {span.end}")
    return parts


def _foreign(layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """transformers' own layers: their attributes, which are plain values, tensors, or such by number."""
    plain: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, torch.dtype):
            plain[name] = {"dtype": _name(value)}
        elif isinstance(value, torch.device):
            plain[name] = {"device": None}
        elif isinstance(value, dict) and all(isinstance(v, (Tensor, *_PLAIN)) for v in value.values()):
            tensors |= {f"{name}.{key}": v for key, v in value.items() if isinstance(v, Tensor)}
            plain[name] = {"items": [[key, v] for key, v in value.items() if not isinstance(v, Tensor)]}
        elif isinstance(value, _PLAIN) or (
            isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value)
        ):
            plain[name] = value
        else:
            raise CacheFileError(f"a {type(layer).__name__} holds a {type(value).__name__}, which cannot be saved")
    return {"class": type(layer).__name__, "attributes": plain}, _apart(tensors)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with a storage each: some layers keep one under two names, which a file refuses."""
    owners: dict[int, str] = {}
    return {
        name: tensor if owners.setdefault(tensor.untyped_storage().data_ptr(), name) == name else tensor.clone()
        for name, tensor in tensors.items()
    }


def _restore_foreign(layer: Any, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    if entry["class"] != type(layer).__name__:
        raise ValueError(f"a {entry['class']} in place of a {type(layer).__name__}")
    values: dict[str, Any] = {}
    for name, value in entry["attributes"].items():
        if not isinstance(value, dict):
            values[name] = value
        elif "dtype" in value:
            values[name] = next(iter(tensors.values())).dtype if tensors else _dtype(value["dtype"])
        elif "device" in value:
            values[name] = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        else:
            values[name] = dict(value["items"])
    for name, tensor in tensors.items():
        attribute, _, key = name.partition(".")
        if key:
            values.setdefault(attribute, {})[int(key) if key.isdecimal() else key] = tensor.clone()
        else:
            values[attribute] = tensor.clone()
    _check_attributes(layer, values)
    _check_kernels(values)
    for name, value in values.items():
        setattr(layer, name, value)


def _check_attributes(layer: Any, values: Mapping[str, Any]) -> None:
    """Raise ValueError for attributes that an unused layer of transformers cannot come to have."""
    for name, unused in vars(layer).items():
        value = values[name]
        if isinstance(unused, dict) and set(value) != set(unused):
            raise ValueError(f"{name} has {sorted(value)} instead of {sorted(unused)}")
        if unused is not None and type(value) is not type(unused):
            raise ValueError(f"{name} is a {type(value).__name__} instead of a {type(unused).__name__}")
    for name, value in values.items():
        if callable(getattr(type(layer), name, None)):
            raise ValueError(f"{name} is no attribute")
        if isinstance(value, dict) and name.endswith(_INITIALIZED):
            states = values[name.removeprefix("is").removesuffix(_INITIALIZED).strip("_")]
            if missing := [key for key, known in value.items() if known and not isinstance(states[key], Tensor)]:
                raise ValueError(f"{name} {missing}, and there are none")


def _check_kernels(values: Mapping[str, Any]) -> None:
    """Raise ValueError for convolution states narrower than their kernels, or wider where none are recorded."""
    for key, state in values.get("conv_states", {}).items():
        width = values.get("conv_kernel_size", {}).get(key)
        if isinstance(state, Tensor) and isinstance(width, int):
            held = state.shape[-1] if state.ndim else 0
            if held < width or (held > width and not values.get("record_past")):
                raise ValueError(f"conv_states of {held} tokens for a kernel of {width}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
