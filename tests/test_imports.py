"""Imports point one way; these tests walk the sources and hold the rules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_llama

ROOT = Path(__file__).parents[1]
BOOKKEEPING = ("block_pool", "block_table", "prefix_tree", "accounting", "sequence", "scheduler", "stats")
MAY_IMPORT_KERNELS = (
    "chatpage.engine.kv_cache",
    "chatpage.engine.attention",
    "chatpage.engine.fast_sampling",
    "chatpage.engine.model_runner",
    "chatpage.engine.models",
    "chatpage.cli",
    "chatpage.doctor",
    "chatpage.bench",
)


def _modules(folder: Path, package: str) -> dict[str, Path]:
    names = {}
    for path in (folder / package).rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


CHATPAGE = _modules(ROOT, "chatpage")
KERNELS = _modules(ROOT / "kernels", "chatpage_kernels")


@pytest.mark.parametrize("module", sorted(KERNELS))
def test_kernels_import_nothing_of_ours(module: str) -> None:
    assert not [name for name in _imports(KERNELS[module]) if _is_in(name, ("chatpage", "chatpage_ui"))]


@pytest.mark.parametrize("module", sorted(name for name in CHATPAGE if not _is_in(name, MAY_IMPORT_KERNELS)))
def test_only_what_computes_imports_kernels(module: str) -> None:
    assert not [name for name in _imports(CHATPAGE[module]) if _is_in(name, ("chatpage_kernels",))]


@pytest.mark.parametrize(
    ("package", "stranger"),
    [
        ("chatpage.engine", "chatpage.store"),
        ("chatpage.store", "chatpage.engine"),
        ("chatpage.engine", "chatpage.cli"),
        ("chatpage", "chatpage_ui"),
    ],
)
def test_layers_do_not_know_each_other(package: str, stranger: str) -> None:
    offenders = {
        module
        for module, path in CHATPAGE.items()
        if _is_in(module, (package,)) and any(_is_in(i, (stranger,)) for i in _imports(path))
    }
    assert offenders <= {"chatpage.cli", "chatpage.cli_serve"}


def _loaded_after(statement: str) -> set[str]:
    """Import in a fresh interpreter and return the top-level packages that came with it."""
    paths = [str(ROOT), str(ROOT / "kernels")]
    code = f"import sys; sys.path[:0] = {paths!r}; {statement}; print(*{{m.split('.')[0] for m in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout.split())


@pytest.mark.parametrize("module", BOOKKEEPING)
def test_bookkeeping_never_loads_torch(module: str) -> None:
    assert "torch" not in _loaded_after(f"import chatpage.engine.{module}")


def test_importing_chatpage_is_cheap() -> None:
    assert not {"torch", "transformers", "rich"} & _loaded_after("import chatpage")


def test_a_server_that_leaves_the_model_to_its_engine_never_loads_torch(tmp_path: Path) -> None:
    """torch and what transformers imports for it take seconds at each start, and 200 MB."""
    save_tiny_llama(tmp_path)
    load = f"from pathlib import Path; load_tokenizer(Path({str(tmp_path)!r}))"
    statement = f"import chatpage.server.serve; from chatpage.engine.models.tokenizer import load_tokenizer; {load}"
    assert "torch" not in _loaded_after(statement)


def test_the_kernels_folder_does_not_shadow_the_package_transformers_knows() -> None:
    """transformers imports a top-level `kernels`; from a checkout that name would be our folder."""
    _loaded_after("import os; os.environ['HF_HUB_OFFLINE'] = '1'; import transformers.integrations.hub_kernels")
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::ImportWarning",
            "-c",
            "import transformers.integrations.hub_kernels as h; print(h.__name__)",
        ],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.stdout.strip() == "transformers.integrations.hub_kernels"
