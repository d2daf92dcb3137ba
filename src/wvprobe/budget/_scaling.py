"""How the number of heads and their width grow with d_model, over published models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._types import Provenance, Result
from wvprobe._validate import instance, length, listed, message
from wvprobe._validate import seed as checked_seed
from wvprobe.budget._architectures import KnownArchitectures, known_architectures
from wvprobe.errors import InputError

_DRAWS = 2000
_QUANTITIES = ("n_heads", "d_head", "n_heads · d_head")
_SCOPES = ("all models", "within families")


@dataclass(frozen=True)
class HeadScaling(Result):
    """Log-log slopes on d_model, and how many models have a common head width.

    A slope of 1 says that a quantity grows in proportion to d_model, 0 that it does not depend
    on it. Models of one family are no independent choices: intervals come from resampling
    families. ``within families`` compares only models of one family with each other.

    Attributes:
        names: the models.
        families: by model, the line it belongs to: the unit of resampling.
        sizes: d_model, n_heads and d_head of every model.
        slopes: by scope (all models, within families) and quantity (n_heads, d_head, their
            product): slope, and the ends of its 95 % interval.
        common_widths: the head widths whose share is told.
        common_share: share of models with one of them, and the ends of its 95 % interval.

    Examples:
        >>> from wvprobe.budget import head_scaling
        >>> found = head_scaling()
        >>> len(found.names) > 60, found.common_widths
        (True, (64, 128))
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sizes": ("model", "size"),
        "slopes": ("scope", "quantity", "end"),
        "common_share": ("end",),
    }
    names: tuple[str, ...]
    families: tuple[str, ...]
    sizes: Float[Tensor, "model 3"]
    slopes: Float[Tensor, "2 3 3"]
    common_widths: tuple[int, ...]
    common_share: Float[Tensor, " 3"]

    def slope(self, quantity: str, scope: str = "all models") -> tuple[float, float, float]:
        """Return a slope and the ends of its 95 % interval.

        Args:
            quantity: n_heads, d_head, or "n_heads · d_head".
            scope: "all models" or "within families".
        """
        if quantity not in _QUANTITIES or scope not in _SCOPES:
            expected = f"one of {_QUANTITIES} and one of {_SCOPES}"
            raise InputError(message("quantity and scope", expected, (quantity, scope)))
        at, low, high = self.slopes[_SCOPES.index(scope), _QUANTITIES.index(quantity)].tolist()
        return at, low, high

    def to_frame(self) -> Any:
        """Return one row a scope and quantity. Columns: scope quantity slope low high n n_families.

        `n` and `n_families` count the models and families that the slope rests on.
        """
        import pandas

        alone = {family for family in self.families if self.families.count(family) == 1}
        rows = []
        for scope in _SCOPES:
            kept = [f for f in self.families if scope == _SCOPES[0] or f not in alone]
            for quantity in _QUANTITIES:
                ends = self.slope(quantity, scope)
                rows.append((scope, quantity, *ends, len(kept), len(set(kept))))
        columns = ["scope", "quantity", "slope", "low", "high", "n", "n_families"]
        return pandas.DataFrame(rows, columns=columns)


def head_scaling(
    known: KnownArchitectures | None = None, *, widths: Sequence[int] = (64, 128), seed: int = 0
) -> HeadScaling:
    """Fit log-log slopes of heads and head width on d_model over published models.

    Least squares of log y on log d_model. Intervals: percentile bootstrap (Efron & Tibshirani
    1993) with 2,000 resamples of whole families.

    Args:
        known: the models; None for :func:`known_architectures`.
        widths: head widths of queries and keys whose share is told.
        seed: seed of the resampling.

    Raises:
        InputError: fewer than three models or two families.

    Examples:
        >>> from wvprobe.budget import head_scaling
        >>> slope, low, high = head_scaling().slope("n_heads")
        >>> low <= slope <= high
        True
    """
    seed = checked_seed(seed)
    if known is not None:
        instance("known", known, KnownArchitectures, "Use wvprobe.known_architectures().")
    widths = [length("widths", width) for width in listed("widths", widths, "head widths")]
    if not widths:
        raise InputError(message("widths", "at least one head width", widths))
    models = list(known_architectures() if known is None else known)
    families = tuple(budget.family for budget in models)
    if len(models) < 3 or len(set(families)) < 2:
        expected = "at least three models of at least two families"
        raise InputError(message("known", expected, [budget.name for budget in models]))
    sizes = torch.tensor([[b.d_model, b.n_heads, b.width] for b in models], dtype=torch.float64)
    logs = sizes.log()
    x, y = logs[:, :1], torch.cat([logs[:, 1:], logs[:, 1:].sum(dim=1, keepdim=True)], dim=1)
    weights = _resamples(families, seed)
    inner_x, inner_y = _centred(x, families), _centred(y, families)
    hit = torch.tensor([float(b.width in tuple(widths)) for b in models], dtype=torch.float64)
    share = (weights @ hit) / weights.sum(dim=1)
    return HeadScaling(
        provenance=Provenance.of(
            "published configurations", "", seed=seed, draws=_DRAWS, widths=list(widths)
        ),
        names=tuple(budget.name for budget in models),
        families=families,
        sizes=sizes,
        slopes=torch.stack(
            [_ends(_slopes(x, y, weights)), _ends(_slopes(inner_x, inner_y, weights))]
        ),
        common_widths=tuple(widths),
        common_share=_ends(share[:, None])[0],
    )


def _resamples(families: Sequence[str], seed: int) -> Tensor:
    """Return how often each model is in each resample of families, the sample itself first."""
    distinct = sorted(set(families))
    place = torch.tensor([distinct.index(family) for family in families])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(distinct), (_DRAWS, len(distinct)), generator=generator)
    counts = torch.zeros(_DRAWS, len(distinct), dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return torch.cat([torch.ones(1, len(families), dtype=torch.float64), counts[:, place]])


def _centred(values: Tensor, families: Sequence[str]) -> Tensor:
    """Take each family's mean off its models."""
    found = values.clone()
    for family in set(families):
        members = torch.tensor([other == family for other in families])
        found[members] -= values[members].mean(dim=0)
    return found


def _slopes(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return least-squares slopes [resample, quantity] of y on x with an intercept."""
    total = weights.sum(dim=1, keepdim=True)
    mean_x, mean_y = weights @ x / total, weights @ y / total
    covariance = weights @ (x * y) / total - mean_x * mean_y
    variance = weights @ (x * x) / total - mean_x**2
    # A resample of families with one model each has no slope within families.
    return torch.where(variance > 1e-12, covariance / variance, torch.nan)


def _ends(resampled: Tensor) -> Tensor:
    """Return [quantity, 3]: the sample's own value, and the 95 % interval over resamples."""
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    interval = torch.nanquantile(resampled[1:], ends, dim=0)
    return torch.stack([resampled[0], *interval], dim=1)
