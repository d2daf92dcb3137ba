"""How alike two streams are as spaces: linear CKA from unbiased HSIC, and Procrustes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import svdvals
from wvprobe._linalg import factored_singular_values
from wvprobe._shapes import floating
from wvprobe._types import Provenance, Result
from wvprobe._validate import listed, message
from wvprobe._validate import seed as checked_seed
from wvprobe.errors import InputError

_CKA_ITEMS = 600
_GROUPS = 10


@dataclass(frozen=True)
class LayerSimilarity(Result):
    """Likeness of streams, measured on the same tokens.

    Attributes:
        cka: [layer, layer2] linear CKA with the unbiased HSIC₁: 1 for the same space up to
            rotation and scale, 0 on average for unrelated ones, below 0 by chance.
        cka_error: [layer, layer2] its standard error, a jackknife over ten groups of words
            (of items where there is a single word).
        cka_within: [layer, layer2] the same when each word's mean is taken off: what contexts
            do to words, without what words are.
        cka_within_error: [layer, layer2] its standard error.
        procrustes: [step] of stream k and k + 1, ‖XᵀY‖_* / (‖X‖ ‖Y‖) of centred columns: 1 where
            a rotation and a scale turn one into the other.
        procrustes_chance: [step] the same when the tokens of stream k + 1 are shuffled. It is far
            above 0 where tokens are no more than dimensions.
        n: how many tokens CKA is of.
        n_procrustes: how many Procrustes is of.

    Examples:
        >>> from wvprobe.contextual_drift import layer_similarity
        >>> found = layer_similarity(torch.randn(40, 2, 8))
        >>> found.cka.shape, bool((found.cka - found.cka.T).abs().max() < 1e-6)
        (torch.Size([2, 2]), True)
    """

    cka: Float[Tensor, "layer layer2"]
    cka_error: Float[Tensor, "layer layer2"]
    cka_within: Float[Tensor, "layer layer2"]
    cka_within_error: Float[Tensor, "layer layer2"]
    procrustes: Float[Tensor, " step"]
    procrustes_chance: Float[Tensor, " step"]
    n: int
    n_procrustes: int

    AXES: ClassVar = {
        "cka": ("layer", "layer2"),
        "cka_error": ("layer", "layer2"),
        "cka_within": ("layer", "layer2"),
        "cka_within_error": ("layer", "layer2"),
        "procrustes": ("step",),
        "procrustes_chance": ("step",),
    }

    def to_frame(self) -> Any:
        """Return one row a pair of streams, layer ≤ layer2.

        Columns: layer layer2 cka cka_error cka_within cka_within_error procrustes
        procrustes_chance, the last two for neighbouring streams alone.
        """
        import pandas

        rows = []
        for layer in range(len(self.cka)):
            for other in range(layer, len(self.cka)):
                next_one = other == layer + 1
                rows.append(
                    {
                        "layer": layer,
                        "layer2": other,
                        "cka": float(self.cka[layer, other]),
                        "cka_error": float(self.cka_error[layer, other]),
                        "cka_within": float(self.cka_within[layer, other]),
                        "cka_within_error": float(self.cka_within_error[layer, other]),
                        "procrustes": float(self.procrustes[layer]) if next_one else torch.nan,
                        "procrustes_chance": (
                            float(self.procrustes_chance[layer]) if next_one else torch.nan
                        ),
                    }
                )
        return pandas.DataFrame(rows)


def layer_similarity(
    x: Float[Tensor, "item layer d_model"],
    words: Sequence[str] | None = None,
    *,
    seed: int = 0,
    provenance: Provenance | None = None,
) -> LayerSimilarity:
    """Compare the streams of the same tokens, each pair of streams.

    Kornblith et al. 2019 (linear CKA), with the unbiased estimator HSIC₁ of Song et al. 2012 in
    place of HSIC₀ (Nguyen et al. 2021), which few tokens in many dimensions would push towards 1;
    ‖XᵀY‖_* as in Ding et al. 2021, whose Procrustes distance is 2 − 2 times it.

    Args:
        x: vectors; of more than 600 a random choice of 600 serves CKA.
        words: each item's word, for `cka_within` and for the jackknife's groups; None: every
            item is a group of its own, and `cka_within` is NaN.
        seed: seed of the choice, of the groups and of the shuffle.
        provenance: of the vectors, where they are a model's.

    Raises:
        InputError: fewer than four items, or NaN among the vectors.

    Examples:
        >>> from wvprobe.contextual_drift import layer_similarity
        >>> x = torch.randn(40, 2, 8)
        >>> found = layer_similarity(x)
        >>> bool((found.cka.diagonal() - 1).abs().max() < 1e-5)
        True
    """
    seed = checked_seed(seed)
    n, layers, _ = floating("x", x, ("item", "layer", "d_model")).shape
    if n < 4:
        raise InputError(message("x", "vectors of at least four items", n))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(n, generator=generator)[:_CKA_ITEMS]
    names = list(range(n)) if words is None else listed("words", words, f"a word an item ({n})")
    if len(names) != n or not all(isinstance(name, str | int) for name in names):
        raise InputError(message("words", f"a word an item ({n}), strings or ints", names))
    kinds = {name: number for number, name in enumerate(dict.fromkeys(names))}
    word = torch.tensor([kinds[name] for name in names])[chosen]
    # A word's occurrences go together; those of a single word can only go one by one.
    unit = word if len(kinds) > 1 else torch.arange(len(word))
    group = (torch.randperm(int(unit.max()) + 1, generator=generator) % _GROUPS)[unit]
    picked = x[chosen]
    cka, error = _jackknife(picked, group)
    within, within_error = torch.full_like(cka, torch.nan), torch.full_like(cka, torch.nan)
    if words is not None:
        within, within_error = _jackknife(_without_means(picked, word), group)
    order = torch.randperm(n, generator=generator)
    steps = [_procrustes(x[:, k], x[:, k + 1], order) for k in range(layers - 1)]
    settings = {"items": n, "groups": _GROUPS, "words": words is not None}
    return LayerSimilarity(
        provenance=provenance or Provenance.of("tensors", "", seed=seed, **settings),
        cka=cka,
        cka_error=error,
        cka_within=within,
        cka_within_error=within_error,
        procrustes=torch.tensor([pair[0] for pair in steps], dtype=torch.float64),
        procrustes_chance=torch.tensor([pair[1] for pair in steps], dtype=torch.float64),
        n=len(chosen),
        n_procrustes=n,
    )


def _without_means(x: Tensor, word: Int[Tensor, " item"]) -> Tensor:
    """Take each word's mean off; a word of one item is then 0, and says nothing."""
    count = torch.bincount(word).double()
    sums = torch.zeros(len(count), *x.shape[1:], dtype=torch.float64)
    sums.index_add_(0, word, x.double())
    return (x - sums[word] / count[word, None, None]).to(x.dtype)


def _jackknife(x: Tensor, group: Int[Tensor, " item"]) -> tuple[Tensor, Tensor]:
    """Return CKA of all pairs of streams, and its error when groups are left out in turn."""
    centred = (x - x.mean(dim=0)).transpose(0, 1)
    # One scale a stream, so that single precision suffices for the largest of them.
    sizes = centred.flatten(1).norm(dim=-1)[:, None, None]
    centred = centred / torch.where(sizes > 0, sizes, 1.0)
    products = centred @ centred.mT
    full = _cka(products)
    groups = torch.unique(group).tolist()
    parts = []
    for left_out in groups:
        kept = (group != left_out).nonzero()[:, 0]
        if len(kept) >= 4:
            parts.append(_cka(products[:, kept[:, None], kept]))
    if len(parts) < 2:
        return full, torch.full_like(full, torch.nan)
    spread = torch.stack(parts)
    factor = (len(parts) - 1) / len(parts)
    return full, (factor * (spread - spread.mean(dim=0)).square().sum(dim=0)).sqrt()


def _cka(products: Float[Tensor, "layer item item2"]) -> Float[Tensor, "layer layer2"]:
    """Return HSIC₁(K, L) / √(HSIC₁(K, K) HSIC₁(L, L)) of all pairs of kernels.

    With zero diagonals and U-centred (Székely & Rizzo 2014), kernels have HSIC₁ as their inner
    product over n(n − 3): the same as Song et al.'s three terms.
    """
    layers, n, _ = products.shape
    flat = torch.empty(layers, n * n, dtype=products.dtype)
    for layer in range(layers):
        kernel = products[layer].double().clone().fill_diagonal_(0.0)
        rows = kernel.sum(dim=0) / (n - 2)
        kernel -= rows[:, None] + rows - rows.sum() / (n - 1)
        flat[layer] = kernel.fill_diagonal_(0.0).flatten().to(products.dtype)
    # Streams differ in scale; one that holds nothing is like none.
    sizes = flat.double().norm(dim=-1)
    found = (flat @ flat.T).double() / (sizes[:, None] * sizes)
    return torch.where(sizes[:, None] * sizes > 0, found, torch.nan)


def _procrustes(x: Tensor, y: Tensor, order: Tensor) -> tuple[float, float]:
    """Return ‖XᵀY‖_* / (‖X‖ ‖Y‖) of centred columns, and the same with Y's rows shuffled."""
    x, y = ((part - part.mean(dim=0)).float() for part in (x, y))
    size = float(x.norm() * y.norm())
    if size == 0:
        return torch.nan, torch.nan

    def nuclear(rows: Tensor) -> float:
        if len(x) < x.shape[1]:
            return float(factored_singular_values(x.T, rows).sum()) / size
        return float(svdvals(x.T @ rows).sum()) / size

    return nuclear(y), nuclear(y[order])
