"""A chat in one cache: turns go on where the last one ended, one is tried again, and one past has two futures."""

import windowkv
from _model import from_command_line


def main() -> None:
    model, tokenizer = from_command_line(__doc__)
    windowkv.enable(model)
    cache = windowkv.DynamicSlidingWindowCache(model.config, rollback=256)
    chat = "You are a helpful assistant.\n"

    def answer(text: str, cache: windowkv.DynamicSlidingWindowCache) -> str:
        inputs = tokenizer(text, return_tensors="pt")
        before = cache.get_seq_length()
        out = model.generate(**inputs, cache=cache, max_new_tokens=30, do_sample=False)
        prompt = inputs.input_ids.shape[1]
        print(f"{prompt} tokens of prompt, {before} seen before; {cache.nbytes:,} bytes held")
        return tokenizer.decode(out[0, prompt:], skip_special_tokens=True)

    for question in ("What is a window?", "And a cache?"):
        chat += f"User: {question}\nAssistant: "
        chat += answer(chat, cache) + "\n"

    # The last question is put otherwise. The cache goes back to where the texts part, by itself.
    edited = chat[: chat.rindex("And a cache?")] + "And a buffer?\nAssistant: "
    print("edited:", repr(answer(edited, cache)))

    # Two continuations of one past. They share what both have until one of them writes.
    twin = cache.fork()
    print("to the left: ", repr(answer(edited + "Left, ", cache)))
    print("to the right:", repr(answer(edited + "Right, ", twin)))

    # By hand: take back 10 tokens, past the window too. Further than `rollback` is refused, and nothing changes.
    seen = cache.get_seq_length()
    cache.crop(-10)
    print(f"{seen} tokens seen, {cache.get_seq_length()} after crop(-10)")


if __name__ == "__main__":
    main()
