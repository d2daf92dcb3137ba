"""Mutants of wvprobe's numeric modules: what mutmut's operators make of each expression.

A mutant is a change of one expression inside a function. Left out before any is drawn: docstrings,
annotations, decorators; all that only words an error, a warning, a progress bar or a provenance;
strings that hold a space, which are prose; and, as in mutmut, `len(...)` and `isinstance(...)`.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

SOURCES = Path(__file__).parents[2] / "src" / "wvprobe"

# By module: sources below src/wvprobe, and the test files that are its own.
MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "circuits": (
        ("circuits", "heads/_circuits", "_factors", "_products", "_linalg"),
        (
            *("circuits", "heads", "products", "linalg", "singular", "copying", "subspaces"),
            *("latent", "lengths", "positions"),  # these test heads/_circuits, too
        ),
    ),
    "compose": (
        ("compose", "_circuit_ends", "_metric", "_statistics"),
        (
            *("compose", "subspaces", "statistics"),
            "singular",  # a metric on both sides, which composition has not
            *("behaviour_agreement", "dependency_heads"),  # the rest of _statistics
        ),
    ),
    "ledger": (
        ("ledger/_terms", "ledger/_removal", "ledger/_checks", "_score_parts"),
        ("ledger", "ledger_checks"),
    ),
    "probes": (
        tuple(
            f"probes/{name}"
            for name in (
                *("closed_forms", "logistic", "fitting", "features", "folds", "online"),
                *("scores", "permutation", "references", "reference_scores"),
            )
        ),
        ("probes", "probe_references", "store_probes"),
    ),
    "contextual_drift": (
        tuple(
            f"contextual_drift/{name}"
            for name in (
                *("_measures", "_vectors", "_corrections", "_baseline", "_laws", "_growth"),
                *("_layers", "_scores", "_pair", "_corpus", "_kept", "_held_out"),
                *("_drivers", "_driver_looks", "_driver_pairs", "_driver_swaps"),
            )
        ),
        (
            *("contextual_drift", "corpus_drift", "growth_law", "layer_similarity"),
            *("drift_drivers", "senses_apart", "store_measures"),
        ),
    ),
}

_NEVER = {"__getattribute__", "__setattr__", "__new__", "__repr__"}
# Calls whose arguments are words for a reader, or what a result is labelled with.
_WORDS = {
    "message",
    "provenance",
    "provenance_of",
    "warn",
    "progress",
    "progress_bar",
    "deprecated",
}
_KEPT = {"len", "isinstance"}

# What mostly ends in an error: an argument or a value becomes None, or an argument is dropped.
BLUNT = {"arg_removal", "assignment", "dict_arguments"}


class Mutant(NamedTuple):
    """One change of one expression.

    Attributes:
        name: file:line:column operator/place, by which it is found again.
        file: source below src/wvprobe, without its suffix.
        function: qualified name of the outermost function that holds it.
        lines: first and last line of the changed expression, and the first of its statement.
        operator: mutmut's name of the change.
        before: the expression as it stands.
        after: what it becomes.
        code: the whole file with it.
    """

    name: str
    file: str
    function: str
    lines: tuple[int, int, int]
    operator: str
    before: str
    after: str
    code: str


def sample(module: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of a module without replacement.

    Three in eight change an argument to None or drop it, or assign None: most of those end in an
    error that any test sees. The others change a value, an operator or a condition.
    """
    found = mutants_of_all(module)
    random.Random(f"{seed} {module}").shuffle(found)
    blunt = count * 3 // 8
    chosen = [mutant for mutant in found if mutant.operator in BLUNT][:blunt]
    return chosen + [mutant for mutant in found if mutant.operator not in BLUNT][: count - blunt]


def mutants_of_all(module: str) -> list[Mutant]:
    """Make every mutant of a module."""
    return [mutant for file in MODULES[module][0] for mutant in mutants_of(file)]


def mutants_of(file: str) -> Iterator[Mutant]:
    """Make every mutant of a file, in the order of its text."""
    text = (SOURCES / f"{file}.py").read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(text))
    visitor = _Places()
    wrapper.visit(visitor)
    original = ast.dump(ast.parse(text))
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for place in visitor.places:
        first, last = (starts[line - 1] + column for line, column in (place.start, place.end))
        for number, (operator, changed) in enumerate(place.changes):
            after = wrapper.module.code_for_node(changed)
            code = text[:first] + after + text[last:]
            try:
                differs = ast.dump(ast.parse(code)) != original
            except SyntaxError:
                continue
            if differs:
                line, column = place.start
                span = (line, place.end[0], place.statement)
                name = f"{file}:{line}:{column} {operator}/{number}"
                before = text[first:last]
                yield Mutant(name, file, place.function, span, operator, before, after, code)


class _Place(NamedTuple):
    start: tuple[int, int]
    end: tuple[int, int]
    statement: int
    function: str
    changes: list[tuple[str, cst.CSTNode]]


class _Places(cst.CSTVisitor):
    """Collects what each node inside a function may become."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.places: list[_Place] = []
        self._names: list[str] = []  # classes around, then the outermost function
        self._depth = 0  # functions around
        self._statements: list[int] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Raise)) or _is_prose(node):
            return False
        if isinstance(node, cst.FunctionDef) and node.name.value in _NEVER:
            return False
        if isinstance(node, (cst.BaseCompoundStatement, cst.SimpleStatementLine)):
            self._statements.append(self._line_that_runs(node))
        if isinstance(node, cst.FunctionDef):
            if not self._depth:
                self._names.append(node.name.value)
            self._depth += 1
        elif isinstance(node, cst.ClassDef) and not self._depth:
            self._names.append(node.name.value)
        elif self._depth:
            self._collect(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, (cst.BaseCompoundStatement, cst.SimpleStatementLine)):
            self._statements.pop()
        if isinstance(original_node, cst.FunctionDef):
            self._depth -= 1
        if isinstance(original_node, (cst.FunctionDef, cst.ClassDef)) and not self._depth:
            self._names.pop()

    def _line_that_runs(self, node: cst.CSTNode) -> int:
        """Return a statement's first line; of a function, whose defaults it bears, one within."""
        if isinstance(node, cst.FunctionDef):
            node = node.body.body[-1]
        return self.get_metadata(PositionProvider, node).start.line

    def _collect(self, node: cst.CSTNode) -> None:
        changes = [
            (operator.__name__.removeprefix("operator_"), changed)
            for kind, operator in mutation_operators
            if isinstance(node, kind)
            for changed in operator(node)
        ]
        if changes:
            at = self.get_metadata(PositionProvider, node)
            self.places.append(
                _Place(
                    (at.start.line, at.start.column),
                    (at.end.line, at.end.column),
                    self._statements[-1],
                    ".".join(self._names),
                    changes,
                )
            )


def _is_prose(node: cst.CSTNode) -> bool:
    """Whether a node only words something, or is a call that mutmut leaves alone."""
    if isinstance(node, cst.Call):
        called = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        name = called.value if isinstance(called, cst.Name) else ""
        owner = node.func.value if isinstance(node.func, cst.Attribute) else None
        return (
            name in _WORDS
            or (isinstance(node.func, cst.Name) and name in _KEPT)
            or (isinstance(owner, cst.Name) and owner.value == "Provenance")
        )
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString)):
        return isinstance(node, cst.FormattedString) or " " in _text(node)
    return False


def _text(node: cst.CSTNode) -> str:
    value = getattr(node, "evaluated_value", None)
    return value if isinstance(value, str) else " "
