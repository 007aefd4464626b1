"""Limits that the project set itself, held for every tracked file."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 65
MAX_KERNEL_LINES = 90
"""A device kernel is one function: what it calls is inlined by its compiler, or not allowed."""
MAX_MEAN_FUNCTION_LINES = 14


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def _source() -> list[Path]:
    return [path for path in _tracked("*.py") if "src" in path.relative_to(ROOT).parts]


def test_no_file_is_longer_than_a_reader_wants() -> None:
    files = _tracked("*.py", "*.cpp", "*.h", "*.sh")
    assert len(files) > 100
    long = {str(p): n for p in files if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions_are_short() -> None:
    sizes = [(size, path, name) for path in _source() for name, size in _functions(path)]
    for size, path, name in sizes:
        limit = MAX_KERNEL_LINES if "kernels" in path.parts else MAX_FUNCTION_LINES
        assert size <= limit, (str(path), name)
    assert sum(size > 50 for size, _, _ in sizes) < 0.01 * len(sizes)
    assert sum(size for size, _, _ in sizes) / len(sizes) <= MAX_MEAN_FUNCTION_LINES


def test_nothing_names_a_machine_or_uses_what_is_banned() -> None:
    machine = re.compile(r"(?<![\w./])/(work|farm|root)/")
    banned = re.compile(r"^\s*(import|from) (pickle|utils)\b|(?<![.\w])eval\(", re.MULTILINE)
    for path in _source():
        text = path.read_text()
        assert not machine.search(text), path
        found = [m.group() for m in banned.finditer(text)]
        assert not found, (path, found)


def test_every_distribution_is_licensed_and_typed() -> None:
    projects = _tracked("core/pyproject.toml", "backends/*/pyproject.toml")
    assert len(projects) >= 9
    for project in projects:
        assert 'license = "Apache-2.0"' in project.read_text(), project
        assert list(project.parent.glob("src/*/py.typed")), project
        assert (project.parent / "README.md").exists(), project


def test_the_readme_names_commands_that_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE))
    assert {"serve", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
