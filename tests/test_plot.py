"""Pictures: what is drawn and written on them, on whose axes, and what is refused."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Annotation

import windowkv
from tiny import MODELS, STATEFUL, WINDOW, shared_model, tokens
from windowkv import OptionError, plot
from windowkv.comparison import compare, curves
from windowkv.plot.canvas import spread
from windowkv.prefix.store import Stats
from windowkv.recording import Recording, Sample
from windowkv.units import size

TOKENS = 24
KIB = 1 << 10
NOTHING = Stats()
ASKED = [
    NOTHING,
    replace(NOTHING, tokens_reused=0, tokens_computed=100),
    replace(NOTHING, tokens_reused=90, tokens_computed=130),
]
SAMPLES = [
    Sample(0, 0.5, 8, 0, {"sliding": 3 * KIB}),
    Sample(0, 1.0, 8, None, {"sliding": 4 * KIB, "full": 2 * KIB}),
    Sample(0, 2.0, 9, None, {"sliding": 1 * KIB, "full": 2 * KIB}),
    Sample(1, 3.0, 5, None, {"full": 1 * KIB}),
]
PARTS = {"old": {"MLP": 1.0, "attention": 3.0}, "new": {"MLP": 1.5, "attention": 0.5}}


def gemma() -> Any:
    return shared_model("gemma3").config


DRAWN: dict[str, Callable[..., Figure]] = {
    "memory": lambda **options: plot.memory(gemma(), tokens=TOKENS, **options),
    "plans": lambda **options: plot.plans({"tiny": gemma()}, tokens=TOKENS, **options),
    "parts": lambda **options: plot.parts(PARTS, **options),
    "reuse": lambda **options: plot.reuse(ASKED, **options),
    "ratios": lambda **options: plot.ratios({"time": {"a": 2.0, "b": 0.5}}, **options),
    "recording": lambda **options: plot.recording(Recording(SAMPLES), **options),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


def line(figure: Figure, label: str) -> tuple[list[float], list[float]]:
    """The data of the one line with that label."""
    (found,) = [each for axes in figure.axes for each in axes.lines if each.get_label() == label]
    return [float(x) for x in found.get_xdata()], [float(y) for y in found.get_ydata()]


def bars(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """Where the bars of each label begin, and how high they are."""
    return {
        str(container.get_label()): [(bar.get_y(), bar.get_height()) for bar in container]
        for container in figure.axes[0].containers
    }


def texts(figure: Figure) -> list[str]:
    """All that is written beside lines and bars, and the titles."""
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [axes.get_title(loc="left") for axes in figure.axes]


# -- every picture


@every_picture
def test_a_figure_is_returned_with_axes_that_name_what_they_count(name: str) -> None:
    figure = DRAWN[name]()
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert axes.get_title(loc="left")
    if name != "ratios":  # which are of no unit
        assert axes.get_ylabel()
        assert axes.get_xlabel() or name == "parts"


@every_picture
def test_it_is_drawn_on_the_axes_that_was_passed(name: str) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert DRAWN[name](ax=right) is figure
    assert right.has_data()
    assert not left.has_data()
    assert len(figure.axes) == 2
    inner = Figure()
    assert DRAWN[name](ax=inner.subfigures(1, 2)[1].subplots()) is inner


@every_picture
@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_it_can_be_written(name: str, suffix: str, begins: bytes, tmp_path: Path) -> None:
    path = (tmp_path / "a").with_suffix(suffix)
    DRAWN[name]().savefig(path)
    assert path.read_bytes().startswith(begins)


@every_picture
def test_texts_lie_within_the_picture_and_not_on_each_other(name: str) -> None:
    figure = DRAWN[name]()
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in [*axes.texts, axes.title, axes._left_title] if text.get_text()]
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    labels = [text.get_tightbbox() for text in axes.texts if isinstance(text, Annotation) and text.arrow_patch]
    for one, other in pairwise(sorted((box for box in labels if box), key=lambda box: box.y0)):
        assert one.y1 <= other.y1


@every_picture
def test_without_matplotlib_the_error_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "windowkv.plot.notebook", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"pip install 'windowkv\[plot\]'"):
        DRAWN[name]()


def test_drawing_needs_neither_pyplot_nor_a_display_and_a_notebook_shows_it() -> None:
    script = (
        "import sys, windowkv\n"
        "figure = windowkv.plot.ratios({'time': {'a': 2.0}})\n"
        "assert figure._repr_png_().startswith(b'\\x89PNG')\n"
        "assert not {'matplotlib.pyplot', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"MPLBACKEND": "TkAgg"})


# -- memory


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"rollback": 0}])
def test_memory_draws_both_caches_and_the_bound(options: dict[str, Any]) -> None:
    figure = plot.memory(gemma(), tokens=TOKENS, **options)
    dtype = options.pop("dtype", torch.float32)
    old, new = curves(gemma(), dtype=dtype, up_to=TOKENS, **options)
    for label, points in (
        ("transformers after the prompt", old.after_prompt),
        ("transformers later", old.decoding),
        ("windowkv", new.decoding),
        (
            "bound",
            [(n, windowkv.plan(gemma(), tokens=n, dtype=dtype, **options).total_bytes) for n in range(2, TOKENS + 1)],
        ),
    ):
        lengths, kib = line(figure, label)
        assert lengths == [*range(2, TOKENS + 1)]
        assert [value * KIB for value in kib] == [nbytes for _, nbytes in points]
    assert figure.axes[0].get_ylabel() == "keys and values held (KiB)"
    assert figure.axes[0].get_xlim() == (0, TOKENS)
    assert f"window: {WINDOW} tokens" in texts(figure)


def test_memory_packs_what_a_quantised_cache_packs() -> None:
    ends = {
        kv_dtype: line(plot.memory(gemma(), tokens=200, kv_dtype=kv_dtype), "windowkv")[1][-1]
        for kv_dtype in (None, "int8")
    }
    planned = windowkv.plan(gemma(), tokens=200, kv_dtype="int8").total_bytes
    assert ends["int8"] * KIB == planned < ends[None] * KIB


def test_memory_tells_of_a_real_run_in_numbers_and_draws_its_points() -> None:
    comparison = compare(shared_model("gemma3"), tokens(1, 200), new_tokens=4)
    figure = plot.memory(gemma(), tokens=203, comparison=comparison)
    lengths, kib = line(figure, "windowkv's run")
    assert [*zip(lengths, (value * KIB for value in kib), strict=True)] == [*comparison.windowkv.points]
    assert line(figure, "transformers' run")[1][0] * KIB == comparison.baseline.prompt_bytes
    title = figure.axes[0].get_title(loc="left")
    old, new = (size(run.prompt_bytes) for run in (comparison.baseline, comparison.windowkv))
    assert old > "200" > new, "KiB"
    assert title == f"After a 200-token prompt: {old} with transformers, {new} with windowkv"
    assert "200 tokens of prompt and 3 after it" in figure.get_supxlabel()


@pytest.mark.parametrize(("name", "marked"), [("mistral-full", []), ("mistral", [8]), ("mistral-wide", [])])
def test_memory_marks_the_windows_that_are_in_the_picture(name: str, marked: list[int]) -> None:
    written = texts(plot.memory(shared_model(name).config, tokens=TOKENS))
    assert [text for text in written if text.startswith("window:")] == [f"window: {n} tokens" for n in marked]
    assert any("no layer has a window" in text for text in written) == (name == "mistral-full")


def test_memory_names_the_layers_that_are_in_no_line() -> None:
    figure = plot.memory(STATEFUL["lfm2"]().config, tokens=4)
    assert "layers 0, 2, which transformers keeps" in figure.get_supxlabel()


@pytest.mark.parametrize("length", [-1, 0, 1])
def test_memory_refuses_what_is_no_curve(length: int) -> None:
    with pytest.raises(OptionError, match=f"tokens={length}"):
        plot.memory(gemma(), tokens=length)


# -- plans


def test_plans_draw_what_each_model_holds_and_would_hold_without_dropping(tmp_path: Path) -> None:
    shared_model("mistral").config.save_pretrained(tmp_path)
    figure = plot.plans({"one": gemma(), "two": tmp_path}, tokens=[64, 16, 1000], batch_size=2, dtype=torch.bfloat16)
    for name, config in (("one", gemma()), ("two", shared_model("mistral").config)):
        planned = [windowkv.plan(config, tokens=n, batch_size=2, dtype=torch.bfloat16) for n in (16, 64, 1000)]
        assert line(figure, name) == ([16, 64, 1000], [each.total_bytes for each in planned])
        assert line(figure, f"{name}, none dropped")[1] == [each.baseline_bytes for each in planned]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["16", "64", "1,000"]
    styles = {(drawn.get_marker(), drawn.get_linestyle()) for drawn in figure.axes[0].lines}
    assert len(styles) == 4, "told apart without colour"
    assert any(text.startswith("one\n") for text in texts(figure))
    assert line(plot.plans("mistral-7b-v0.1", tokens=[16, 64]), "mistral-7b-v0.1")[0] == [16, 64]


@pytest.mark.parametrize(("longest", "lengths"), [(3000, [375, 750, 1500, 3000]), (300, [300]), (1, [1])])
def test_plans_halve_a_longest_text(longest: int, lengths: list[int]) -> None:
    assert line(plot.plans({"a": gemma()}, tokens=longest), "a")[0] == lengths


@pytest.mark.parametrize(
    ("models", "lengths"), [({}, 100), ({"a": None}, []), ({"a": None}, 0), ({"a": None}, [5, -1])]
)
def test_plans_refuse_no_model_and_no_length(models: dict[str, Any], lengths: int | Sequence[int]) -> None:
    with pytest.raises(OptionError, match="a model or more, and lengths"):
        plot.plans(models, tokens=lengths)


# -- parts and reuse


def test_parts_are_stacked_and_their_sum_is_written() -> None:
    figure = plot.parts(PARTS, amount="time (s)", title="a title")
    assert bars(figure) == {"MLP": [(0, 1.0), (0, 1.5)], "attention": [(1.0, 3.0), (1.5, 0.5)]}
    assert {"4.00", "2.00", "MLP", "attention", "a title"} <= {*texts(figure)}
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["old", "new"]
    assert figure.axes[0].get_ylabel() == "time (s)"
    looks = {(bar.get_facecolor(), bar.get_hatch()) for container in figure.axes[0].containers for bar in container}
    assert len(looks) == 2


@pytest.mark.parametrize("columns", [{}, {"a": {}}, {"a": {"x": 1.0}, "b": {"y": 1.0}}])
def test_parts_that_differ_are_refused(columns: dict[str, dict[str, float]]) -> None:
    with pytest.raises(OptionError, match="the same parts"):
        plot.parts(columns)


def test_reuse_is_what_a_real_store_saved_request_by_request() -> None:
    model, store = MODELS["gemma3"](), windowkv.PrefixStore(max_bytes=1 << 24)
    windowkv.enable(model, prefix_store=store)
    text, stats = tokens(1, 60), [store.stats]
    for length in (40, 60):
        ids = text[:, :length]
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1)
        stats.append(store.stats)
    figure = plot.reuse(stats)
    assert bars(figure) == {"taken from the store": [(0, 0), (0, 40)], "computed": [(0, 40), (40, 20)]}
    assert figure.axes[0].get_title(loc="left") == "40 of the 100 tokens of 2 prompts were taken from the store"


def test_reuse_without_a_request_is_refused() -> None:
    with pytest.raises(OptionError, match="after each one"):
        plot.reuse([NOTHING])


# -- ratios


def test_ratios_have_a_panel_for_each_measure_and_a_bar_for_each_name() -> None:
    panels = {"time": {"a": 2.0, "b": 0.5}, "bytes": {"a": None, "b": 4.0}, "rise": {"a": 1.0, "b": 1.0}}
    figure = plot.ratios(panels)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(panels)
    assert [[bar.get_width() for bar in axes.patches] for axes in figure.axes] == [[2.0, 0.5], [0.0, 4.0], [1.0, 1.0]]
    assert {"2.00x", "0.50x", "unknown", "4.00x"} <= {*texts(figure)}
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a", "b"]
    worse, better = figure.axes[0].patches[1].get_facecolor(), figure.axes[0].patches[0].get_facecolor()
    assert worse == (1, 1, 1, 1) != better, "told apart without colour"


def test_ratios_take_an_axes_for_each_panel_and_no_other_number_of_them() -> None:
    figure = Figure()
    assert plot.ratios({"time": {"a": 2.0}, "bytes": {"a": 3.0}}, ax=figure.subplots(1, 2)) is figure
    assert [axes.patches[0].get_width() for axes in figure.axes] == [2.0, 3.0]
    with pytest.raises(OptionError, match="2 axes for 1 panels"):
        plot.ratios({"time": {"a": 2.0}}, ax=figure.axes)
    with pytest.raises(OptionError, match="a name or more"):
        plot.ratios({"time": {}})


# -- recording


def test_a_recording_is_drawn_run_by_run_with_kinds_on_top_of_each_other() -> None:
    figure = plot.recording(Recording(SAMPLES))
    assert line(figure, "all") == ([0.5, 1.0, 2.0], [3, 6, 3])
    assert line(figure, "_all") == ([3.0], [1])
    (axes,) = figure.axes
    areas = {str(area.get_label()): area.get_paths()[0].vertices for area in axes.collections[:2]}
    assert {(x, y) for x, y in areas["full"] if x == 2.0} == {(2.0, 4), (2.0, 6), (2.0, 1), (2.0, 3)}, "steps"
    assert axes.get_ylabel() == "held by caches (KiB)"
    assert {"run 1: 6.0 KiB", "run 2: 1.0 KiB", "full layers", "sliding layers"} <= {*texts(figure)}
    assert "6.0 KiB" in axes.get_title(loc="left")
    assert any("9 tokens, 3.0 KiB; 5 tokens, 1.0 KiB" in text for text in texts(figure))


def test_nothing_recorded_is_refused() -> None:
    with pytest.raises(OptionError, match="nothing was recorded"):
        plot.recording(Recording())


# -- labels


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4).map(sorted))
def test_labels_keep_apart_and_below_the_top(heights: list[float]) -> None:
    moved = spread(heights, gap=0.13)
    assert all(after - before >= 0.13 - 1e-9 for before, after in pairwise(moved))
    assert max(moved) <= 1
    assert min(moved) >= min(min(heights), 1 - 0.13 * (len(heights) - 1)) - 1e-9
