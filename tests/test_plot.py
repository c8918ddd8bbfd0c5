"""Pictures: what is written on them, and what is refused."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from windowkv import OptionError
from windowkv.plot import Usage, draw_comparison, spread

MIB = 1 << 20
OLD = Usage("transformers", [(2, MIB), (512, 9 * MIB)], [(2, MIB), (512, 3 * MIB)], [(500, 9 * MIB), (501, 3 * MIB)])
NEW = Usage("windowkv", [(2, MIB), (512, 4 * MIB)], [(2, MIB), (512, 4 * MIB)], [(500, 4 * MIB), (501, 5 * MIB)])


def drawn(path: Path, *, baseline: Usage = OLD, windowkv: Usage = NEW, windows: tuple[int, ...] = (128,)) -> str:
    """The picture's source; matplotlib puts every text of an SVG into a comment."""
    return draw_comparison(path / "a.svg", baseline=baseline, windowkv=windowkv, windows=windows).read_text()


def test_a_png_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    assert draw_comparison(path, baseline=OLD, windowkv=NEW, windows=[128]) == path
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_title_tells_the_finding_in_numbers_of_the_real_run(tmp_path: Path) -> None:
    picture = drawn(tmp_path)
    assert "After a 500-token prompt: 9 MiB with transformers, 4 MiB with windowkv" in picture
    assert "While decoding 3 MiB and 5 MiB" in picture


@pytest.mark.parametrize(("windows", "marked"), [((), []), ((128,), [128]), ((64, 128), [64, 128]), ((9999,), [])])
def test_windows_within_the_picture_are_marked(tmp_path: Path, windows: tuple[int, ...], marked: list[int]) -> None:
    picture = drawn(tmp_path, windows=windows)
    assert [f"window: {window} tokens" in picture for window in windows] == [window in marked for window in windows]


def test_a_single_length_and_an_empty_cache_can_be_drawn(tmp_path: Path) -> None:
    nothing = Usage("none", [(2, 0)], [(2, 0)], [(1, 0), (2, 0)])
    assert "0 MiB with none" in drawn(tmp_path, baseline=nothing, windowkv=nothing)


def test_another_format_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"a\.jpeg.*\.png, \.svg, \.pdf"):
        draw_comparison(tmp_path / "a.jpeg", baseline=OLD, windowkv=NEW, windows=[])
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"pip install 'windowkv\[plot\]'"):
        drawn(tmp_path)


def test_drawing_needs_neither_pyplot_nor_a_display(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from windowkv.plot import *\n"
        f"usage = {OLD!r}\n"
        "draw_comparison(Path(sys.argv[1]), baseline=usage, windowkv=usage, windows=[])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a.png"], check=True, env=os.environ | {"MPLBACKEND": "TkAgg"}
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4).map(sorted))
def test_labels_keep_apart_and_below_the_top(heights: list[float]) -> None:
    moved = spread(heights, gap=0.13)
    assert all(after - before >= 0.13 - 1e-9 for before, after in pairwise(moved))
    assert max(moved) <= 1
    assert min(moved) >= min(min(heights), 1 - 0.13 * (len(heights) - 1)) - 1e-9
