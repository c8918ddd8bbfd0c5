"""A long prompt, computed once and kept in a file; several questions to it later."""

import tempfile
from pathlib import Path

import windowkv
from _model import from_command_line

BOOK = "It was a bright cold day in April, and nobody knew what the clocks were about to do. " * 11


def main() -> None:
    model, tokenizer = from_command_line(__doc__)
    windowkv.enable(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "book.cache"

        cache = windowkv.DynamicSlidingWindowCache(model.config)
        model.generate(**tokenizer(BOOK, return_tensors="pt"), cache=cache, max_new_tokens=1)
        cache.save(path)
        print(f"{cache.get_seq_length():,} tokens in a file of {path.stat().st_size:,} bytes")

        # In another process, on another day. Every byte is verified; nothing is copied until it is read.
        book = windowkv.load(path, model.config)
        for question in ("Which month is it?", "How is the weather?"):
            inputs = tokenizer(BOOK + question, return_tensors="pt")
            prompt, cache = inputs.input_ids.shape[1], book.fork()
            out = model.generate(**inputs, cache=cache, max_new_tokens=20, do_sample=False)
            print(f"{prompt - book.get_seq_length()} of {prompt:,} tokens computed:")
            print(f"  {question} {tokenizer.decode(out[0, prompt:], skip_special_tokens=True)!r}")

        shortened = Path(folder) / "shortened.cache"  # a copy: a file that caches still read is never written to
        shortened.write_bytes(path.read_bytes()[:-1])
        try:
            windowkv.load(shortened, model.config)
        except windowkv.CacheFileError as error:
            print("a shortened file:", error)


if __name__ == "__main__":
    main()
