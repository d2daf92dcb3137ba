"""The house rules: who may import whom, and a root that is lazy and complete."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import wvprobe

SOURCE = Path(__file__).parent.parent / "src" / "wvprobe"

# docs/architecture.md says what lives on each level. A package counts as one module. On the ground
# floor a module may import those named before it; above, a level's modules do without each other.
LEVELS = {
    0: (
        *("errors", "_validate", "_shapes", "_types", "_threads", "_decompositions"),
        *("_linalg", "_metric", "_extremes"),
        *("_products", "_rotary", "_masks", "_statistics", "_shards", "_progress", "_spelling"),
        "_word_places",
        "_picking",
        "_shapley",
    ),
    1: (
        *("adapters", "words", "datasets", "circuits", "store"),
        *("_tokenizers", "_induction", "_reading", "_single_tokens"),
    ),
    2: (
        *("activations", "heads", "testing", "_packaged"),
        "labelled",
        *("_targets", "_writes", "_equal_texts"),
    ),
    3: (
        "_sinks",
        "_effects",
        "_kernels",
        "_told_apart",
        "components",
        "_score_parts",
        "_factors",
        "_token_rows",
        "_logit_effects",
        *("_swaps", "_paths"),
        "_circuit_ends",
        "_identities",
        "auditing",
        "models",
        *("_pair_cells", "_cell_effects"),
    ),
    4: (
        *("word_pairs", "contextual_drift", "influence", "sense_maps", "budget"),
        *("attention_clock",),
        *("capturing", "sweeping"),
        *("singular", "offsets", "inputs", "vocabulary", "copying", "compose", "subspaces"),
        *("ledger", "context_shares"),
        *("flow", "exchanges", "dissociation"),
        "pair_variance",
        "behaviour",
        "probes",
        "value_payload",
        "counterfactual",
    ),
    5: ("plotting", "report"),
    6: ("cli",),
}
RANK = {
    module: (level, place if level == 0 else 0)
    for level, modules in LEVELS.items()
    for place, module in enumerate(modules)
}
TOP = (99, 0)  # whatever is not on a level; another test names it

# Imports that do not point to a lower level, each with its reason.
ALLOWED = {
    ("_types", "plotting"): "Result.figure() looks its plotter up late, when it is called",
    ("report", "plotting"): "the page carries plotly's script beside the figures",
    ("_identities", "components"): "an audit carries components through norms as they are carried",
    ("_logit_effects", "components"): "what the embedding wrote is taken apart as in a stream",
    ("_circuit_ends", "_factors"): "ends of circuits are made of their factors",
    ("auditing", "_identities"): "the checks of an audit fill a room of their own",
    ("value_payload", "probes"): "what values carry is measured by probes",
    ("counterfactual", "compose"): "what heads do to each other is held against composition",
    ("models", "auditing"): "load() ends with a quick audit of what it loaded",
}

# Package -> the one module that may import it.
SOLE_IMPORTERS = {
    "sklearn": "probes",
    "plotly": "plotting",
    "transformer_lens": "adapters",
    "conllu": "datasets",
    "pyarrow": "store",
    "ray": "capturing",
    "joblib": "sweeping",
}


class Import(NamedTuple):
    """One imported name: who imports what where, and whether for type checkers alone."""

    module: str
    imported: str
    place: str
    typing_only: bool


def module_of(path: Path) -> str:
    """Return the module on LEVELS that a source file belongs to ('' for the root itself)."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def nodes(tree: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below `tree`, and whether only type checkers ever reach it."""
    yield tree, typing_only
    if is_type_checking(tree):
        for child in tree.body:
            yield from nodes(child, True)
        for child in tree.orelse:
            yield from nodes(child, typing_only)
    else:
        for child in ast.iter_child_nodes(tree):
            yield from nodes(child, typing_only)


def imported_names(node: ast.AST, package: list[str]) -> list[str]:
    """Return the dotted names that a node imports; relative ones are resolved in `package`."""
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            above = package[: len(package) - level + 1] if level else []
            base = ".".join([*above, *([module] if module else [])])
            # `from wvprobe import heads` imports a module, `from wvprobe.heads import X` too.
            return [f"{base}.{name.name}" for name in names]
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
            function
        ).endswith(("import_module", "__import__")):
            return [name]
    return []


def imports_of(path: Path) -> list[Import]:
    package = ["wvprobe", *path.relative_to(SOURCE).parent.parts]
    return [
        Import(module_of(path), name, f"{path.name}:{node.lineno}", typing_only)
        for node, typing_only in nodes(parsed(path))
        for name in imported_names(node, package)
    ]


ALL_IMPORTS = [imported for path in sources() for imported in imports_of(path)]
# The root is left out: it looks names up on every level, which is what it is for.
INNER_IMPORTS = [
    (i, i.imported.partition(".")[2].partition(".")[0])
    for i in ALL_IMPORTS
    if i.imported.partition(".")[0] == "wvprobe" and i.module
]


def test_every_module_has_a_level():
    assert {module_of(path) for path in sources()} - {""} == set(RANK)


def test_imports_point_to_lower_levels():
    assert INNER_IMPORTS
    wrong = {
        f"{i.place} imports {target or 'the root'}"
        for i, target in INNER_IMPORTS
        if target != i.module
        and (i.module, target) not in ALLOWED
        and not RANK.get(target, TOP) < RANK.get(i.module, TOP)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_exceptions_are_used():
    used = {(i.module, target) for i, target in INNER_IMPORTS}
    assert set(ALLOWED) <= used, "an exception that nothing needs any more"


def test_only_one_module_imports_each_of_these_packages():
    wrong = [
        f"{i.place} imports {i.imported}"
        for i in ALL_IMPORTS
        if not i.typing_only and SOLE_IMPORTERS.get(i.imported.split(".")[0], i.module) != i.module
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_source_has_no_assert_and_no_deferred_annotations(path):
    for node, _ in nodes(parsed(path)):
        if isinstance(node, ast.Assert):
            # `python -O` drops them: what a user can cause is an error of wvprobe.errors.
            assert module_of(path) == "testing", f"assert in {path.name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            # Deferred annotations would hide the shapes from the run-time checker.
            assert node.module != "__future__", f"__future__ in {path.name}:{node.lineno}"


def test_no_submodule_shadows_a_root_name():
    for path in sources():
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for name in wvprobe.__all__:
        value = getattr(wvprobe, name)
        assert callable(value) or name == "__version__", f"wvprobe.{name} is {value!r}"


def test_root_says_the_same_thing_twice():
    """The lazy table serves Python, the imports under TYPE_CHECKING serve type checkers."""
    for_checkers = {
        i.imported: f"wvprobe.{wvprobe._HOMES.get(i.imported.rpartition('.')[2])}"
        for i in imports_of(SOURCE / "__init__.py")
        if i.typing_only
    }
    assert {name.rpartition(".")[2] for name in for_checkers} == set(wvprobe._HOMES)
    assert all(name.rpartition(".")[0] == home for name, home in for_checkers.items())
    assert set(wvprobe.__all__) <= set(dir(wvprobe))


def test_root_refuses_what_it_does_not_have():
    with pytest.raises(AttributeError, match="no attribute 'head_weights'"):
        _ = wvprobe.head_weights


def test_importing_the_root_is_quick_and_loads_no_torch():
    script = (
        "import json, sys, time; start = time.perf_counter(); import wvprobe; "
        "print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(run.stdout)
    assert seconds < 0.3  # some milliseconds on an idle machine
    assert not {"torch", "numpy", "pandas", "transformers"} & set(modules)
