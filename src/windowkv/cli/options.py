"""The options that commands share, and what may be written there.

Knows how a value is spelled. Knows nothing of what any command does with it.
"""

import re
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from windowkv.cli.sources import DEMO_MODEL

FORMATS = (".png", ".svg", ".pdf")  # of pictures

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class DType(StrEnum):
    """Number formats, by torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KVDType(StrEnum):
    """What keys and values are quantised to, by windowkv's names."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


class Quantize(StrEnum):
    """Which layers are quantised."""

    FULL = "full"
    ALL = "all"


def picture_path(path: Path) -> Path:
    """Where a picture can go."""
    if path.suffix not in FORMATS:
        raise typer.BadParameter(f"{path} does not end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def new_file(path: Path | None) -> Path | None:
    """Where a file can go."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    return path


def byte_count(text: str) -> int:
    """1500000, 1.5MiB or 2GiB, in bytes."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
    if not parts or parts[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no number of bytes; 1500000, 1.5MiB and 2GiB are")
    return int(Fraction(parts[1]) * _UNITS[parts[2]])


def examples(*commands: str) -> str:
    """What stands below a command's help: lines to copy."""
    return "\b\n" + "\n".join(["Examples:", *(f"  $ {command}" for command in commands)])


MODEL_HELP = f"{DEMO_MODEL}, a local folder, or a hub id."
CONFIG_HELP = f"{DEMO_MODEL}, a local folder, a config.json, a hub id, or a name that windowkv plan --list tells."
ModelOption = Annotated[str, typer.Option(help=MODEL_HELP)]
TextFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Text to continue, instead of Python's documentation.")
]
PromptFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with the text to continue.")]
Picture = Annotated[Path, typer.Option(callback=picture_path, help="Where the picture goes; of bench, the data too.")]
ByteBudget = Annotated[
    int | None,
    typer.Option(parser=byte_count, metavar="BYTES", help="Tell how much fits in this, say 24GiB."),
]
Rollback = Annotated[int, typer.Option(min=0, help="Tokens that the cache can always take back.")]
KVFormat = Annotated[KVDType | None, typer.Option(help="Keep all but the newest tokens of the cache in so many bits.")]
QuantizedLayers = Annotated[
    Quantize, typer.Option(help="Which layers --kv-dtype is for: those that keep every token, or all.")
]
Precision = Annotated[DType, typer.Option(help="Number format of the weights and the cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
