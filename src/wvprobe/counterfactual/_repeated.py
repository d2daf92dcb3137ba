"""One head of full width in the place of a block's heads, run once and over again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wvprobe import adapters
from wvprobe._effects import texts_or_prose
from wvprobe._validate import seed as checked_seed
from wvprobe.counterfactual._blocks import Layers, block_sets, measure_rewrites, told
from wvprobe.counterfactual._changes import ROUNDING, ChangeResult
from wvprobe.counterfactual._rewrites import full_width


class Schedule(NamedTuple):
    """How often the one head runs, and what part of its output is added each time."""

    name: str
    times: int
    step: float


@dataclass(frozen=True)
class RepeatedResult(ChangeResult):
    """What one head of full width does in the place of several, by how often it runs.

    Attributes:
        times: how often it runs in each setting, 0 for the rounding.
        steps: the part of its output that is added each time, 0 for the rounding.
        schedules: the schedule of each setting, "" for the rounding.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.repeated_head(model, texts, layers=[[1]])
        >>> len(found.times) == len(found.settings)
        True
    """

    times: tuple[int, ...]
    steps: tuple[float, ...]
    schedules: tuple[str, ...]

    def _columns(self) -> dict[str, list[Any]]:
        return {"times": list(self.times), "step": list(self.steps)}


def repeated_head(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    layers: Layers = "each",
    seed: int = 0,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> RepeatedResult:
    """Put one head of full width in the place of a block's h heads, run once or h times.

    Its scores are s = Σ_h s_h/√h, which keeps the variance that scores of independent heads have,
    s_h raw (ALiBi included), the sum through the model's soft cap, mask and window; its pattern is
    softmax(s), the same for all; its output Σ_h pattern · v_h W_O^h. It runs once, h times with
    step 1 and h times with step 1/h: x ← x + step · head(norm(x)). As in
    :func:`sequential_heads`, b_O counts once; a second norm on attention's output (Gemma-2) acts on
    each run's output, as it does on that of the heads.

    Args:
        model: a TransformerBridge.
        texts: the texts; None for the bundled held-out prose (some 5,600 tokens).
        layers: ``each`` changes every block alone, and all together; ``all`` only all together;
            ints are one set of blocks, sequences of ints a set each.
        seed: seed of the intervals.
        prepend_bos: as in the bridge's ``to_tokens``.
        progress: whether to show a bar.

    Returns:
        Every measure of :class:`ChangeResult`, a row for each set of blocks and schedule.

    Raises:
        InputError: no such block, or a text without tokens of its own.
        UnsupportedError: scores of this architecture are not read exactly; the message names why.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.repeated_head(model, texts, layers=[[1]])
        >>> found.settings[-1], bool((found.kl >= -1e-6).all())
        ('bf16 rounding', True)
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    sets, h = block_sets(arch, layers), arch.n_heads
    schedules = (
        Schedule("once", 1, 1.0),
        Schedule(f"{h} times, step 1", h, 1.0),
        Schedule(f"{h} times, step 1/{h}", h, 1.0 / h),
    )
    rows, rewrites = [], {}
    for schedule in schedules:
        for name, blocks in sets.items():
            rows.append((f"{name}, {schedule.name}", blocks, schedule))
            rewrites[f"{name}, {schedule.name}"] = {
                layer: full_width(model, arch, layer, schedule.times, schedule.step)
                for layer in blocks
            }
    given = texts_or_prose(texts)
    found = measure_rewrites(
        model, arch, given, rewrites, prepend_bos=prepend_bos, progress=progress
    )
    chosen = [list(blocks) for blocks in sets.values()]
    settings = {"texts": told(texts), "layers": chosen, "prepend_bos": prepend_bos}
    return RepeatedResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        **found._asdict(),
        settings=(*(name for name, _, _ in rows), ROUNDING),
        layers=(*(blocks for _, blocks, _ in rows), ()),
        times=(*(schedule.times for _, _, schedule in rows), 0),
        steps=(*(schedule.step for _, _, schedule in rows), 0.0),
        schedules=(*(schedule.name for _, _, schedule in rows), ""),
    )
