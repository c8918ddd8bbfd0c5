"""`windowkv generate`: continue a text."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from windowkv.cli import reports
from windowkv.cli.options import (
    AsJson,
    DType,
    KVFormat,
    ModelOption,
    Precision,
    PromptFile,
    Quantize,
    QuantizedLayers,
    new_file,
)
from windowkv.cli.sources import WITH_MODEL, encode, enough_positions, import_slowly, load, read_file, read_stdin
from windowkv.cli.terminal import print_json, progress, say
from windowkv.errors import OptionError
from windowkv.units import size

_STORE_BYTES = 1 << 30  # that a store holds in memory beside its files


def generate(
    model: ModelOption,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; without one, stdin is read.")] = None,
    prompt_file: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 200,
    rollback: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that the cache can always take back: 64, or all new ones where it is saved."),
    ] = None,
    dtype: Precision = DType.FLOAT32,
    load_cache: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A saved cache: what the text shares with it is not computed."),
    ] = None,
    save_cache: Annotated[
        Path | None, typer.Option(callback=new_file, help="Where the cache goes, prompt and continuation.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep beginnings of texts there, and take them from there.")
    ] = None,
    kv_dtype: KVFormat = None,
    quantize: QuantizedLayers = Quantize.FULL,
    as_json: AsJson = False,
) -> None:
    """Continue a text, as the model's own generation settings say, in a cache that stays within its bound."""
    source = _prompt(prompt, prompt_file)
    import_slowly(*WITH_MODEL)
    from windowkv.cache import ROLLBACK
    from windowkv.continuation import cache_name, reusable
    from windowkv.integration import enable
    from windowkv.persist import load as load_file
    from windowkv.prefix.store import PrefixStore

    kept = PrefixStore(_STORE_BYTES, store) if store else None
    packed: dict[str, Any] = {"kv_dtype": kv_dtype and kv_dtype.value, "quantize": quantize.value}
    with progress() as show:
        show(f"loading {model}", 0, 0)
        network, tokenizer = load(model, dtype)
        ids = encode(tokenizer, source)
        # A saved cache is to serve another continuation of the same prompt too.
        room = rollback if rollback is not None else max(ROLLBACK, max_new_tokens if save_cache else 0)
        loaded = None
        if load_cache:
            expected = packed["kv_dtype"]
            loaded = load_file(load_cache, network.config, dtype=network.dtype, rollback=room, kv_dtype=expected)
            if kv_dtype and quantize is Quantize.ALL and loaded.quantisation.quantize != quantize:
                raise OptionError(f"--quantize all: {load_cache} is quantised in its full layers alone")
    reused = reusable(loaded, ids) if loaded is not None else 0
    with ExitStack() as bar, enough_positions(network, ids.shape[1] + max_new_tokens):
        show = bar.enter_context(progress())
        show(f"reading {ids.shape[1]:,} tokens", 0, 0)
        output = enable(network, rollback=room, prefix_store=kept, **packed).generate(
            ids,
            attention_mask=ids.new_ones(ids.shape),
            max_new_tokens=max_new_tokens,
            streamer=None if as_json else _Stream(tokenizer, bar.close),
            return_dict_in_generate=True,
            **({} if loaded is None else {cache_name(network): loaded}),
        )
    told = reports.generation(network, output, prompt_tokens=ids.shape[1])
    taken = {load_cache: reused, store: 0 if kept is None else kept.stats.tokens_reused}
    saved = None if save_cache is None else _save(output, save_cache)
    if as_json:
        text = tokenizer.decode(output["sequences"][0, ids.shape[1] :], skip_special_tokens=True)
        report = {"model": model, "dtype": dtype, "text": text} | told._asdict()
        print_json(report | {"reused_tokens": sum(taken.values()), "saved": saved and str(saved)})
        return
    say(reports.generation_sentence(told))
    for origin, tokens in taken.items():
        if origin:
            say(f"{tokens:,} of the prompt's {ids.shape[1]:,} tokens were taken from {origin}")
    if saved is not None:
        say(f"saved: {saved}, {size(saved.stat().st_size)}")


class _Stream:
    """Where `generate` puts tokens: the prompt first, then new ones, before which the bar goes."""

    def __init__(self, tokenizer: Any, end_bar: Callable[[], None]) -> None:
        from transformers import TextStreamer

        self._text = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._end_bar, self._prompt_is_read = end_bar, False

    def put(self, ids: Any) -> None:
        """Print what the ids complete."""
        if self._prompt_is_read:
            self._end_bar()
        self._prompt_is_read = True
        self._text.put(ids)

    def end(self) -> None:
        """Print the rest."""
        self._text.end()


def _save(output: Any, path: Path) -> Path:
    from windowkv.cache import DynamicSlidingWindowCache

    cache = next((value for value in output.values() if isinstance(value, DynamicSlidingWindowCache)), None)
    if cache is None:
        raise OptionError("--save-cache: this model keeps no cache that windowkv could save")
    cache.save(path)
    return path


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("--prompt and --prompt-file are two prompts; pass one")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return read_file(prompt_file)
    if sys.stdin.isatty():
        raise typer.BadParameter("no prompt: pass --prompt or --prompt-file, or pipe a text in")
    return read_stdin()
