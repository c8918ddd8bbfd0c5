"""The map of the code and the direction of its imports, as docs/architecture.md tells them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "windowkv"
MAP = (ROOT / "docs" / "architecture.md").read_text()

# A module imports only from rows above its own.
ROWS = [
    {"errors", "window"},
    {
        "layout",
        "attention",
        "history",
        "changes",
        "tiny_sizes",
        "rows",
        "cache_file",
        "prefix/tree",
        "prefix/fingerprint",
        "prefix/writer",
    },
    {"quantisation"},
    {"memory", "buffers", "fixed_buffers", "codecs", "prefix/texts", "tiny_model", "operations"},
    {"packed_buffer"},
    {"layers", "static_layers", "architectures", "weights"},
    {"snapshot"},
    {"cache", "attention_interface"},
    {"continuation", "persist", "prefix/parts", "prefix/disk", "prefix/admission", "static_cache"},
    {"prefix/files"},
    {"prefix/store"},
    {"prefix/prompt"},
    {"seams"},
    {"integration", "demo_model", "known_models", "measurement"},
    {"model_source"},
    {"planner"},
    {"comparison", "benchmark", "plot", "doctor"},
    {"cli/terminal"},
    {"cli/sources"},
    {"cli/options", "cli/pictures", "cli/reports", "cli/matrix"},
    {
        "cli/commands/bench",
        "cli/commands/cache",
        "cli/commands/demo",
        "cli/commands/doctor",
        "cli/commands/generate",
        "cli/commands/plan",
        "cli/commands/store",
    },
    {"cli/app"},
]
ROW_OF = {module: row for row, modules in enumerate(ROWS) for module in modules}
MODULES = sorted(
    path.relative_to(SOURCE).with_suffix("").as_posix() for path in SOURCE.rglob("*.py") if path.stem != "__init__"
)
WITHOUT_TORCH = {"errors", "window", "layout", "memory", "quantisation"}
WITHOUT_TRANSFORMERS = WITHOUT_TORCH | {
    "buffers",
    "fixed_buffers",
    "codecs",
    "packed_buffer",
    "attention",
    "history",
    "changes",
    "rows",
    "cache_file",
}


def imports(module: str) -> set[str]:
    """Every module that it imports, wherever in the file; relative imports are spelt with their dots."""
    found = set()
    for node in ast.walk(ast.parse((SOURCE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            parts = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {part for part in parts if as_module(part) in MODULES} or {origin}
    return found


def as_module(name: str) -> str:
    """`windowkv.cli.reports` -> `cli/reports`."""
    return name.removeprefix("windowkv.").replace(".", "/")


def test_every_module_is_on_the_map_and_the_map_names_no_other() -> None:
    assert sorted(re.findall(r"^\| `([\w/]+)\.py` \|", MAP, flags=re.MULTILINE)) == MODULES


def test_every_module_has_a_row_and_no_row_is_out_of_date() -> None:
    assert sorted(ROW_OF) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    own = [name for name in imports(module) if name.startswith(("windowkv", "."))]
    assert [name for name in own if as_module(name) not in ROW_OF] == [], "absolute names of modules, not of packages"
    assert [name for name in own if ROW_OF[as_module(name)] >= ROW_OF[module]] == []


@pytest.mark.parametrize("module", sorted(WITHOUT_TRANSFORMERS))
def test_the_foundation_is_testable_without_models(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(module)}
    assert "transformers" not in roots
    assert module not in WITHOUT_TORCH or "torch" not in roots


def test_extras_are_imported_where_they_are_needed_and_nowhere_else() -> None:
    users = {module for module in MODULES if any(name.split(".")[0] == "matplotlib" for name in imports(module))}
    assert users == {"plot"}


def test_the_package_defines_nothing_and_exports_what_it_says() -> None:
    import windowkv

    stub = ast.parse((SOURCE / "__init__.pyi").read_text())
    assert {type(node) for node in stub.body} == {ast.ImportFrom}
    names = [alias.name for node in stub.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(windowkv.__all__) == sorted(names)
    assert all(getattr(windowkv, name).__module__.startswith("windowkv.") for name in names)


def test_the_package_and_the_command_start_without_torch() -> None:
    script = "import sys, windowkv, windowkv.cli; print({'torch', 'transformers', 'matplotlib'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
