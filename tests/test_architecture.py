"""The import arrows and the house rules that a machine can hold."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "stage1_extract", "stage2_train")
FORBIDDEN = {
    "shared": {"stage1_extract", "stage2_train"},
    "stage1_extract": {"stage2_train"},
    "stage2_train": {"stage1_extract"},
}


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_stages_do_not_import_each_other_and_shared_imports_neither(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not imports_of(path) & FORBIDDEN[package], path


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_unpickles(package):
    for path in (ROOT / package).rglob("*.py"):
        text = path.read_text()
        assert not imports_of(path) & {"pickle", "dill", "joblib"}, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"


def test_no_target_in_yaml():
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path
