"""What every counterfactual gives: settings, what each does to texts, intervals over texts."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._effects import Effects
from wvprobe._statistics import mean_interval
from wvprobe._types import Result

MEASURES = Effects._fields[:-2]
ROUNDING = "bf16 rounding"


@dataclass(frozen=True)
class ChangeResult(Result):
    """What changes to a model do, setting by setting; the base of all counterfactuals' results.

    Measures are those of a text, NaN throughout where they do not apply (no head: no KL, no loss,
    no top token; an encoder: no loss). Intervals are 95 % bootstrap intervals over texts.

    Attributes:
        kl: [setting, text] KL(as it is ‖ changed) of the next token, nats, mean over own tokens.
        loss_delta: [setting, text] change of the mean loss, nats a token.
        top1_agreement: [setting, text] share of tokens with the same most expected next token.
        relative_change: [setting, text] ‖Δx‖ / ‖x‖ of the last stream, mean over own tokens.
        final_distance: [setting, text] 1 − cos of the last stream at the last own token.
        pooled_distance: [setting, text] 1 − cos of the means over own tokens.
        loss: [text] of the model as it is.
        n_tokens: [text] own tokens.
        settings: the settings' names; ``bf16 rounding`` is the yardstick for what is small.
        layers: the changed layers of each.
    """

    kl: Float[Tensor, "setting text"]
    loss_delta: Float[Tensor, "setting text"]
    top1_agreement: Float[Tensor, "setting text"]
    relative_change: Float[Tensor, "setting text"]
    final_distance: Float[Tensor, "setting text"]
    pooled_distance: Float[Tensor, "setting text"]
    loss: Float[Tensor, " text"]
    n_tokens: Int[Tensor, " text"]
    settings: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]

    AXES: ClassVar = {
        **dict.fromkeys(MEASURES, ("setting", "text")),
        "loss": ("text",),
        "n_tokens": ("text",),
    }

    @property
    def measure(self) -> str:
        """The measure that `low` and `high` belong to: ``kl``, or ``relative_change`` without."""
        return "relative_change" if bool(self.kl.isnan().all()) else "kl"

    def interval(self, measure: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return a measure's mean over texts, and the ends of its interval, [setting] each."""
        values = getattr(self, measure)
        mean = values.mean(dim=1)
        if values.shape[1] < 2 or bool(values.isnan().all()):
            nothing = torch.full_like(mean, torch.nan)
            return mean, nothing, nothing
        return mean, *mean_interval(values.T, seed=self.provenance.seed or 0)

    def to_frame(self) -> Any:
        """Return one row a setting.

        Columns: setting layers, those of the kind of change, then kl loss_delta top1_agreement
        relative_change final_distance pooled_distance, each also with _low and _high; measure (the
        one that counts for this model) and its low and high; n_texts n_tokens.
        """
        import pandas

        n_layers = max((max(some) for some in self.layers if some), default=-1) + 1
        columns: dict[str, Any] = {
            "setting": list(self.settings),
            "layers": [_named(some, n_layers) for some in self.layers],
            **self._columns(),
        }
        for name in MEASURES:
            for end, values in zip(("", "_low", "_high"), self.interval(name), strict=True):
                columns[name + end] = values.tolist()
        columns["measure"] = self.measure
        _, low, high = self.interval(self.measure)
        columns["low"], columns["high"] = low.tolist(), high.tolist()
        columns["n_texts"], columns["n_tokens"] = self.kl.shape[1], int(self.n_tokens.sum())
        return pandas.DataFrame(columns)

    def _columns(self) -> dict[str, list[Any]]:
        """Return further columns, one entry a setting."""
        return {}


def _named(layers: tuple[int, ...], n_layers: int) -> str:
    """Return layers as a reader writes them: ``none``, ``3``, ``0, 2``, ``all``."""
    if not layers:
        return "none"
    if len(layers) == n_layers and n_layers > 1:
        return "all"
    return ", ".join(map(str, layers))
