"""`windowkv demo`: one text, transformers' cache and windowkv's, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windowkv.cli import reports
from windowkv.cli.options import AsJson, DType, ModelOption, Picture, Precision, TextFile
from windowkv.cli.pictures import drawn
from windowkv.cli.sources import (
    DEMO_MODEL,
    WITH_MODEL,
    encode,
    enough_positions,
    import_slowly,
    load,
    python_documentation,
    read_file,
)
from windowkv.cli.terminal import print_json, print_table, progress, say

if TYPE_CHECKING:
    from windowkv.comparison import Comparison


def demo(
    text: TextFile = None,
    model: ModelOption = DEMO_MODEL,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of the continuation.")] = 64,
    dtype: Precision = DType.FLOAT32,
    output: Picture = Path("windowkv-demo.png"),
    as_json: AsJson = False,
) -> None:
    """Continue one text with transformers' cache and with windowkv's, and show what each held and took."""
    source = python_documentation() if text is None else read_file(text)
    import_slowly(*WITH_MODEL)
    with progress() as show:
        show(f"loading {model}", 0, 0)
        network, tokenizer = load(model, dtype)
        from windowkv.comparison import compare

        prompt = encode(tokenizer, source)[:, :tokens]
        with enough_positions(network, prompt.shape[1] + new_tokens):
            comparison = compare(network, prompt, new_tokens=new_tokens, progress=show)
        show("drawing", 0, 0)
        picture = _draw(comparison, network, output)
    if comparison.prompt_tokens < tokens:
        say(f"the text is shorter than {tokens:,} tokens: all {comparison.prompt_tokens:,} of them were used")
    if as_json:
        report = reports.comparison_report(comparison)
        print_json({"model": model, "dtype": dtype} | report | {"picture": picture and str(picture)})
    else:
        title = f"{model}, {dtype}, a prompt of {comparison.prompt_tokens:,} tokens"
        print_table(reports.comparison_table(comparison, title=title))
        typer.echo(f"picture: {picture or 'none'}")
    if model == DEMO_MODEL:
        from windowkv.demo_model import TERMS

        say(TERMS)


def _draw(comparison: "Comparison", network: Any, output: Path) -> Path | None:
    from windowkv.plot.usage import memory

    seen, _ = comparison.windowkv.points[-1]
    return drawn(output, memory, network.config, tokens=seen, dtype=network.dtype, comparison=comparison)
