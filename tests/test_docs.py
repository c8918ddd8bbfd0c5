"""What the documentation says, done: its code, its commands, the examples; and that it names all that is public."""

import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import typer

import windowkv
from tiny import MODELS
from windowkv.cli import app, main
from windowkv.tiny_model import tiny_tokenizer

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py"))
NOTEBOOKS = sorted(path.name for path in (ROOT / "examples").glob("*.ipynb"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# How pages name the models that they load, and the tiny ones in their place.
STAND_INS = {"mistralai/Mistral-7B-v0.1": "mistral", "google/gemma-3-1b-pt": "gemma3"} | dict.fromkeys(
    ("MODEL", "my-model"), "gemma3"
)
DEMO = "google/gemma-3-1b-pt"
TEXT = "The window slides over the text, and what it leaves behind is dropped. " * 4
FILES = {"BOOK": TEXT, "BOOK_AND_QUESTION": TEXT + "What is dropped?", "FILE": TEXT}
QUICK = {"generate", "plan", "cache", "store"}  # commands that are run here; of the others only the options are read


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the models that pages name are tiny ones, whose tokens are characters."""
    folder = tmp_path_factory.mktemp("library")
    for path, model in STAND_INS.items():
        MODELS[model]().save_pretrained(folder / path)
        tiny_tokenizer().save_pretrained(folder / path)
    return folder


@pytest.fixture(autouse=True)
def _workplace(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those models and some texts in an otherwise empty working folder; nothing is compiled to machine code."""
    for model in library.iterdir():
        (tmp_path / model.name).symlink_to(model)
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("windowkv.demo_model.load", partial(loaded, DEMO))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def loaded(name: str, **options: Any) -> tuple[Any, Any]:
    return hf.AutoModelForCausalLM.from_pretrained(name, **options), hf.AutoTokenizer.from_pretrained(name)


def blocks(page: str, language: str) -> list[str]:
    """A page's fenced blocks in one language, each below as many empty lines as stand before it in the page."""
    text = PAGES[page].read_text()
    found = [match for match in FENCE.finditer(text) if match[1] == language]
    return ["\n" * text.count("\n", 0, match.start(2)) + match[2] for match in found]


def commands(page: str) -> list[list[str]]:
    """The words of every `$ windowkv ...` of a page, without the comment behind it."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True)[1:] for line in lines if line.startswith("$ windowkv ")]


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit code of the command in this process, which generates a few tokens only."""
    few = ["--max-new-tokens", "4"] if words[0] == "generate" else []
    monkeypatch.setattr(sys, "argv", ["windowkv", *words, *few])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    """In one namespace. `model` and `inputs` are there from the start: a reader has them."""
    model, tokenizer = loaded(DEMO)
    namespace: dict[str, Any] = {"model": model, "inputs": tokenizer(TEXT, return_tensors="pt")}
    for block in blocks(page, "python"):
        exec(compile(block, PAGES[page], "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_are_commands_and_the_quick_ones_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in commands(page):
        command, rest = typer.main.get_command(app), list(words)
        while rest[0] in getattr(command, "commands", ()):
            command = command.commands[rest.pop(0)]
        command.make_context(words[0], rest)  # refuses an option that is none, and a value that it cannot have
        if words[0] in QUICK:
            assert run_command(words, monkeypatch) == 0, words


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_the_cells_of_a_notebook_run_and_it_is_stored_without_their_outputs(
    notebook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads((ROOT / "examples" / notebook).read_text())["cells"] if "outputs" in cell]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{notebook}, cell {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere_in_the_repository(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", PAGES[page].read_text()):
        file = PAGES[page].parent / target if target else PAGES[page]
        assert file.is_file(), target
        assert not anchor or anchor in {slug(title) for title in HEADING.findall(file.read_text())}, (
            f"{target}#{anchor}"
        )


def slug(title: str) -> str:
    """A heading's anchor, on GitHub and on the site."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_the_reference_names_all_that_is_public() -> None:
    named = set(re.findall(r"^::: windowkv\.(\w+)$", PAGES["docs/reference.md"].read_text(), re.MULTILINE))
    assert named >= set(windowkv.__all__)


def test_the_site_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert {f"docs/{name}" for name in re.findall(r"[\w-]+\.md", navigation)} >= {*PAGES} - {"README.md"}
