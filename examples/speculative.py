"""Speculative decoding: drafts from the prompt itself, checked in one forward, and taken back past the window."""

import torch

import windowkv
from _model import from_command_line

NEW, DRAFT = 60, 8


def main() -> None:
    model, tokenizer = from_command_line(__doc__)
    windowkv.enable(model)
    inputs = tokenizer("One fish, two fish, red fish, blue fish. One fish, two fish, ", return_tensors="pt")
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    plain = model.generate(**inputs, **options)

    drafted = model.generate(**inputs, **options, prompt_lookup_num_tokens=DRAFT)
    print("generate with drafts: the same tokens" if drafted.equal(plain) else "generate with drafts: other tokens")

    ids, forwards, cache = by_hand(model, inputs.input_ids)
    same = ids[:, : plain.shape[1]].equal(plain)
    print(f"by hand: {'the same' if same else 'other'} tokens, {NEW} of them in {forwards} forwards")
    print(f"the cache holds {cache.nbytes:,} bytes")


@torch.no_grad()
def by_hand(model, ids):
    """Ids `[1, n + NEW or more]`, how many forwards it took, and the cache."""
    cache = windowkv.DynamicSlidingWindowCache(model.config, rollback=DRAFT)
    end, forwards = ids.shape[1] + NEW, 1
    new = model(ids, cache=cache).logits[:, -1:].argmax(-1)
    while ids.shape[1] < end:
        draft = torch.cat((new, guess(ids, new)), dim=1)  # [1, 1 + DRAFT]
        best = model(draft, cache=cache).logits.argmax(-1)  # what the model says after each of them
        right = int((best[:, :-1] == draft[:, 1:]).long().cumprod(-1).sum())
        cache.crop(right - DRAFT)
        ids, new = torch.cat((ids, draft[:, : 1 + right]), dim=1), best[:, right : right + 1]
        forwards += 1
    return ids, forwards, cache


def guess(ids, new):
    """What followed that token when it came last, `[1, DRAFT]`; the token again where it is new."""
    earlier = (ids[0, :-DRAFT] == new[0]).nonzero()
    if not len(earlier):
        return new.expand(1, DRAFT)
    start = int(earlier[-1]) + 1
    return ids[:, start : start + DRAFT]


if __name__ == "__main__":
    main()
