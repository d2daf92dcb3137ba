"""What one head's output does to another head of its own block, were it there to be read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._effects import Batch, batches, check_encodings, texts_or_prose
from wvprobe._linalg import at_least_float32, triangular_factor
from wvprobe._progress import progress as progress_bar
from wvprobe._statistics import mean_interval, spearman
from wvprobe._types import Result
from wvprobe._validate import indices
from wvprobe._validate import seed as checked_seed
from wvprobe.adapters import Architecture, AttentionCall
from wvprobe.compose import composition
from wvprobe.counterfactual._blocks import told
from wvprobe.heads import HeadWeights
from wvprobe.words import encode

MODES = ("Q", "K", "V")
_FEWEST = 3  # pairs that a rank correlation is taken of


@dataclass(frozen=True)
class InteractionResult(Result):
    """How far heads of one block would change if they read what another of them wrote.

    Attributes:
        values: [layer, writer, reader, text] ‖head_b(norm(x + head_a)) − head_b(norm(x))‖ /
            ‖head_b(norm(x))‖ with a the writer and b the reader, mean over a text's own tokens; on
            the diagonal what a head does to itself. NaN for a reader that writes nothing.
        compositions: [mode, layer, writer, reader] composition scores of the same pairs, which
            parallel heads cannot use.
        n_tokens: [text] own tokens.
        layers: the layers of the first axis.
        modes: of `compositions`: ``Q``, ``K`` and ``V``.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.head_interactions(model, texts, layers=1)
        >>> bool((found.values >= 0).all())
        True
    """

    values: Float[Tensor, "layer writer reader text"]
    compositions: Float[Tensor, "mode layer writer reader"]
    n_tokens: Int[Tensor, " text"]
    layers: tuple[int, ...]
    modes: tuple[str, ...]

    AXES: ClassVar = {
        "values": ("layer", "writer", "reader", "text"),
        "compositions": ("mode", "layer", "writer", "reader"),
        "n_tokens": ("text",),
    }

    def interval(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean over texts and its 95 % bootstrap interval, [layer, writer, reader]."""
        mean = self.values.mean(dim=-1)
        if self.values.shape[-1] < 2:
            nothing = torch.full_like(mean, torch.nan)
            return mean, nothing, nothing
        seed = self.provenance.seed or 0
        return mean, *mean_interval(self.values.movedim(-1, 0), seed=seed)

    def to_frame(self) -> Any:
        """Return one row a pair of heads.

        Columns: layer writer reader interaction low high q_composition k_composition
        v_composition.
        """
        import pandas

        mean, low, high = self.interval()
        heads = range(mean.shape[-1])
        places = [(layer, a, b) for layer in self.layers for a in heads for b in heads]
        frame = pandas.DataFrame(places, columns=["layer", "writer", "reader"])
        columns = {"interaction": mean, "low": low, "high": high}
        for mode, scores in zip(self.modes, self.compositions, strict=True):
            columns[f"{mode.lower()}_composition"] = scores
        return frame.assign(**{name: found.flatten().tolist() for name, found in columns.items()})

    def by_layer(self) -> Float[Tensor, "mode layer"]:
        """Return Spearman's ρ of interaction and composition over a layer's pairs of two heads.

        NaN where a layer has fewer than three pairs, or all of them are alike.
        """
        mean = self.values.mean(dim=-1).double()
        apart = ~torch.eye(mean.shape[-1], dtype=torch.bool)
        found = torch.full(self.compositions.shape[:2], torch.nan, dtype=torch.float64)
        for place, layer in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
            pairs = mean[layer][apart], self.compositions[place, layer][apart].double()
            known = ~(pairs[0].isnan() | pairs[1].isnan())
            if int(known.sum()) >= _FEWEST:
                x, y = (one[known] for one in pairs)
                found[place, layer] = spearman(x, y, torch.ones(1, len(x)).double())[0]
        return found

    def agreement(self) -> Any:
        """Return whether heads that compose more interact more, one row a mode.

        Columns: mode rho low high n_layers: the mean over layers of the rank correlation within
        a layer, with its 95 % bootstrap interval over layers.
        """
        import pandas

        rows = []
        for mode, rho in zip(self.modes, self.by_layer(), strict=True):
            rho = rho[~rho.isnan()]
            low, high = torch.nan, torch.nan
            if len(rho) > 1:
                low, high = map(float, mean_interval(rho, seed=self.provenance.seed or 0))
            rows.append((mode, float(rho.mean()), low, high, len(rho)))
        return pandas.DataFrame(rows, columns=["mode", "rho", "low", "high", "n_layers"])


def head_interactions(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    layers: int | Sequence[int] | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> InteractionResult:
    """Measure what each head of a block would change in each other if that one read its output.

    Exact: attention of a block runs once more for every head a, on x + head_a, which gives all
    heads b at once; the rest of the model is as it is. A head's share of what is added is meant, a
    second norm's scale (Gemma-2) being that of the model as it is; b_O takes no part. It is the
    first-order part of what :func:`sequential_heads` brings about.

    Beside it stand the pairs' composition scores (:func:`wvprobe.composition`, at offset 0; with
    latent attention the content circuit), which of a pair within a layer say what could be read.

    Args:
        model: a TransformerBridge.
        texts: the texts; None for the bundled held-out prose (some 5,600 tokens).
        layers: layers to measure; None for all.
        seed: seed of the intervals.
        prepend_bos: as in the bridge's ``to_tokens``.
        progress: whether to show a bar.

    Raises:
        InputError: no such layer, or a text without tokens of its own.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.head_interactions(model, texts, layers=1)
        >>> len(found.to_frame())  # what each head of the block does to each, itself included
        36
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    chosen = indices("layers", layers, arch.n_layers, "layers")
    given = texts_or_prose(texts)
    encodings = [encode(model, text, prepend_bos=prepend_bos) for text in given]
    check_encodings(encodings)
    n, h = len(encodings), arch.n_heads
    values = torch.full((len(chosen), h, h, n), torch.nan, dtype=torch.float64)
    readers = [_readers(model, arch, layer) for layer in chosen]
    runs = list(batches(model, arch, encodings, headless=True))
    with progress_bar(len(runs), "batches of texts", progress) as advance:
        for batch in runs:
            watch = {
                layer: _watch(values[row], readers[row], batch) for row, layer in enumerate(chosen)
            }
            with adapters.rewriting(model, arch, watch):
                adapters.run_backbone(model, batch.ids, batch.mask)
            advance(1)
    settings = {"texts": told(texts), "layers": list(chosen), "prepend_bos": prepend_bos}
    return InteractionResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        values=values,
        compositions=_compositions(model, arch, chosen),
        n_tokens=torch.tensor([sum(not added for added in e.special) for e in encodings]),
        layers=chosen,
        modes=MODES,
    )


def _readers(model: Any, arch: Architecture, layer: int) -> Float[Tensor, "head s r"]:
    """Return R_h with ‖z W_O^h‖ = ‖R_h z‖, which is smaller; through a second norm as well.

    The scale of such a norm is left out: it is a token's, and a ratio does not have it.
    """
    weight = at_least_float32(adapters.output_weight(model, arch, layer))
    norm = adapters.post_attention_norm(model, arch, layer)
    if norm is not None:
        weight = norm.linear(weight, weight.new_ones(()))
    return triangular_factor(weight.mT)


def _watch(values: Tensor, readers: Tensor, batch: Batch) -> adapters.Rewrite:
    """Return what fills one layer's [writer, reader, text] for a batch, and changes nothing."""

    def lengths(z: Tensor) -> Float[Tensor, "text pos head"]:
        return torch.einsum("hsr,bphr->bphs", readers, z).norm(dim=-1).double()

    def watch(call: AttentionCall) -> None:
        z, x = at_least_float32(call.z), at_least_float32(call.x)
        whole, scale = lengths(z), call.scale(call.z)
        for writer in range(z.shape[2]):
            changed = call.z_of(x + call.share(z, [writer], scale))
            ratio = lengths(at_least_float32(changed) - z) / whole
            ratio = ratio.masked_fill(whole == 0, torch.nan)
            for place, row in enumerate(batch.rows):
                values[writer, :, row] = ratio[place, batch.own[place]].nanmean(dim=0).cpu()

    return watch


def _compositions(
    model: Any, arch: Architecture, layers: Sequence[int]
) -> Float[Tensor, "mode layer writer reader"]:
    """Return the composition scores of pairs within a layer, which no model can use."""
    heads = HeadWeights.from_model(model)
    found = []
    for mode in MODES:
        part = "content" if arch.mla and mode != "V" else None
        impossible = composition(heads, mode, part=part).impossible
        found.append(torch.stack([impossible[layer, :, layer] for layer in layers]))
    return torch.stack(found).cpu()
