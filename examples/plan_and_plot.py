"""What a model's cache will hold, before any weights are loaded: a table, and a picture."""

import argparse

import torch
from transformers import MistralConfig

import windowkv
from windowkv.model_source import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, a hub id, or gemma-3-270m; the sizes of Mistral 7B without")
    parser.add_argument("--picture", default="plans.png", help="where the picture goes: PNG, SVG or PDF")
    options = parser.parse_args()
    name = options.model
    config = load_config(name) if name else MistralConfig(sliding_window=4096)

    print("tokens     cache  never dropping  int8 (MiB)")
    for tokens in (1_024, 8_192, 65_536, 524_288):
        plan = windowkv.plan(config, tokens=tokens, dtype=torch.bfloat16)
        packed = windowkv.plan(config, tokens=tokens, dtype=torch.bfloat16, kv_dtype="int8", quantize="all")
        held, whole, small = (size / (1 << 20) for size in (plan.total_bytes, plan.baseline_bytes, packed.total_bytes))
        print(f"{tokens:7,} {held:8,.1f} {whole:15,.1f} {small:11,.1f}")

    most = windowkv.max_tokens(config, 1 << 30, dtype=torch.bfloat16)
    print("in 1 GiB:", "any number of tokens" if most is None else f"{most:,} tokens")
    windowkv.plot.plans({name or "Mistral 7B": config}, tokens=65_536, dtype=torch.bfloat16).savefig(options.picture)
    print("picture:", options.picture)


if __name__ == "__main__":
    main()
