"""Whether the wheel and the source archive in a folder hold what they should, and the wheel works once installed.

`python tests/check_package.py dist .venv`: the dependencies are those of the second environment, which are not copied.
"""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
CODE = ROOT / "src"
# What of the package's own may be imported before anything is used.
EAGER = {"windowkv"}


def packaged() -> set[str]:
    """Every file of the package, as the wheel names it."""
    files = (path for path in (CODE / "windowkv").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(CODE).as_posix() for path in files}


def check_wheel(wheel: Path) -> None:
    """The package, its data and its types, and beside them metadata alone."""
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == packaged(), (names - metadata) ^ packaged()
    assert {"windowkv/py.typed", "windowkv/__init__.pyi"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in metadata), metadata


def check_source(archive: Path) -> None:
    """All that is needed to build, read and test it, and nothing that came about here."""
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/test_cli.py", "docs/architecture.md"}
    assert wanted <= names, wanted - names
    assert {f"src/{name}" for name in packaged()} <= names
    junk = [name for name in names if ".venv" in name or "__pycache__" in name or name.endswith((".pyc", ".cache"))]
    assert junk == [], junk


def check_installed(wheel: Path, dependencies: Path, folder: Path) -> None:
    """The command and the public names, from the wheel and from nowhere else."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel], check=True
    )
    (theirs,) = dependencies.resolve().glob("lib/python*/site-packages")
    # A path alone, so that the editable install there is not seen.
    (site / "dependencies.pth").write_text(f"{theirs}\n")

    def told(*command: str | Path) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout

    version = wheel.name.split("-")[1]
    assert told(folder / "bin" / "windowkv", "--version") == f"windowkv {version}\n"
    assert "Examples:" in told(folder / "bin" / "windowkv", "--help")
    used = told(python, "-c", "import windowkv; print(windowkv.__file__, windowkv.DynamicSlidingWindowCache.__name__)")
    file, name = used.split()
    assert Path(file).is_relative_to(site), file
    assert name == "DynamicSlidingWindowCache"
    eager = told(python, "-c", "import sys, windowkv; print(*(n for n in sys.modules if n.startswith('windowkv')))")
    assert set(eager.split()) == EAGER, eager


def main() -> None:
    """Check what lies in a folder."""
    folder, dependencies = map(Path, sys.argv[1:])
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_source(archive)
    with TemporaryDirectory() as temporary:
        check_installed(wheel.resolve(), dependencies, Path(temporary))
    print(f"{wheel.name} and {archive.name} are sound")


if __name__ == "__main__":
    main()
