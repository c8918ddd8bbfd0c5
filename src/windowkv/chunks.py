"""How many tokens of a prompt are read in one forward."""

from typing import Any, Literal

import torch

from windowkv.errors import OptionError
from windowkv.processor import has_matrix_units

Chunk = int | Literal["auto"] | None  # a number of tokens, the best number, or all at once

# Of 512, 1,024 and 2,048 tokens the fastest that takes no more memory than transformers does with the chunk that is
# best for it (Gemma 3 270M, 8k and 16k tokens). What comes in chunks of 2,048 is faster by a tenth at most, and by a
# sixth where matrix units multiply; in float32 it takes half as much memory again.
SMALL, LARGE = 1024, 2048


def checked_chunk(prefill_chunk: Any) -> Chunk:
    """The option, if it is one. Raises OptionError."""
    whole = isinstance(prefill_chunk, int) and prefill_chunk is not True and prefill_chunk > 0
    if whole or prefill_chunk is None or prefill_chunk == "auto":
        chunk: Chunk = prefill_chunk
        return chunk
    raise OptionError(f'prefill_chunk={prefill_chunk!r}: a number of tokens >= 1, "auto", or None for no chunks')


def chunk_tokens(chunk: Chunk, model: Any) -> int | None:
    """How many tokens that is for a model as it is now, in its dtype and on its device; None for all."""
    if chunk != "auto":
        return chunk
    by_matrix_units = model.device.type == "cpu" and model.dtype == torch.bfloat16 and has_matrix_units()
    return LARGE if by_matrix_units else SMALL
