"""Draws docs/images/architecture.svg from the code's own imports: `python docs/tools/drawing.py`.

Boxes are groups of modules on their levels; a line means that some module of the upper box imports
one of the lower. Lines that follow from others are left out (transitive reduction). Levels and
imports are those that tests/test_layout.py reads from the code, and tests/test_architecture.py
holds the picture against what this file makes of them.
"""

import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PICTURE = REPOSITORY / "docs" / "images" / "architecture.svg"

GROUND = "ground"
GROUND_SAYS = (
    "errors and checks, results, linear algebra, rotations, masks, statistics, spelling, …"
)

# Level -> box -> its modules. Every module of tests/test_layout.py's LEVELS stands in one box.
BOXES: dict[int, dict[str, tuple[str, ...]]] = {
    6: {"command line": ("cli",)},
    5: {"figures": ("plotting",), "report": ("report",)},
    4: {
        "weights": (
            *("singular", "offsets", "inputs", "vocabulary", "copying", "compose", "subspaces"),
        ),
        "scores": ("word_pairs", "ledger", "context_shares", "pair_variance"),
        "behaviour": ("behaviour", "flow", "exchanges", "dissociation", "influence"),
        "drift": ("contextual_drift", "sense_maps"),
        "probes": ("probes", "value_payload"),
        "counterfactual": ("counterfactual",),
        "budgets": ("budget", "attention_clock"),
        "many": ("capturing", "sweeping"),
    },
    3: {
        "circuit ends": ("_factors", "_circuit_ends", "_token_rows"),
        "parts of scores": ("_score_parts", "_sinks", "_pair_cells", "_cell_effects"),
        "exchanges": ("_swaps", "_paths"),
        "streams": ("components", "_logit_effects", "_told_apart"),
        "models, audits": ("models", "auditing", "_identities"),
        "effects": ("_effects",),
        "kernels": ("_kernels",),
    },
    2: {
        "heads": ("heads", "_writes"),
        "activations": ("activations",),
        "places": ("labelled", "_targets", "_equal_texts"),
        "small and packaged": ("testing", "_packaged"),
    },
    1: {
        "circuits": ("circuits",),
        "adapters": ("adapters",),
        "words": ("words", "_single_tokens"),
        "labelled text": ("datasets",),
        "store": ("store",),
        "checkpoints": ("_reading", "_tokenizers", "_induction"),
    },
    0: {GROUND: ()},  # all else
}

WIDTH, BAND, GAP, TOP = 1180, 118, 14, 30
BOX_HEIGHT, LEFT = 64, 46
STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1b2440; }
  .box { fill: #ffffff; stroke: #3f51b5; stroke-width: 1.2; }
  .band { fill: #eef0f9; }
  .name { font-size: 13px; font-weight: 600; }
  .modules { font-size: 9.5px; fill: #4a5578; }
  .level { font-size: 12px; fill: #6b7599; }
  .line { stroke: #7986cb; stroke-width: 1.1; fill: none; opacity: .75; }
"""


def box_of() -> dict[str, str]:
    """Return module -> its box, but for the ground's."""
    return {
        module: name
        for boxes in BOXES.values()
        for name, modules in boxes.items()
        for module in modules
    }


def edges(imports: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return which boxes import which others; `imports` are pairs of modules."""
    place = box_of()
    found = {(place.get(a, GROUND), place.get(b, GROUND)) for a, b in imports}
    # A result looks its figure up when asked (an exception that architecture.md names).
    return {(a, b) for a, b in found if a != b and (a, b) != (GROUND, "figures")}


def reduced(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges that do not follow from others; there must be no circle."""
    below: dict[str, set[str]] = {}

    def reach(name: str, path: tuple[str, ...] = ()) -> set[str]:
        if name in path:
            raise ValueError(f"boxes import each other in a circle: {' → '.join((*path, name))}")
        if name not in below:
            direct = {b for a, b in found if a == name}
            below[name] = direct.union(*(reach(b, (*path, name)) for b in direct))
        return below[name]

    for name in {a for a, _ in found}:
        reach(name)
    return {
        (a, b)
        for a, b in found
        if not any(b in below.get(c, set()) for x, c in found if x == a and c != b)
    }


def places() -> Mapping[str, tuple[float, float, float]]:
    """Return box -> left, top, width."""
    found = {}
    for row, boxes in enumerate(BOXES.values()):
        sizes = {
            name: max(1.0 + 0.22 * min(len(modules), 4), 0.11 * len(name))
            for name, modules in boxes.items()
        }
        room = WIDTH - LEFT - GAP * (len(boxes) + 1)
        left = LEFT + GAP
        for name, size in sizes.items():
            width = room * size / sum(sizes.values())
            found[name] = (left, TOP + row * BAND, width)
            left += width + GAP
    return found


def label(modules: tuple[str, ...], width: float) -> list[str]:
    """Return the modules' names in at most three lines that fit."""
    most, lines, line = int(width / 5.2), [], ""
    for module in modules:
        if line and len(line) + 2 + len(module) > most:
            lines.append(line + ",")
            line = module
        else:
            line = f"{line}, {module}" if line else module
    lines.append(line)
    return lines if len(lines) <= 3 else [*lines[:2], f"{lines[2].rstrip(',')} …"]


def drawn(imports: Iterable[tuple[str, str]]) -> str:
    """Return the picture."""
    at = places()
    height = TOP + BAND * len(BOXES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Levels of wvprobe: lines are imports, and all of them point downwards</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for row, level in enumerate(BOXES):
        y = TOP + row * BAND - 12
        parts.append(
            f'<rect class="band" x="8" y="{y}" width="{WIDTH - 16}" height="{BOX_HEIGHT + 24}"/>'
        )
        parts.append(f'<text class="level" x="22" y="{y + 49}">{level}</text>')
    for upper, lower in sorted(reduced(edges(imports))):
        (x1, y1, w1), (x2, y2, w2) = at[upper], at[lower]
        x1, y1, x2 = x1 + w1 / 2, y1 + BOX_HEIGHT, x2 + w2 / 2
        if y2 < y1:  # boxes of one level: an arc below them
            y2 = y1
            parts.append(
                f'<path class="line" d="M{x1:.0f} {y1} C{x1:.0f} {y1 + 22} {x2:.0f} {y1 + 22} '
                f'{x2:.0f} {y2}"/>'
            )
            continue
        middle = (y1 + y2) / 2
        parts.append(
            f'<path class="line" d="M{x1:.0f} {y1} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} '
            f'{x2:.0f} {y2}"/>'
        )
    for boxes in BOXES.values():
        for name, modules in boxes.items():
            x, y, width = at[name]
            parts.append(
                f'<rect class="box" x="{x:.0f}" y="{y}" width="{width:.0f}" '
                f'height="{BOX_HEIGHT}" rx="5"/>'
            )
            parts.append(f'<text class="name" x="{x + 8:.0f}" y="{y + 18}">{escape(name)}</text>')
            for line, text in enumerate(label(modules, width) if modules else [GROUND_SAYS]):
                parts.append(
                    f'<text class="modules" x="{x + 8:.0f}" y="{y + 33 + 12 * line}">'
                    f"{escape(text)}</text>"
                )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from test_layout import INNER_IMPORTS

    PICTURE.write_text(drawn({(i.module, target) for i, target in INNER_IMPORTS}), encoding="utf-8")
