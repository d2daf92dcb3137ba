"""The drawing of docs/architecture.md shows the code's imports, and its table names all rooms."""

import importlib.util
import re

import pytest
from test_layout import INNER_IMPORTS, LEVELS, SOURCE

REPOSITORY = SOURCE.parents[1]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
IMPORTS = {(i.module, target) for i, target in INNER_IMPORTS}


@pytest.fixture(scope="module")
def drawing():
    path = REPOSITORY / "docs" / "tools" / "drawing.py"
    spec = importlib.util.spec_from_file_location("drawing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_stands_in_one_box_of_its_level(drawing):
    for level, modules in LEVELS.items():
        boxed = [module for names in drawing.BOXES[level].values() for module in names]
        assert sorted(boxed) == (sorted(modules) if level else [])  # all else is ground


def test_picture_is_what_the_imports_make_of_it(drawing):
    """After a change of imports: python docs/tools/drawing.py, and look at it."""
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.drawn(IMPORTS)


def test_a_new_import_would_change_the_picture(drawing):
    assert drawing.drawn({*IMPORTS, ("_kernels", "store")}) != drawing.drawn(IMPORTS)


def test_lines_are_the_imports_without_those_that_follow(drawing):
    found = {("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")}
    assert drawing.reduced(found) == {("a", "b"), ("b", "c"), ("c", "d")}
    with pytest.raises(ValueError, match="in a circle"):
        drawing.reduced({("a", "b"), ("b", "c"), ("c", "a")})


def test_table_names_every_module_on_its_level():
    level, named = None, {n: set() for n in LEVELS}
    for row in re.findall(r"^\| *(\d?) *\| (`[^|]+) \|", PAGE, flags=re.MULTILINE):
        level = int(row[0]) if row[0] else level
        if level is not None:
            named[level] |= {name.strip("`/") for name in row[1].split(", ")}
    assert named == {n: set(modules) for n, modules in LEVELS.items()}
