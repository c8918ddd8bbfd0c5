"""An agent's loop: each step sends the whole history, and only its end is computed, also after a restart."""

import tempfile

import windowkv
from _model import from_command_line

TOOLS = "You are an agent. You may call: read(file), search(words), answer(text).\n" * 4
OBSERVATIONS = ("read: three lines", "search: nothing found", "read: the second line is empty")


def main() -> None:
    model, tokenizer = from_command_line(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        run_agent(model, tokenizer, windowkv.PrefixStore(max_bytes=1 << 30, directory=folder))
        print("after a restart, with an empty memory and the same folder:")
        run_agent(model, tokenizer, windowkv.PrefixStore(max_bytes=1 << 30, directory=folder))


def run_agent(model, tokenizer, store: windowkv.PrefixStore) -> None:
    windowkv.enable(model, prefix_store=store)
    history = TOOLS + "Task: which line of the file is empty?\n"
    for observation in OBSERVATIONS:
        inputs = tokenizer(history, return_tensors="pt")
        prompt, computed = inputs.input_ids.shape[1], store.stats.tokens_computed
        out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        print(f"{prompt} tokens of prompt, {store.stats.tokens_computed - computed} of them computed")
        history += tokenizer.decode(out[0, prompt:], skip_special_tokens=True) + f"\n{observation}\n"
    print(store.stats)


if __name__ == "__main__":
    main()
