"""What heads carry over texts, a layer of a batch at a time, so that nothing is kept but sums."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from wvprobe import adapters
from wvprobe._progress import progress as progress_bar
from wvprobe._validate import message
from wvprobe._validate import texts as checked_texts
from wvprobe.activations import batches_of, padded
from wvprobe.adapters import Architecture, Raw, Recipe
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError
from wvprobe.words import encode

Add = Callable[[int, Mapping[str, Tensor], Bool[Tensor, "text pos"]], None]


def calibration_texts(
    model: Any, arch: Architecture, given: str | Sequence[str] | None, *, least: int = 1
) -> tuple[str, ...]:
    """Return the texts given, or the paragraphs of the bundled calibration prose that fit.

    Raises:
        InputError: the texts have fewer tokens than `least` times a head's dimensions. Moments of
            fewer than there are dimensions leave some open, and what is cut of a head then hangs
            on the rounding.
    """
    if given is not None:
        found = tuple(checked_texts(given))
        needed = least * max(arch.d_head, arch.d_head_v)
        count = sum(len(encode(model, text).ids) for text in found)
        if count < needed:
            hint = "Give many times as many, or None for the bundled prose."
            expected = f"of at least {needed} tokens in all ({least} times a head's width)"
            raise InputError(message("texts", expected, f"{count} of them", hint))
        return found
    prose = load_prose("calibration")
    if arch.n_ctx is None:
        return prose
    # The tokenizers of small models for tests need a token for almost every letter.
    return tuple(t for t in prose if len(model.tokenizer(t)["input_ids"]) < arch.n_ctx)


def each_layer(
    model: Any,
    arch: Architecture,
    texts: Sequence[str],
    sites: Sequence[str],
    add: Add,
    *,
    progress: bool = False,
) -> None:
    """Call ``add(layer, {site: tensor}, mask)`` for every layer of every batch of texts.

    Args:
        model: a TransformerBridge.
        arch: its architecture.
        texts: the texts, which run without gradients and without a head.
        sites: sites of :func:`wvprobe.capture`.
        add: takes a layer's tensors, [text, pos, ...] (pattern: [text, head, query, key]), in
            double precision and in the computer's own memory; True in the mask for tokens.
        progress: whether to show a bar.
    """
    ids = [encode(model, text).ids for text in texts]
    recipes = {
        (site, layer): adapters.recipe(model, arch, site, layer)
        for layer in range(arch.n_layers)
        for site in sites
    }
    wanted = list(dict.fromkeys(raw for recipe in recipes.values() for raw in recipe.inputs))
    batches = batches_of([len(own) for own in ids], "auto", model, arch)
    with progress_bar(len(batches), "calibration", progress) as advance:
        for rows in batches:
            tokens, mask = padded([ids[row] for row in rows], model.cfg.device)
            layer = _Layer(arch, recipes, sites, add, mask)
            with adapters.reading(model, arch, wanted, layer.receive):
                adapters.run_backbone(model, tokens, mask)
            advance(1)


class _Layer:
    """Collects what one layer's sites are made of, and hands them on once all have come."""

    def __init__(
        self,
        arch: Architecture,
        recipes: Mapping[Raw, Recipe],
        sites: Sequence[str],
        add: Add,
        mask: Tensor,
    ) -> None:
        self.arch, self.recipes, self.sites, self.add = arch, recipes, sites, add
        self.mask, self.seen = mask.cpu().bool(), {}

    def receive(self, raw: str, layer: int, value: Tensor) -> None:
        self.seen[raw, layer] = adapters.shaped(self.arch, raw, value, *self.mask.shape)
        made = {site: self.recipes[site, layer] for site in self.sites}
        if all(name in self.seen for recipe in made.values() for name in recipe.inputs):
            found = {
                site: recipe.compute(self.seen, lambda x: x).cpu().double()
                for site, recipe in made.items()
            }
            self.seen.clear()
            self.add(layer, found, self.mask)
