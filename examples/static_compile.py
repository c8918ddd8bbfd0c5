"""Compiled decoding: one graph for every step, on both sides of the window, and for the next text."""

import time

import torch

import windowkv
from _model import from_command_line

NEW = 40


@torch.no_grad()
def main() -> None:
    model, tokenizer = from_command_line(__doc__)
    windowkv.enable(model)  # the query heads of a group then share their keys in compiled steps too
    cache = windowkv.SlidingWindowCache(model.config, max_cache_len=512)
    step = torch.compile(model.forward, fullgraph=True)
    for text in ("The first text compiles the step.", "The second one uses the same graph."):
        cache.reset()  # empty, at the same addresses
        logits = model(tokenizer(text, return_tensors="pt").input_ids, cache=cache).logits
        start, new = time.perf_counter(), []
        for _ in range(NEW):
            new.append(logits[:, -1:].argmax(-1))
            logits = step(new[-1], cache=cache).logits
        print(f"{NEW} tokens in {time.perf_counter() - start:.2f} s: {tokenizer.decode(torch.cat(new, 1)[0])!r}")
    held = windowkv.plan(model.config, tokens=512, cache="static", dtype=model.dtype).total_bytes
    print(f"{cache.nbytes:,} bytes held, {held:,} planned")


if __name__ == "__main__":
    main()
