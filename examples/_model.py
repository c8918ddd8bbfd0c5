"""The model that an example runs with: the one that is asked for, or a tiny one whose text is noise."""

import argparse
from typing import Any

from transformers import Gemma3TextConfig

from windowkv.model_source import load_model
from windowkv.tiny_model import tiny_model, tiny_tokenizer


def from_command_line(description: str) -> tuple[Any, Any]:
    """`(model, tokenizer)` of --model: a folder, a hub id, or gemma-3-270m."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="a folder, a hub id, or gemma-3-270m; a tiny one with random weights without")
    name = parser.parse_args().model
    return load_model(name) if name else (tiny_model(Gemma3TextConfig()), tiny_tokenizer())
