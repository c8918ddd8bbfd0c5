"""The map of the code and the direction of its imports, as docs/architecture.md tells them."""

import ast
import importlib
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
    {"errors", "window", "units", "processor"},
    {
        "layout",
        "attention",
        "chunks",
        "history",
        "changes",
        "tiny_sizes",
        "rows",
        "cache_file",
        "prefix/tree",
        "prefix/fingerprint",
        "prefix/writer",
        "recording",
        "plot/notebook",
    },
    {"quantisation", "plot/canvas"},
    {
        "memory",
        "buffers",
        "fixed_buffers",
        "codecs",
        "prefix/texts",
        "tiny_model",
        "operations",
        "plot/recorded",
        "plot/measures",
    },
    {"packed_buffer", "offload"},
    {"layers", "static_layers", "architectures", "weights"},
    {"snapshot"},
    {"cache", "attention_interface"},
    {"continuation", "persist", "prefix/parts", "prefix/disk", "prefix/admission", "static_cache"},
    {"prefix/files"},
    {"prefix/store"},
    {"prefix/prompt"},
    {"seams"},
    {"integration", "demo_model", "known_models", "measurement", "plot/stacks"},
    {"model_source", "recorder"},
    {"planner"},
    {"comparison", "benchmark", "doctor", "plot/planned"},
    {"plot/usage"},
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
        "cli/commands/plot",
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
    "offload",
    "attention",
    "chunks",
    "history",
    "changes",
    "processor",
    "rows",
    "cache_file",
}


def imports(module: str, *, of_types: bool = True) -> set[str]:
    """Every module that it imports, wherever in the file; relative imports are spelt with their dots.

    Without `of_types`, those are left out that only a type checker sees.
    """
    found = set()
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    if not of_types:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in ast.walk(tree):
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
    imported = {module: imports(module, of_types=False) for module in MODULES}
    users = {module for module, names in imported.items() if any(name.split(".")[0] == "matplotlib" for name in names)}
    assert users == {"plot/notebook"}


@pytest.mark.parametrize("package", ["windowkv", "windowkv.plot"])
def test_a_package_defines_nothing_and_exports_what_it_says(package: str) -> None:
    module = importlib.import_module(package)
    stub = ast.parse((SOURCE.parent / package.replace(".", "/") / "__init__.pyi").read_text())
    assert {type(node) for node in stub.body} == {ast.ImportFrom}
    names = [alias.name for node in stub.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(module.__all__) == sorted(names)
    values = [getattr(module, name) for name in names]
    assert all((getattr(value, "__module__", None) or value.__name__).startswith("windowkv.") for value in values)


def test_the_package_and_the_command_start_without_torch() -> None:
    script = "import sys, windowkv, windowkv.cli; print({'torch', 'transformers', 'matplotlib'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
