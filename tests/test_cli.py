"""The command as a user meets it: what is on stdout, what is on stderr, and the exit code."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
import typer

import windowkv
from tiny import MODELS, generated
from windowkv.benchmark import CONTENDERS, Scenario
from windowkv.cli import app, main
from windowkv.cli.sources import DEMO_MODEL, python_documentation
from windowkv.cli.terminal import progress
from windowkv.doctor import CacheKind
from windowkv.recording import read_recording
from windowkv.tiny_model import CHARACTERS, tiny_tokenizer

PROMPT = "the window slides over the text. " * 12
MIB = 1 << 20


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Stdin(io.TextIOWrapper):
    """A pipe with something in it; a terminal with None."""

    def __init__(self, content: bytes | None) -> None:
        super().__init__(io.BytesIO(content or b""))
        self.is_terminal = content is None

    def isatty(self) -> bool:
        return self.is_terminal


Command = Callable[..., Result]
Started = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model, whose tokens are the characters of ASCII."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_tokenizer().save_pretrained(folder)
    MODELS["gemma3"]().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command in this process, in an empty folder; what it writes is read from the file descriptors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, stdin: bytes | None = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["windowkv", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        return Result(int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def started() -> Iterator[Started]:
    """The command in a process of its own, with one thread, which ends with the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        script = "import torch; torch.set_num_threads(1); from windowkv.cli import main; main()"
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], **streams | options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


# -- the command itself


def test_version_and_help(command: Command) -> None:
    assert command("--version") == (0, f"windowkv {version('windowkv')}\n", "")
    assert {"demo", "generate", "plan", "doctor", "bench"} <= set(command("--help").out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["plan", "folder"],
        ["plan", "folder", "--tokens", "-1"],
        ["plan", "folder", "--tokens", "many"],
        ["plan", "folder", "--fit", "2 parsecs"],
        ["plan"],
        ["plan", "folder", "--tokens", "1", "--with-weights"],
        ["plan", "folder", "--tokens", "1", "--max-cache-len", "5"],
        ["plan", "folder", "--tokens", "1", "--ranks", "0"],
        ["plan", "folder", "--tokens", "1", "--dtype", "int8"],
        ["demo", "--tokens", "0"],
        ["demo", "--new-tokens", "1"],
        ["demo", "--output", "a.gif"],
        ["demo", "--output", "missing/a.png"],
        ["demo", "--text", "missing.txt"],
        ["plot", "memory", "folder", "--output", "a.gif"],
        ["plot", "plans"],
        ["plot", "run", "folder", "--plain", "--kv-dtype", "int8"],
        ["plot", "bench", "missing.json"],
        ["generate", "--prompt", "a"],
        ["generate", "--model", "folder", "--prompt", "a", "--prompt-file", __file__],
        ["generate", "--model", "folder", "--prompt-file", "missing.txt"],
    ],
)
def test_wrong_usage_is_said_on_stderr_and_ends_with_2(command: Command, arguments: list[str]) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("--help)")


def paths(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """A command and all below it, by the words that name them."""
    below = getattr(command, "commands", {})
    return [path, *(each for name, part in below.items() for each in paths(part, (*path, name)))]


@pytest.mark.parametrize("path", paths(typer.main.get_command(app)), ids=" ".join)
def test_every_help_ends_in_a_few_examples_of_lines_that_are_understood(
    path: tuple[str, ...], command: Command
) -> None:
    code, out, err = command(*path, "--help")
    assert (code, err) == (0, "")
    lines = [line.removeprefix("    $ ") for line in out.split("Examples:\n")[1].splitlines()]
    assert 1 <= len(lines) <= 3
    for line in lines:
        words = line.split("| ")[-1].split()
        assert words[: len(path) + 1] == ["windowkv", *path]
        assert command(*words[1:], "--help").code == 0
        options = {word for word in words if word.startswith("--")} - {"--help"}
        assert all(f" {option} " in command(*words[1:], "--help").out for option in options)


def test_no_command_at_all_shows_the_help_as_wrong_usage(command: Command) -> None:
    code, out, err = command()
    assert (code, out) == (2, "")
    assert err == command("--help").out


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("not enough memory:\n  you tried to allocate" + " much" * 1000)

    monkeypatch.setattr("windowkv.planner.plan", fail)


@pytest.mark.usefixtures("broken")
def test_a_fault_that_nobody_foresaw_is_one_line_that_tells_how_to_see_more(command: Command, model: str) -> None:
    code, out, err = command("plan", model, "--tokens", 1)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: RuntimeError: not enough memory: you tried to allocate much")
    assert err.endswith("… (--debug shows where it came from)\n")
    assert len(err.splitlines()[-1]) < 600


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("place", [0, 1, 4])
def test_debug_anywhere_on_the_line_shows_where_a_fault_came_from(
    place: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["plan", model, "--tokens", "1"]
    monkeypatch.setattr(sys, "argv", ["windowkv", *arguments[:place], "--debug", *arguments[place:]])
    with pytest.raises(RuntimeError, match="not enough memory"):
        main()


def test_help_wrong_usage_and_completion_come_without_torch() -> None:
    script = (
        "import atexit, sys; sys.argv[0] = 'windowkv'; from windowkv.cli import main\n"
        "atexit.register(lambda: print({'torch', 'transformers', 'matplotlib'} & {*sys.modules}))\n"
        "main()"
    )
    words = {"_WINDOWKV_COMPLETE": "complete_bash", "COMP_WORDS": "windowkv store v", "COMP_CWORD": "2"}
    for arguments, more, code, expected in (
        (["--help"], {}, 0, "Usage: windowkv"),
        (["plan", "--tokens", "many"], {}, 2, ""),
        ([], words, 0, "verify\n"),
    ):
        started = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(started, capture_output=True, text=True, env=os.environ | more)
        assert done.returncode == code, done.stderr
        assert done.stdout.startswith(expected)
        assert done.stdout.endswith("set()\n")


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("terminal", "more", "coloured"), [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (False, {}, False)]
)
def test_colours_are_for_terminals_that_want_them(terminal: bool, more: dict[str, str], coloured: bool) -> None:
    script = (
        "from rich.table import Table; from rich.text import Text; from windowkv.cli import terminal\n"
        "with terminal.waiting_for('thinking'): pass\n"
        "table = Table('a'); table.add_row(Text('same', 'green')); terminal.print_table(table)"
    )
    ours, theirs = os.openpty() if terminal else os.pipe()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run(
        [sys.executable, "-c", script],
        stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environment | {"TERM": "xterm"} | more,
    )  # fmt: skip
    os.close(theirs)
    written = _read_until(ours, None)
    os.close(ours)
    assert b"same" in written
    assert (b"\x1b[32m" in written) is coloured
    assert (b"thinking ...\r" in written) is terminal


@pytest.mark.parametrize("arguments", [["demo"], ["generate", "--prompt", "a"]])
def test_a_model_that_is_not_there_is_one_line_and_ends_with_1(command: Command, arguments: list[str]) -> None:
    code, out, err = command(*arguments, "--model", "./no-such-folder")
    assert (code, out) == (1, "")
    assert [line[:6] for line in err.splitlines()] == ["loadin", "error:"]
    assert "no-such-folder" in err


def test_a_folder_that_cannot_be_written_is_one_line_and_ends_with_1(command: Command, model: str) -> None:
    Path("taken.png").mkdir()
    code, _, err = command("demo", "--model", model, "--tokens", 20, "--new-tokens", 2, "--output", "taken.png")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: ")


# -- demo


@pytest.fixture
def demo(command: Command, model: str) -> Command:
    return lambda *more, **options: command(
        "demo", "--model", model, "--tokens", 400, "--new-tokens", 6, *more, **options
    )


def test_demo_prints_one_json_object_whose_bytes_are_those_of_the_plan(demo: Command, model: str) -> None:
    code, out, _ = demo("--json")
    report = json.loads(out)
    assert code == 0
    assert report["tokens_equal"] is True
    assert (report["prompt_tokens"], report["new_tokens"]) == (400, 6)
    planned = windowkv.plan(model, tokens=400, dtype=torch.float32)
    assert report["windowkv_kv_bytes"] == planned.total_bytes
    assert planned.baseline_bytes <= report["baseline_kv_bytes"] < planned.baseline_bytes + 100
    assert report["bound_bytes"] == report["windowkv_decoding_kv_bytes"]
    assert report["bound_bytes"] == windowkv.plan(model, tokens=405, dtype=torch.float32).total_bytes
    assert all(
        report[f"{run}_{what}_seconds"] > 0 for run in ("baseline", "windowkv") for what in ("first_token", "token")
    )
    assert report["picture"] == "windowkv-demo.png"
    assert Path("windowkv-demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_prints_a_table_and_says_where_the_picture_is(demo: Command) -> None:
    code, out, err = demo("--output", "b.svg")
    assert code == 0
    assert "equal" in out
    assert "400.0 KiB" in out  # 400 tokens x 4 layers x 2 heads x 16 numbers x 4 bytes, keys and values
    assert out.endswith("picture: b.svg\n")
    assert Path("b.svg").is_file()
    assert [line.split()[0] for line in err.splitlines()] == ["loading", "transformers", "windowkv", "drawing"]


def test_demo_reads_the_whole_of_a_short_text_and_says_so(demo: Command) -> None:
    Path("short.txt").write_text("x" * 50 + "\n")
    code, out, err = demo("--text", "short.txt", "--json")
    assert (code, json.loads(out)["prompt_tokens"]) == (0, 50)
    assert "shorter than 400 tokens: all 50" in err


@pytest.mark.parametrize(("content", "reason"), [(b"", "empty"), (b" \n\n", "empty"), (b"caf\xe9", "UTF-8")])
def test_demo_refuses_a_file_without_text(demo: Command, content: bytes, reason: str) -> None:
    Path("text.txt").write_bytes(content)
    code, out, err = demo("--text", "text.txt", "--json")
    assert (code, out) == (1, "")
    assert reason in err.splitlines()[-1]


def test_demo_works_without_matplotlib_and_says_how_to_get_it(demo: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "windowkv.plot.notebook", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = demo("--json")
    assert (code, json.loads(out)["picture"]) == (0, None)
    assert "pip install 'windowkv[plot]'" in err
    assert "picture: none" in demo().out


def test_demo_tells_the_terms_of_the_model_that_it_ships(
    command: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windowkv import demo_model, model_source

    assert DEMO_MODEL == demo_model.MODEL_NAME
    read = model_source.load_model
    monkeypatch.setattr(model_source, "load_model", lambda source, dtype: read(model, dtype=dtype))
    code, out, err = command("demo", "--tokens", 20, "--new-tokens", 2, "--json")
    assert (code, json.loads(out)["model"]) == (0, DEMO_MODEL)
    assert demo_model.TERMS in err


def test_python_brings_text_enough_for_a_long_prompt() -> None:
    text = python_documentation()
    assert len(text) > 300_000
    assert text == python_documentation()


# -- generate


def test_generate_streams_what_the_model_says_and_reports_on_stderr(command: Command, model: str) -> None:
    code, out, err = command("generate", "--model", model, "--prompt", PROMPT, "--max-new-tokens", 30)
    ids = torch.tensor([[ord(character) for character in PROMPT]])
    expected = "".join(
        chr(code) for code in generated(MODELS["gemma3"](), ids, 30)[0].tolist() if chr(code) in CHARACTERS
    )
    assert code == 0
    assert out == expected + "\n"
    held = windowkv.plan(model, tokens=len(PROMPT) + 29, dtype=torch.float32)
    assert f"{len(PROMPT)} tokens of prompt, 30 new; {held.total_bytes / 1024:.1f} KiB" in err
    assert f"{held.baseline_bytes / 1024:.1f} KiB if none were dropped" in err


def test_generate_as_json_is_one_object_with_the_same_text(command: Command, model: str) -> None:
    options = ("generate", "--model", model, "--prompt", PROMPT, "--max-new-tokens", 30)
    report = json.loads(command(*options, "--json", "--save-cache", "a.cache").out)
    assert report["text"] + "\n" == command(*options).out
    assert (report["prompt_tokens"], report["new_tokens"], report["reused_tokens"]) == (len(PROMPT), 30, 0)
    held = windowkv.plan(model, tokens=len(PROMPT) + 29, dtype=torch.float32)
    assert (report["kv_bytes"], report["baseline_bytes"]) == (held.total_bytes, held.baseline_bytes)
    assert (report["model"], report["dtype"], report["saved"]) == (model, "float32", "a.cache")
    again = json.loads(command(*options, "--json", "--load-cache", report["saved"]).out)
    assert (again["text"], again["reused_tokens"]) == (report["text"], len(PROMPT) - 1)


def test_generate_reads_its_prompt_from_an_option_a_file_or_a_pipe(command: Command, model: str) -> None:
    Path("prompt.txt").write_text(PROMPT + "\n")
    options = ("generate", "--model", model, "--max-new-tokens", 5)
    by_option = command(*options, "--prompt", PROMPT)
    by_file = command(*options, "--prompt-file", "prompt.txt")
    by_pipe = command(*options, stdin=PROMPT.encode() + b"\n")
    assert by_option == by_file == by_pipe
    assert by_option.code == 0


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_generate_refuses_an_empty_prompt(command: Command, model: str, prompt: str) -> None:
    for result in (
        command("generate", "--model", model, "--prompt", prompt),
        command("generate", "--model", model, stdin=prompt.encode()),
    ):
        assert (result.code, result.out) == (1, "")
        assert result.err.splitlines()[-1].startswith("error: the text is empty")


def test_generate_asks_a_terminal_for_an_option_rather_than_waiting_for_text(command: Command, model: str) -> None:
    assert command("generate", "--model", model, stdin=None).code == 2


# -- plan


def test_a_saved_cache_is_continued_shown_and_refused(command: Command, model: str, tmp_path: Path) -> None:
    file = tmp_path / "book.cache"
    options = ["generate", "--model", model, "--max-new-tokens", "20"]
    alone = command(*options, "--prompt", PROMPT + "and then")
    saved = command(*options, "--prompt", PROMPT, "--save-cache", file)
    assert (saved.code, f"saved: {file}" in saved.err) == (0, True)
    loaded = command(*options, "--prompt", PROMPT + "and then", "--load-cache", file)
    assert loaded.out == alone.out
    assert f"{len(PROMPT)} of the prompt's {len(PROMPT) + 8} tokens were taken from {file}" in loaded.err.replace(
        ",", ""
    )
    shown = command("cache", "show", file, "--verify", "--json")
    info = json.loads(shown.out)
    assert (info["tokens"], info["rollback"], info["dtypes"]) == (len(PROMPT) + 19, 64, ["float32"])
    assert "can take back" in command("cache", "show", file).out
    refused = command("cache", "show", tmp_path / "nowhere")
    assert (refused.code, refused.out, refused.err.splitlines()[-1][:7]) == (1, "", "error: ")
    assert command(*options, "--prompt", "x", "--load-cache", tmp_path / "nowhere").code == 2
    resaved = command(*options, "--prompt", PROMPT, "--load-cache", file, "--save-cache", file, "--rollback", "300")
    assert f"{len(PROMPT) - 1} of the prompt's {len(PROMPT)} tokens were taken" in resaved.err.replace(",", "")
    assert json.loads(command("cache", "show", file, "--json").out)["rollback"] == 300
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused = command(*options, "--prompt", PROMPT, "--load-cache", file)
    assert (refused.code, refused.out, "damaged" in refused.err) == (1, "", True)
    assert command(*options, "--prompt", PROMPT, "--save-cache", tmp_path / "no" / "file").code == 2


def test_a_quantised_cache_is_saved_shown_and_continued_as_such(command: Command, model: str, tmp_path: Path) -> None:
    file, prompt = tmp_path / "book.cache", PROMPT * 20
    options = ["generate", "--model", model, "--max-new-tokens", "5", "--prompt", prompt]
    assert command(*options, "--save-cache", file, "--kv-dtype", "int8", "--quantize", "all").code == 0
    info = json.loads(command("cache", "show", file, "--json").out)
    assert (info["kv_dtype"], info["quantize"]) == ("int8", "all")
    assert "int8, all layers" in command("cache", "show", file).out
    assert command(*options, "--load-cache", file, "--kv-dtype", "int8").code == 0
    refused = command(*options, "--load-cache", file)
    assert (refused.code, "kv_dtype='int8'" in refused.err) == (1, True)
    assert command(*options, "--kv-dtype", "int2").code == 2
    assert command(*options, "--save-cache", file, "--kv-dtype", "int8").code == 0
    refused = command(*options, "--load-cache", file, "--kv-dtype", "int8", "--quantize", "all")
    assert (refused.code, "full layers alone" in refused.err) == (1, True)


def test_a_store_keeps_quantised_caches_apart(command: Command, model: str, tmp_path: Path) -> None:
    prompt = PROMPT * 20
    options = ["generate", "--model", model, "--max-new-tokens", "5", "--prompt", prompt, "--store", tmp_path / "store"]
    for packed in ([], ["--kv-dtype", "int8"], ["--kv-dtype", "int8", "--quantize", "all"]):
        for reused in (0, len(prompt) - 1):
            told = command(*options, *packed).err.replace(",", "")
            assert f"{reused} of the prompt's {len(prompt)} tokens were taken" in told
    (scope,) = json.loads(command("store", "ls", tmp_path / "store", "--json").out)["scopes"]
    assert scope["points"] == 6


def test_a_store_serves_the_next_run_and_is_kept_in_order(command: Command, model: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    options = ["generate", "--model", model, "--max-new-tokens", "20", "--prompt", PROMPT]
    first, second = (command(*options, "--store", folder) for _ in range(2))
    assert first.out == second.out == command(*options).out
    assert f"0 of the prompt's {len(PROMPT)} tokens were taken" in first.err
    assert f"{len(PROMPT) - 1} of the prompt's {len(PROMPT)} tokens were taken" in second.err
    (scope,) = json.loads(command("store", "ls", folder, "--json").out)["scopes"]
    assert (scope["points"], scope["longest"], scope["blocks"]) == (2, len(PROMPT) + 19, 1)
    assert scope["scope"][:16] in command("store", "ls", folder).out
    totals = json.loads(command("store", "stats", folder, "--json").out)
    assert (totals["scopes"], totals["points"], totals["blocks"]) == (1, 2, 1)
    assert totals["nbytes"] == sum(path.stat().st_size for path in folder.rglob("*.kv"))
    assert "2, the longest of" in command("store", "stats", folder).out
    assert command("store", "verify", folder).out == "3 files are whole, 0 were damaged and are gone\n"
    mine = [folder / "photos" / "notes.kv", next(folder.rglob("b-*")).with_name("chat.kv")]  # are no store's
    mine[0].parent.mkdir()
    for each in mine:
        each.write_text("mine")
    victim = next(folder.rglob("b-*"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert command("store", "verify", folder).out == "2 files are whole, 1 were damaged and are gone\n"
    assert command(*options, "--store", folder).out == first.out
    report = json.loads(command("store", "verify", folder, "--json").out)
    assert report == {"directory": str(folder), "whole_files": 3, "damaged_files": 0}
    assert command("store", "prune", folder, "--max-bytes", "1GiB").out == "0 files removed\n"
    report = json.loads(command("store", "prune", folder, "--max-bytes", "1GiB", "--json").out)
    assert report == {"directory": str(folder), "removed_files": 0}
    report = json.loads(command("store", "clear", folder, "--json").out)
    assert report == {"directory": str(folder), "removed_files": 3}
    assert all(each.read_text() == "mine" for each in mine)
    assert command("store", "clear", folder).out == "0 files removed\n"
    assert sorted(folder.rglob("*.kv")) == sorted(mine)
    assert command("store", "ls", tmp_path / "nowhere").code == 1
    assert "never" in command("store", "stats", folder).out


def _saved(model: Any, like: str, folder: Path) -> str:
    """A folder with that model, and the tokenizer of another folder."""
    shutil.copytree(like, folder)
    model.save_pretrained(folder)
    return str(folder)


def test_a_prompt_beyond_a_table_of_positions_is_one_line(command: Command, model: str, tmp_path: Path) -> None:
    config = hf.GPT2Config(n_positions=32, vocab_size=128, n_embd=16, n_layer=1, n_head=2)
    folder = _saved(hf.GPT2LMHeadModel(config), model, tmp_path / "gpt2")
    for arguments in (
        ("generate", "--model", folder, "--prompt", PROMPT),
        ("demo", "--model", folder, "--tokens", 100),
    ):
        result = command(*arguments)
        assert result.code == 1
        assert result.err.splitlines()[-1].endswith("this model has positions for 32 (max_position_embeddings)")


def test_generate_serves_a_model_without_attention(command: Command, model: str, tmp_path: Path) -> None:
    config = hf.MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=2, state_size=4)
    folder = _saved(hf.MambaForCausalLM(config), model, tmp_path / "mamba")
    result = command("generate", "--model", folder, "--prompt", "a", "--max-new-tokens", 5)
    assert result.code == 0
    assert "states held" in result.err
    assert "not planned: layers 0, 1, which transformers keeps" in command("plan", folder, "--fit", "1KiB").out


def test_plan_prints_equal_layers_together_and_the_totals(command: Command, model: str) -> None:
    code, out, _ = command("plan", model, "--tokens", 400, "--dtype", "float32")
    rows = {line.split("  ")[1].strip(): line.split()[-2:] for line in out.splitlines() if line.startswith("  ")}
    assert code == 0
    assert rows["3 sliding, window 8"] == ["77.2", "KiB"]
    assert rows["1 full"] == ["104.0", "KiB"]  # in steps of 16
    assert rows["if no token were ever dropped"] == ["400.0", "KiB"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_as_json_is_the_plan(command: Command, model: str, dtype: str) -> None:
    options = ("--batch-size", 3, "--rollback", 5, "--dtype", dtype, "--kv-dtype", "int4", "--quantize", "all")
    report = json.loads(command("plan", model, "--tokens", 1000, "--json", *options).out)
    quantised = {"kv_dtype": "int4", "quantize": "all"}
    planned = windowkv.plan(model, tokens=1000, batch_size=3, rollback=5, dtype=getattr(torch, dtype), **quantised)
    assert report["total_bytes"] == planned.total_bytes
    assert report["baseline_bytes"] == planned.baseline_bytes
    assert report["peak_prefill_bytes"] == planned.peak_prefill_bytes
    assert [layer["nbytes"] for layer in report["layers"]] == [layer.nbytes for layer in planned.layers]
    assert "max_tokens" not in report


@pytest.mark.parametrize(
    ("budget", "nbytes"), [("1.5MiB", 3 * MIB // 2), ("2 GiB", 2048 * MIB), ("1500000", 1500000), ("7B", 7)]
)
def test_plan_tells_how_many_tokens_fit_in_a_budget(command: Command, model: str, budget: str, nbytes: int) -> None:
    report = json.loads(command("plan", model, "--fit", budget, "--json").out)
    assert report["budget_bytes"] == nbytes
    assert report["max_tokens"] == windowkv.max_tokens(model, nbytes)
    assert f"{report['max_tokens']:,} tokens fit in" in command("plan", model, "--fit", budget).out


def test_plan_answers_all_questions_at_once(command: Command, model: str) -> None:
    report = json.loads(command("plan", model, "--tokens", 10, "--fit", "1MiB", "--json").out)
    assert report["total_bytes"] == windowkv.plan(model, tokens=10).total_bytes
    assert report["max_tokens"] == windowkv.max_tokens(model, MIB)
    assert report["max_batch_size"] == windowkv.max_batch_size(model, MIB, tokens=10)
    out = command("plan", model, "--tokens", 10, "--fit", "1MiB").out
    assert f"{report['max_batch_size']:,} rows of 10 tokens fit in 1.0 MiB of keys and values alone" in out


def test_plan_shows_transformers_peak_and_the_weights(command: Command, model: str) -> None:
    out = command("plan", model, "--tokens", 400).out
    rows = {line.split("  ")[1].strip(): line.split()[-2:] for line in out.splitlines() if line.startswith("  ")}
    assert rows["so with transformers' DynamicCache"] == ["500.0", "KiB"]  # 400 tokens in 4 layers, and one layer's
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    assert float(rows["weights"][0]) == pytest.approx(weights / 1024, rel=0.05)


def test_plan_leaves_room_for_the_weights_when_asked(command: Command, model: str) -> None:
    weights = windowkv.weight_bytes(model)
    assert weights is not None
    arguments = ("plan", model, "--fit", weights + MIB, "--with-weights")
    report = json.loads(command(*arguments, "--json").out)
    assert (report["weight_bytes"], report["counted_weight_bytes"]) == (weights, weights)
    assert report["max_tokens"] == windowkv.max_tokens(model, MIB)
    assert "KiB of weights" in command(*arguments).out
    assert json.loads(command("plan", model, "--fit", 7, "--with-weights", "--json").out)["max_tokens"] == 0
    assert "nothing fits: the weights alone take" in command("plan", model, "--fit", 7, "--with-weights").out


def test_plan_refuses_weights_of_which_nobody_knows(command: Command, tmp_path: Path) -> None:
    config = MODELS["gemma3"]().config
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path / "packed")
    code, _, err = command("plan", "packed", "--fit", "1MiB", "--with-weights")
    assert code == 1
    assert "--with-weights: nobody can say what those of packed weigh" in err
    assert "unknown" in command("plan", "packed", "--tokens", 5).out


def test_plan_goes_on_without_weights_that_cannot_be_read(command: Command, model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "torn")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    code, out, err = command("plan", folder, "--tokens", 5)
    assert code == 0
    assert "unknown" in out
    assert "note: cannot read the weights' sizes" in err
    assert command("plan", folder, "--fit", "1MiB", "--with-weights").code == 1


def test_plan_of_a_static_cache_and_of_one_rank(command: Command, model: str) -> None:
    options = ("--tokens", 100, "--static", "--max-cache-len", 300, "--ranks", 2, "--fit", "1MiB", "--json")
    report = json.loads(command("plan", model, *options).out)
    expected = {"cache": "static", "ranks": 2}
    assert report["total_bytes"] == windowkv.plan(model, tokens=100, max_cache_len=300, **expected).total_bytes
    assert report["max_tokens"] == windowkv.max_tokens(model, MIB, **expected)
    assert report["max_batch_size"] == windowkv.max_batch_size(model, MIB, tokens=100, max_cache_len=300, **expected)
    weights = windowkv.weight_bytes(model)
    assert weights is not None
    assert report["weight_bytes"] == -(-weights // 2)
    assert "one of 2 ranks" in " ".join(command("plan", model, "--tokens", 100, "--ranks", 2).out.split())


def test_plan_knows_public_models_by_name(command: Command) -> None:
    listed = json.loads(command("plan", "--list", "--json").out)
    assert listed["mistral-7b-v0.1"]["hub"] == "mistralai/Mistral-7B-v0.1"
    assert [layer["window"] for layer in listed["mistral-7b-v0.1"]["layers"]] == [4096] * 32
    assert "52 sliding, window 1,024; 10 full" in command("plan", "--list").out
    report = json.loads(command("plan", "mistral-7b-v0.1", "--tokens", 32768, "--fit", "8GiB", "--json").out)
    assert (report["baseline_bytes"], report["weight_bytes"]) == (4 << 30, 2 * 7_241_732_096)
    assert report["max_tokens"] is None
    out = command("plan", "mistral-7b-v0.1", "--fit", "8GiB").out
    assert "any number of tokens fits in 8.00 GiB of keys and values alone; the model's config ends at 32,768" in out


# -- doctor


def test_doctor_shows_what_works_with_a_model(command: Command, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    code, out, err = command("doctor", model)
    assert code == 0
    assert "a tiny Gemma3ForCausalLM" in out
    assert {"DynamicCache", "StaticCache", "enable", "int8"} <= set(out.split())
    assert re.search(r"two turns +same +same +same +same +same +same", out)
    assert re.search(r"^crop +refused \(1\)", out.replace("  crop", "crop"), flags=re.MULTILINE)
    assert "(1) refused, because `crop` was called, but" in out
    assert "save and load ..." in err


def test_doctor_as_json_has_every_cell_and_the_caches_asked_for(command: Command, model: str) -> None:
    code, out, _ = command("doctor", model, "--json", "--cache", "enable", "--cache", "StaticCache")
    report = json.loads(out)
    assert (code, report["failures"]) == (0, 0)
    cells = report["models"][model]["cells"]
    assert cells["beams"]["enable"] == {"outcome": "same", "detail": ""}
    assert cells["fork"]["StaticCache"] == {"outcome": "absent", "detail": "a StaticCache has no fork"}
    assert {tuple(row) for row in cells.values()} == {("StaticCache", "enable")}


def test_doctor_ends_with_1_when_a_cache_of_windowkv_fails(
    command: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windowkv.doctor.CACHES", [CacheKind("broken", lambda model, tokens: tokens)])
    code, out, _ = command("doctor", model)
    assert code == 1
    assert "failure" in out


@pytest.mark.parametrize(
    "arguments", [(), ("--all", "mistral"), ("mistral", "--cache", "none"), ("mistral", "--json", "--markdown")]
)
def test_doctor_refuses_what_is_no_question(command: Command, arguments: tuple[str, ...]) -> None:
    assert command("doctor", *arguments).code == 2


def test_doctor_says_in_one_line_of_what_no_tiny_twin_can_be_made(command: Command, tmp_path: Path) -> None:
    hf.BartConfig().save_pretrained(tmp_path)
    code, out, err = command("doctor", tmp_path)
    assert (code, out) == (1, "")
    assert err.endswith("BartConfig describes an encoder and a decoder: tiny twins are made of decoders alone\n")


def test_doctor_of_all_architectures_names_what_is_not_the_same_with_its_reason(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    configs = [("mistral", hf.MistralConfig()), ("moshi", hf.MoshiConfig()), ("bart", hf.BartConfig())]
    monkeypatch.setattr("windowkv.architectures.windowed_configs", lambda: iter(configs))
    page = command("doctor", "--all", "--markdown").out
    assert re.search(
        r"\| `mistral` \| `MistralForCausalLM` \| all but crop \(1\).* \| all but .* \| same \| same \| "
        r"all but fork \(\d\), save and load \(\d\) \| same \|",
        page,
    )
    assert "\n1. refused, because `crop` was called" in page
    assert ". failure: other tokens than without a cache\n" in page
    assert "- `bart`: BartConfig describes an encoder and a decoder" in page
    table = " ".join(command("doctor", "--all").out.split())
    assert "moshi" in table
    assert "12 same" in table
    assert "not examined: BartConfig" in table


# -- bench


def test_bench_prints_ratios_and_writes_a_picture_and_the_data(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = Scenario("tiny", lambda _: MODELS["mistral"](), torch.float32, 50, new_tokens=3, turns=2)
    monkeypatch.setattr("windowkv.benchmark.SCENARIOS", {"tiny": tiny, "other": tiny})
    result = command("bench", "--scenario", "tiny", "--rounds", 2, "--output", "out.png")
    assert result.code == 0, result.err
    assert result.out.count("tiny") == 2, "a row against each way to run transformers"
    (report,) = json.loads(Path(tmp_path, "out.json").read_text())
    assert report["tokens_equal"]
    assert {name: len(rounds) for name, rounds in report["rounds"].items()} == dict.fromkeys(CONTENDERS, 2)
    theirs, ours = (report["rounds"][name][0]["kv_bytes"] for name in ("transformers", "windowkv"))
    assert ours == windowkv.plan(MODELS["mistral"]().config, tokens=103, dtype=torch.float32).total_bytes
    assert theirs >= 4 * 50 * 2 * 2 * 16 * 4, "layers, the last prompt, keys and values, heads, head_dim, bytes"
    assert Path(tmp_path, "out.png").read_bytes().startswith(b"\x89PNG")
    assert command("plot", "bench", "out.json", "--output", "again.svg").out == "picture: again.svg\n"
    drawn = command("plot", "bench", "out.json", "--output", "again.svg", "--json").out
    assert json.loads(drawn) == {"picture": "again.svg", "data": None}
    drawn = re.findall(r"<!-- (.*) -->", Path("again.svg").read_text())
    assert "KV bytes after the prompt, against transformers in chunks" in drawn
    ratios = [ratio for measures in report["ratios"].values() for ratio in measures.values()]
    assert len(ratios) == 8
    assert {f"{ratio:.2f}x" for ratio in ratios if ratio is not None} <= {*drawn}
    assert report["ratios"]["transformers"]["kv_bytes"] == theirs / ours


def test_bench_names_its_scenarios_and_refuses_others(command: Command) -> None:
    assert {"prefill", "batch-decode", "turns"} <= set(command("bench", "--list").out.split())
    listed = json.loads(command("bench", "--list", "--json").out)["scenarios"]
    assert {"prefill", "batch-decode", "turns"} <= {each["scenario"] for each in listed}
    result = command("bench", "--scenario", "nothing")
    assert result.code == 2
    assert "prefill" in result.err


# -- plot


def test_plot_run_draws_what_the_cache_holds_and_writes_it_down(command: Command, model: str) -> None:
    lengths = ("--tokens", 400, "--new-tokens", 3)
    Path("config.json").write_text("{}")
    refused = command("plot", "run", model, *lengths, "--output", "config.svg")
    assert (refused.code, "config.json is no recording" in refused.err, Path("config.json").read_text()) == (
        1,
        True,
        "{}",
    )
    result = command("plot", "run", model, *lengths, "--output", "a.svg")
    assert (result.code, result.out) == (0, "picture: a.svg, data: a.json\n"), result.err
    planned = windowkv.plan(model, tokens=402, dtype=torch.float32).total_bytes
    assert read_recording("a.json").peak_bytes == planned
    assert command("plot", "run", model, *lengths, "--plain", "--output", "b.svg").code == 0
    assert read_recording("b.json").peak_bytes >= windowkv.plan(model, tokens=400, dtype=torch.float32).baseline_bytes
    assert command("plot", "recording", "a.json", "--output", "c.svg").code == 0
    first, second = (re.findall(r"<!-- (.*) -->", Path(name).read_text()) for name in ("a.svg", "c.svg"))
    assert first == second
    assert "sliding layers" in first


def test_plot_memory_and_plans_need_a_config_alone(command: Command, model: str) -> None:
    memory = command("plot", "memory", model, "--tokens", 200, "--kv-dtype", "int8", "--output", "memory.svg")
    assert (memory.code, memory.out) == (0, "picture: memory.svg\n"), memory.err
    assert "After a 200-token prompt" in Path("memory.svg").read_text()
    plans = command(
        "plot", "plans", model, DEMO_MODEL, "--tokens", 1024, "--dtype", "bfloat16", "--output", "plans.svg"
    )
    assert plans.code == 0, plans.err
    texts = re.findall(r"<!-- (.*?) -->", Path("plans.svg").read_text(), re.DOTALL)
    assert {"256", "512", "1,024"} <= {*texts}
    assert any(text.startswith(DEMO_MODEL) for text in texts)
    assert any(text.startswith(Path(model).name) for text in texts)


def test_plot_parts_and_reuse_draw_numbers_of_files(command: Command) -> None:
    Path("parts.json").write_text('{"old": {"MLP": 1, "attention": 2.5}, "new": {"MLP": 1, "attention": 0.25}}')
    assert command("plot", "parts", "parts.json", "--title", "What it took", "--output", "a.svg").code == 0
    assert all(text in Path("a.svg").read_text() for text in ("What it took", "3.50", "1.25", "attention"))
    Path("stats.json").write_text('[{}, {"tokens_computed": 70}, {"tokens_reused": 60, "tokens_computed": 80}]')
    assert command("plot", "reuse", "stats.json", "--output", "b.svg").code == 0
    assert "60 of the 140 tokens of 2 prompts were taken from the store" in Path("b.svg").read_text()


@pytest.mark.parametrize("content", ["", "3", "[1]", '{"a": 1}', '[{"a": 1}]'])
@pytest.mark.parametrize("kind", ["bench", "parts", "reuse", "recording"])
def test_plot_refuses_a_file_of_another_make_in_one_line(command: Command, kind: str, content: str) -> None:
    Path("other.json").write_text(content)
    code, out, err = command("plot", kind, "other.json", "--output", "a.png")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: .*other\.json is n.*\n", err)
    assert not Path("a.png").exists()


# -- how a process ends


def test_ctrl_c_while_text_comes_ends_with_130_and_no_traceback(model: str, started: Started) -> None:
    process = started("generate", "--model", model, "--prompt", "a", "--max-new-tokens", 1_000_000)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_ctrl_c_behind_a_progress_bar_gives_the_cursor_back(model: str, started: Started, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    arguments = ("demo", "--model", model, "--tokens", 20, "--new-tokens", 1_000_000)
    process = started(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path)
    os.close(theirs)
    screen = _read_until(ours, b"transformers")
    process.send_signal(signal.SIGINT)
    screen += _read_until(ours, None)
    assert process.wait(timeout=30) == 130, screen.decode()
    assert screen.count(b"\x1b[?25l") == screen.count(b"\x1b[?25h") == 1
    assert b"Traceback" not in screen


def _read_until(terminal: int, needle: bytes | None) -> bytes:
    """What a process writes until the needle appears, or until it closes the terminal."""
    text = b""
    while needle is None or needle not in text:
        try:
            more = os.read(terminal, 4096)
        except OSError:  # how Linux says of a terminal that nobody is left at the other end
            break
        if not more:  # and of a pipe
            break
        text += more
    return text


@pytest.mark.skipif(os.name != "posix", reason="signals differ")
def test_ctrl_c_while_torch_is_imported_ends_at_once(model: str) -> None:
    script = (
        "import sys, threading, os, signal; from windowkv.cli.sources import import_slowly\n"
        "sys.path.insert(0, sys.argv[1]); import_slowly('slow')"
    )
    Path(model, "slow.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)\nexcept: pass"
    )
    start = time.monotonic()
    process = subprocess.run([sys.executable, "-c", script, model], capture_output=True)
    assert (process.returncode, process.stderr) == (130, b"")
    assert time.monotonic() - start < 20


def test_a_reader_that_leaves_early_causes_no_traceback(model: str, started: Started) -> None:
    process = started("generate", "--model", model, "--prompt", "a", "--max-new-tokens", 1_000_000)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert b"Traceback" not in process.stderr.read()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finalizer_swallows_is_heard_at_the_next_step() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    steps = []

    def work() -> None:
        with progress() as show:
            for step in range(3):
                show("working", step, 3)
                steps.append(step)
                Finalized()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
