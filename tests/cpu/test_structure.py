"""Imports point one way, and an installed wheel is whole."""

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("gkd", "embed", "serve", "decode")

# What each package may import of ours. The two `main` modules are where an engine and serve meet.
ALLOWED: dict[str, set[str]] = {
    "gkd": {"gkd"},
    "embed": {"embed", "gkd"},
    "decode": {"decode", "gkd"},
    "serve": {"serve"},
    "embed.main": {"embed", "gkd", "serve"},
    "decode.main": {"decode", "gkd", "serve"},
}

# The only modules that may import these.
ONLY_IN = {"cuda.bindings.driver": "gkd.driver", "cuda.bindings.nvrtc": "gkd.compiler"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.parse(path.read_text())


def imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("name", "module"), [pytest.param(*module, id=module[0]) for module in modules()])
def test_imports_point_one_way(name: str, module: ast.Module) -> None:
    allowed = ALLOWED.get(name, ALLOWED[name.partition(".")[0]])
    for imported in imports(module):
        top = imported.partition(".")[0]
        assert top not in OURS or top in allowed, f"{name} imports {imported}"
        assert ONLY_IN.get(imported, name) == name, f"{name} imports {imported}"
        assert top not in {"torch", "transformers", "sentence_transformers"}, f"{name} imports {imported}"


def test_text_starts_without_an_http_server() -> None:
    code = "import sys, embed.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"uvicorn", "starlette", "asyncio"} & set(loaded)


def test_an_installed_wheel_works_without_the_checkout(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(pip, check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    kernels = {path.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*") if path.is_file()}
    assert kernels and all((tmp_path / "site" / "gkd" / path).is_file() for path in kernels)
    assert {path.name for path in (tmp_path / "site").iterdir() if path.is_dir()} == {
        "gkd",
        "embed",
        "serve",
        "gkd_engines-0.1.0.dist-info",
    }
    code = "import embed, gkd, serve.app; print(embed.__file__); print(embed.Embed.open('minilm').encode('a').shape)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == [str(tmp_path / "site" / "embed" / "__init__.py"), "(384,)"]
