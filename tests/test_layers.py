"""The order of the stages, the size of files, and where private torch names may stand: read with
`ast`, so that no file can drift."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import autosp_dtensor

PACKAGE = Path(autosp_dtensor.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# What comes later may import what comes earlier, never the other way round.
ORDER = [
    "source", "errors", "placement", "autocast", "closures", "tree", "graph", "cost", "_torch",
    "lazy_dtensor", "mesh", "capture", "place", "lower", "checkpoint", "run", "explain", "check",
    "api", "plan", "__init__", "__main__",
]  # fmt: skip


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def top(module: str) -> str:
    return module.split(".")[0] or "__init__"


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module inside the package) of every import of the package's own."""
    here = list(file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE.name:
                    yield node.lineno, alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level + 1]
            elif (node.module or "").split(".")[0] == PACKAGE.name:
                base = []
            else:
                continue
            inner = (node.module or "").split(".") if node.module else []
            if not node.level:
                inner = inner[1:]
            for alias in node.names:
                full = [*base, *inner]
                yield node.lineno, ".".join(full if full else [alias.name])


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_stage_imports_only_what_comes_before_it(file: Path) -> None:
    own = top(name_of(file))
    assert own in ORDER, f"{own} has no place in the order of stages"
    for line, module in imports(file):
        other = top(module)
        assert other in ORDER, f"{file.name}:{line} imports {module}"
        if other != own:
            assert ORDER.index(other) < ORDER.index(own), f"{file.name}:{line} imports {module}"


def test_order_names_what_exists() -> None:
    there = {top(name_of(file)) for file in FILES}
    assert set(ORDER) == there


def private(file: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of every name of torch that starts with one underscore."""
    tree = ast.parse(file.read_text())
    roots = {"torch"}
    for line, name, bound in _torch_imports(tree):
        roots.add(bound)
        yield from _hidden(line, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name) and top(name) in roots:
                yield from _hidden(node.lineno, name)


def _torch_imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, full name, name it is bound to)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if top(alias.name) == "torch":
                    yield node.lineno, alias.name, alias.asname or "torch"
        elif isinstance(node, ast.ImportFrom) and top(node.module or "") == "torch":
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", alias.asname or alias.name


def _hidden(line: int, name: str) -> Iterator[tuple[int, str]]:
    # torch.ops.aten._to_copy is the public name of an operator whose own name begins so.
    if name.startswith("torch.ops."):
        return
    if any(re.match(r"_[^_]", part) for part in name.split(".")[1:]):
        yield line, name


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "_torch.py"], ids=name_of)
def test_private_torch_names_stand_in_one_file(file: Path) -> None:
    assert list(private(file)) == []


def test_private_torch_names_would_be_seen(tmp_path: Path) -> None:
    code = (
        "import torch\nimport torch._dynamo\nfrom torch import _C\n"
        "from torch.nn._reduction import x\nfrom torch import nn\ntorch._C.x\n"
        "torch.nn._reduction.y\nnn._z\ntorch.ops.aten._copy\n"
    )
    (tmp_path / "file.py").write_text(code)
    assert {line for line, _ in private(tmp_path / "file.py")} == {2, 3, 4, 6, 7, 8}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_file_can_be_read_at_one_sitting(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_file_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text()))


_FAMILIES = re.compile(
    r"llama|gpt|qwen|gemma|mistral|mixtral|\bphi\d?\b|olmo|neox|falcon|deepseek|transformers", re.I
)


# Libraries' kernels by their dotted paths; models' sizes by name.
_MAY_NAME = {
    PACKAGE / "capture" / "flash.py",
    PACKAGE / "plan" / "configs.py",
    PACKAGE / "__main__.py",
}


@pytest.mark.parametrize("file", [f for f in FILES if f not in _MAY_NAME], ids=name_of)
def test_no_code_knows_a_model(file: Path) -> None:
    """Outside of comments and docstrings: what serves one family by name serves no other."""
    source = file.read_text()
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.start[0] not in documented:
            assert not _FAMILIES.search(token.string), f"{file.name}:{token.start[0]}"


def test_public_names_are_few_and_all_there() -> None:
    assert len(autosp_dtensor.__all__) <= 14
    assert sorted(autosp_dtensor.__all__) == list(autosp_dtensor.__all__)
    for name in autosp_dtensor.__all__:
        assert getattr(autosp_dtensor, name).__doc__, name


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("stage", ["capture", "place", "lower", "checkpoint", "run", "plan"])
def test_stage_has_a_short_readme_that_names_its_files(stage: str) -> None:
    text = (PACKAGE / stage / "README.md").read_text()
    assert len(text.splitlines()) <= 40
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    for inner in re.findall(r"`([\w/]+)/README.md`", text):  # a part with a list of its own
        own = (PACKAGE / stage / inner / "README.md").read_text()
        assert len(own.splitlines()) <= 40
        named |= {f"{inner}/{name}" for name in re.findall(r"`([\w/]+\.py)`", own)}
    there = {f.relative_to(PACKAGE / stage).as_posix() for f in (PACKAGE / stage).rglob("*.py")}
    missing = {f for f in there if not f.endswith("__init__.py")} - named
    assert not missing, f"not in {stage}/README.md: {sorted(missing)}"
    assert {f for f in named if not f.startswith("..")} <= there | {"__init__.py"}


def test_rank_is_asked_for_in_run_alone() -> None:
    """Programs built on different ranks must be the same. (mesh.py tells a sampler which rows are
    its own.)"""
    asks = re.compile(r"get_rank|get_local_rank|get_coordinate|get_group_rank")
    found = {
        name_of(file) for file in FILES if asks.search(file.read_text())
    } - {"mesh"}  # fmt: skip
    assert all(top(name) == "run" for name in found), found


def test_nothing_prints_or_reads_the_environment() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(
                node.func, ast.Name) else ""  # fmt: skip
            assert name != "print", f"{file.name}:{node.lineno} prints"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv"), f"{file.name}:{node.lineno}"
