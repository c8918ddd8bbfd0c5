"""Public models by name: their shapes against what is published of them, and against the configs of transformers."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import windowkv
from tiny import MODELS
from windowkv.cli.reports import size
from windowkv.known_models import known_models
from windowkv.layout import read_layout
from windowkv.model_source import load_config

# From model cards, reports and papers: layers that keep every token, layers with a window, the window, layers that
# share; KiB that a token takes in bfloat16 while no layer has dropped one; billions of parameters of the part that
# reads text.
PUBLISHED: dict[str, tuple[int, int, int | None, int, float, float]] = {
    "mistral-7b-v0.1": (0, 32, 4096, 0, 128, 7.24),
    "mistral-7b-v0.3": (32, 0, None, 0, 128, 7.25),
    "ministral-8b-2410": (9, 27, 32768, 0, 144, 8.02),
    "ministral-3-3b": (26, 0, None, 0, 104, 3.43),
    "mixtral-8x7b": (32, 0, None, 0, 128, 46.7),
    "mixtral-8x22b": (56, 0, None, 0, 224, 140.6),
    "gemma-2-2b": (13, 13, 4096, 0, 104, 2.61),
    "gemma-2-9b": (21, 21, 4096, 0, 336, 9.24),
    "gemma-2-27b": (23, 23, 4096, 0, 368, 27.23),
    "gemma-3-1b": (4, 22, 512, 0, 26, 1.00),
    "gemma-3-4b": (5, 29, 1024, 0, 136, 3.88),
    "gemma-3-12b": (8, 40, 1024, 0, 384, 11.77),
    "gemma-3-27b": (10, 52, 1024, 0, 496, 27.01),
    "gemma-3n-e2b": (4, 16, 512, 10, 40, 4.44),
    "gemma-3n-e4b": (4, 16, 512, 15, 40, 6.84),
    "gemma-4-e2b": (3, 12, 512, 20, 18, 4.63),
    "gemma-4-e4b": (4, 20, 512, 18, 56, 7.46),
    "gemma-4-26b-a4b": (5, 25, 1024, 0, 220, 25.2),
    "gemma-4-31b": (10, 50, 1024, 0, 880, 30.7),
    "gpt-oss-20b": (12, 12, 128, 0, 48, 20.91),
    "gpt-oss-120b": (18, 18, 128, 0, 72, 116.83),
    "phi-3-mini-4k": (0, 32, 2047, 0, 384, 3.82),
    "phi-3-mini-128k": (0, 32, 262144, 0, 384, 3.82),
    "phi-3.5-mini": (0, 32, 262144, 0, 384, 3.82),
    "phi-4": (40, 0, None, 0, 200, 14.66),
    "phi-4-mini": (0, 32, 262144, 0, 128, 3.84),
    "qwen2-7b": (28, 0, None, 0, 56, 7.62),
    "qwen2.5-7b": (28, 0, None, 0, 56, 7.62),
    "qwen3-0.6b": (28, 0, None, 0, 112, 0.596),
    "qwen3-8b": (36, 0, None, 0, 144, 8.19),
    "qwen3-32b": (64, 0, None, 0, 256, 32.76),
    "qwen3-30b-a3b": (48, 0, None, 0, 96, 30.53),
    "command-r7b": (8, 24, 4096, 0, 128, 8.03),
    "command-a": (16, 48, 4096, 0, 256, 111.06),
    "llama-4-scout": (12, 36, 8192, 0, 192, 107.8),
    "llama-4-maverick": (12, 36, 8192, 0, 192, 400.7),
    "olmo-3-7b": (8, 24, 4096, 0, 512, 7.30),
    "olmo-3-32b": (16, 48, 4096, 0, 256, 32.2),
    "starcoder2-7b": (0, 32, 4096, 0, 64, 7.17),
}


def test_every_known_model_is_checked_here() -> None:
    assert list(known_models()) == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_is_as_published(name: str) -> None:
    full, bounded, window, shared, kib, billions = PUBLISHED[name]
    layers = read_layout(load_config(name)).layers
    kinds = Counter("bounded" if spec.bounded else spec.kind for spec in layers)
    assert (kinds["full"], kinds["bounded"], kinds["shared"]) == (full, bounded, shared)
    assert {spec.window for spec in layers if spec.bounded} == ({window} if window else set())
    assert windowkv.plan(name, tokens=1).baseline_bytes == kib * 1024
    weights = windowkv.weight_bytes(name)
    assert weights is not None
    assert weights / 2e9 == pytest.approx(billions, rel=0.005)


# Config classes whose defaults are one of these models.
@pytest.mark.parametrize(
    ("name", "config_class"),
    [
        ("mistral-7b-v0.1", hf.MistralConfig),
        ("mixtral-8x7b", hf.MixtralConfig),
        ("gemma-2-2b", hf.Gemma2Config),
        ("gemma-3n-e4b", hf.Gemma3nTextConfig),
        ("gpt-oss-120b", hf.GptOssConfig),
        ("llama-4-scout", hf.Llama4TextConfig),
    ],
)
def test_a_known_model_has_the_layout_of_transformers_own_config(name: str, config_class: Any) -> None:
    assert read_layout(load_config(name)) == read_layout(config_class())


def test_a_known_model_says_where_its_numbers_are_from() -> None:
    for model in known_models().values():
        assert model.hub.count("/") == 1
        assert model.source.startswith("https://")


def test_published_bytes_of_a_prompt() -> None:
    # 32,768 tokens: 4 GiB of which the window holds an eighth, and 64 tokens to take back and 256 spare
    planned = windowkv.plan("mistral-7b-v0.1", tokens=32768)
    assert planned.baseline_bytes == 4 << 30
    assert planned.total_bytes == (4095 + 64 + 256) * 128 * 1024
    assert windowkv.plan("mistral-7b-v0.1", tokens=32768, dtype=torch.float32).baseline_bytes == 8 << 30


def test_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parent.parent / "docs" / "planning.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| (.+) \|$", page, flags=re.MULTILINE)
    assert len(rows) > 10
    for name, cells in rows:
        planned = windowkv.plan(name, tokens=32768)
        told = [
            planned.total_bytes,
            planned.baseline_bytes,
            planned.peak_prefill_bytes,
            planned.transformers_peak_bytes,
        ]
        assert cells.split(" | ") == [size(nbytes) for nbytes in (*told, windowkv.weight_bytes(name))], name


def test_a_folder_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = MODELS["gemma3"]().config
    config.save_pretrained("phi-4")
    assert windowkv.plan("phi-4", tokens=100) == windowkv.plan(config, tokens=100)


@pytest.mark.parametrize("name", ["google/gemma-3-27b-pt", "Gemma-3-27B"])
def test_a_known_model_is_found_by_its_repository_and_in_any_case(name: str) -> None:
    assert windowkv.plan(name, tokens=5000) == windowkv.plan("gemma-3-27b", tokens=5000)
