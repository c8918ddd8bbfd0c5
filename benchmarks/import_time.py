"""What importing windowkv takes, in milliseconds: alone, on top of torch and transformers, and with every public name.

`python benchmarks/import_time.py [--rounds 9]`; each round is a process of its own, and medians are printed as JSON.
"""

import argparse
import json
import subprocess
import sys
from statistics import median

CASES = {
    "windowkv": ("", "import windowkv"),
    "windowkv, on top of torch and transformers": ("import torch, transformers", "import windowkv"),
    "every public name, on top of torch and transformers": (
        "import torch, transformers.generation, transformers.cache_utils, transformers.masking_utils",
        "import windowkv; [getattr(windowkv, name) for name in windowkv.__all__]",
    ),
}
SCRIPT = "{before}\nfrom time import perf_counter\nstart = perf_counter()\n{timed}\nprint(perf_counter() - start)"


def milliseconds(before: str, timed: str) -> float:
    """How long the second statement takes after the first, in a new process."""
    script = SCRIPT.format(before=before, timed=timed)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return 1000 * float(done.stdout)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(
        json.dumps(
            {name: round(median(milliseconds(*case) for _ in range(rounds)), 1) for name, case in CASES.items()},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
