"""Every cell of the table in docs/attention.md: form x mask, each with all numbers of heads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosp_dtensor.graph import facts
from autosp_dtensor.place.masks import tiles
from tests import reference_attention
from tests.place.attention_table import FORMS, HEADS, MASKS, Model, has, inputs
from tests.place.varlen import flash_attn_here
from tests.simulate import assert_program_equals_whole

__all__ = ["flash_attn_here"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attention.md").read_text()
CELLS = [(form, mask) for form in FORMS for mask in MASKS if has(form, mask)]


@pytest.fixture(autouse=True)
def flash_and_small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "TILE", 4)
    with reference_attention.references_here():
        yield


@pytest.mark.parametrize(
    ("form", "mask", "heads"),
    [
        (*cell, heads)
        for cell in CELLS
        for heads, (count, kv, _) in HEADS.items()
        if count == kv or cell[0] != "MultiheadAttention"
    ],
)
def test_cell(form: str, mask: str, heads: str) -> None:
    count, kv, n = HEADS[heads]
    model, reference = (Model(form, mask, count, kv, each) for each in (False, True))
    assert_program_equals_whole(model, inputs(mask, count), n, reference=reference)


def rows() -> dict[str, list[str]]:
    """The page's table: form -> its cells, in the order of the head line."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    first = next(at for at, row in enumerate(cells) if row[0] == "mask")
    assert cells[first][1:] == [*FORMS, "kernel"]
    return {row[0]: row[1:] for row in cells[first + 2 : first + 2 + len(MASKS)]}


def test_page_names_every_cell_and_no_other() -> None:
    table = rows()
    assert list(table) == list(MASKS)
    for mask, cells in table.items():
        want = [f"{form}-{mask}" if has(form, mask) else "-" for form in FORMS]
        assert cells[:-1] == want


def test_page_names_every_number_of_heads_and_a_test_to_paste() -> None:
    """A cell of the page and one of its heads, joined, are the id of a test, and of each test."""
    heads = re.findall(r"`(\d+/\d+ on \d+)`", PAGE)
    assert heads == list(HEADS)
    (mark,) = [each for each in vars(test_cell)["pytestmark"] if each.name == "parametrize"]
    ids = {"-".join(given) for given in mark.args[1]}
    equal = [each for each in heads if len(set(each.partition(" ")[0].split("/"))) == 1]
    cells = {
        cell: cell.startswith("MultiheadAttention") for row in rows().values() for cell in row[:-1]
    }
    assert ids == {
        f"{cell}-{each}"
        for cell, alike in cells.items()
        if cell != "-"
        for each in (equal if alike else heads)
    }
    (pasted,) = re.findall(
        r"^pytest \"tests/place/test_attention_table.py::test_cell\[(.*)\]\"$", PAGE, re.M
    )
    assert pasted in ids


@pytest.mark.parametrize("mask", MASKS)
def test_page_names_the_kernel_of_each_mask(flash_attn_here: list[object], mask: str) -> None:
    """Where flash-attn can run, for scaled_dot_product_attention."""
    program = assert_program_equals_whole(
        Model("sdpa", mask, 4, 4), inputs(mask, 4), 2, reference=Model("sdpa", mask, 4, 4, True)
    )
    (note,) = {facts(node).note for node in program.nodes() if facts(node).note}
    kernel, _, _ = note.partition(":")
    if kernel.startswith("flash-attn"):
        data = "" if note.endswith("proved") else ", by data"
        kernel = f"flash-attn{data}" if flash_attn_here else "tiles"
    assert rows()[mask][-1] == ("sdpa, is_causal" if "causal" in note else kernel)


def test_page_names_tests_that_exist() -> None:
    """A name is the file's, then `::`, then the function's; a cell of the table is test_cell's."""
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", PAGE)
    assert len(named) > 20
    for file, function in named:
        source = (ROOT / file).read_text()
        assert not function or f"def {function}(" in source, f"{file}::{function}"
