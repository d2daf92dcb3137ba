"""Whether a head's OV circuit raises the logit of the very token it looks at, or lowers it.

Two measures of W_E OV W_U after Elhage et al. 2021
(https://transformer-circuits.pub/2021/framework, "Detecting copying behavior"): its eigenvalues,
of which copying makes most positive, and where each token's own logit ranks among all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._extremes import TILE
from wvprobe._factors import check_heads, provenance_of
from wvprobe._linalg import at_least_float32, factored_eigenvalues
from wvprobe._progress import progress as progress_bar
from wvprobe._statistics import benjamini_hochberg, mean_interval
from wvprobe._token_rows import embedding_table, reader, unembedding, usable_ids, written
from wvprobe._types import Result
from wvprobe._validate import at_least, indices, message
from wvprobe._validate import seed as checked_seed
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights

# A token is promoted (suppressed) clearly when its own logit is in the top (bottom) 1 %.
EXTREME = 0.01


@dataclass(frozen=True)
class CopyingResult(Result):
    """Copying of every head: an eigenvalue score, and ranks of tokens' own logits.

    Attributes:
        eigenvalue_score: [layer, head] Σ Re λ / Σ |λ| over the eigenvalues λ of W_E OV W_U: 1
            where all are positive (copying), −1 where all are negative; NaN for a head of zeros.
        ranks: [layer, head, row] the share of other tokens whose logit is below the token's own
            (those equal count half): 1 where nothing is promoted more, chance .5.
        control_ranks: [layer, head, row] the same for another row's token in its place.
        low: [layer, head] lower end of the 95 % bootstrap interval of the mean of `ranks`.
        high: [layer, head] its upper end.
        p_values: [layer, head] two-sided, of the mean rank against chance.
        q_values: [layer, head] Benjamini-Hochberg over all heads of the result.
        token_ids: [row] the tokens sampled.
        layers: the layers that the first axis stands for.
        group: how many query heads read one key-value head.
        n_tokens: how many tokens each was ranked among, itself included.
        embedding: ``W_E`` or ``mlp0``.

    Examples:
        >>> found = wvprobe.copying_scores(heads, rows=50, progress=False)
        >>> bool((found.low <= found.rank).all() and (found.rank <= found.high).all())
        True
    """

    eigenvalue_score: Float[Tensor, "layer head"]
    ranks: Float[Tensor, "layer head row"]
    control_ranks: Float[Tensor, "layer head row"]
    low: Float[Tensor, "layer head"]
    high: Float[Tensor, "layer head"]
    p_values: Float[Tensor, "layer head"]
    q_values: Float[Tensor, "layer head"]
    token_ids: Int[Tensor, " row"]
    layers: tuple[int, ...]
    group: int
    n_tokens: int
    embedding: str

    AXES: ClassVar = {
        "eigenvalue_score": ("layer", "head"),
        "ranks": ("layer", "head", "row"),
        "control_ranks": ("layer", "head", "row"),
        "low": ("layer", "head"),
        "high": ("layer", "head"),
        "p_values": ("layer", "head"),
        "q_values": ("layer", "head"),
        "token_ids": ("row",),
    }

    @property
    def rank(self) -> Float[Tensor, "layer head"]:
        """Mean of `ranks` over the rows."""
        return self.ranks.mean(dim=-1)

    @property
    def promoted(self) -> Float[Tensor, "layer head"]:
        """Share of rows whose own logit is in the top 1 %; chance .01."""
        return (self.ranks >= 1 - EXTREME).to(self.ranks.dtype).mean(dim=-1)

    @property
    def suppressed(self) -> Float[Tensor, "layer head"]:
        """Share of rows whose own logit is in the bottom 1 %; chance .01."""
        return (self.ranks <= EXTREME).to(self.ranks.dtype).mean(dim=-1)

    def to_frame(self) -> Any:
        """Return one row a head.

        Columns: layer head kv_head eigenvalue_score rank low high promoted suppressed
        control_rank control_promoted control_suppressed p q.
        """
        import pandas

        control = replace(self, ranks=self.control_ranks)
        n_layers, n_heads = self.eigenvalue_score.shape
        heads = list(range(n_heads))
        columns = {
            "layer": [layer for layer in self.layers for _ in heads],
            "head": heads * n_layers,
            "kv_head": [head // self.group for head in heads] * n_layers,
        }
        values = {
            "eigenvalue_score": self.eigenvalue_score,
            "rank": self.rank,
            "low": self.low,
            "high": self.high,
            "promoted": self.promoted,
            "suppressed": self.suppressed,
            "control_rank": control.rank,
            "control_promoted": control.promoted,
            "control_suppressed": control.suppressed,
            "p": self.p_values,
            "q": self.q_values,
        }
        return pandas.DataFrame(
            {**columns, **{name: value.flatten().tolist() for name, value in values.items()}}
        )


def copying_scores(
    heads: HeadWeights,
    *,
    rows: int = 2000,
    seed: int = 0,
    layers: Iterable[int] | int | None = None,
    embedding: str = "W_E",
    normalize: bool = True,
    special: bool = False,
    progress: bool = True,
) -> CopyingResult:
    """Measure for every head whether attending to a token raises that token's own logit.

    Eigenvalues are exact and over all tokens: those of W_E OV W_U that can differ from 0 are the
    d_head eigenvalues of W_O (W_U W_E) W_V, and W_U W_E, [d_model, d_model], is one sum for all
    heads (Elhage et al. 2021). Ranks are exact over all tokens for a sample of rows: for a token
    t, the place of its own logit among all logits of x̂_t W_V W_O W_U, b_V included. The control
    ranks another sampled token's logit in the same rows.

    Tokens are read as :func:`wvprobe.top_tokens` reads them: normed (``normalize=False`` for
    rows of W_E as they are, as published), without positions, and past layer 0 on the direct path
    alone. W_U has the final norm's gain and centring folded in; its σ, and the scale of a norm
    after attention, change no rank and no eigenvalue's sign.

    p: where a head's output says nothing of its token, a rank is uniform on 0..1, so the mean of n
    has variance 1/(12 n); two-sided, normal. Query heads of one key-value head share its values,
    so their tests are not independent; q-values hold under positive dependence.

    Args:
        heads: the weights.
        rows: how many tokens to sample, without replacement; all where there are no more.
        seed: seed of the sample and of the bootstrap.
        layers: layers to measure, None for all (from 1 on for ``mlp0``).
        embedding: ``W_E``, or ``mlp0`` for the embeddings after layer 0's MLP.
        normalize: whether rows of the embedding are normed as a layer norms its input.
        special: whether special tokens, free entries, ids beyond the tokenizer's and rows of
            zeros take part.
        progress: show a bar.

    Raises:
        UnsupportedError: the model has no linear head, no W_E, or no stored embedding of the
            kind asked for.
        InputError: a layer is out of range, or 0 with ``mlp0``; fewer than two rows; weights
            with NaN.

    Examples:
        >>> found = wvprobe.copying_scores(heads, rows=50, progress=False)
        >>> found.rank.shape, int((found.to_frame().q < 0.05).sum()) <= 18
        (torch.Size([3, 6]), True)
    """
    check_heads(heads)
    seed, rows = checked_seed(seed), at_least("rows", rows, 2)
    # Folded gains differ by layer; unfolded ones would make W_U W_E differ too.
    heads = heads.fold() if normalize else heads
    table, weight = embedding_table(heads, embedding), unembedding(heads).weight
    if embedding == "mlp0" and layers is None:
        layers = range(1, heads.n_layers)
    chosen = indices("layers", layers, heads.n_layers, "layers")
    generator = torch.Generator().manual_seed(seed)
    ids = usable_ids(heads, table, special, min(len(table), len(weight)))
    if len(ids) < 2:
        raise InputError(message("rows", "at least 2, and so many tokens", len(ids)))
    sample = torch.randperm(len(ids), generator=generator)[:rows]

    joined: dict[Any, Tensor] = {}
    scores, signs = [], []
    steps = len(chosen) * len(range(0, len(ids), TILE))
    with progress_bar(steps, "copying", progress) as done:
        for layer in chosen:
            read = reader(heads, layer, embedding, normalize)
            key = _norm_key(heads, layer, normalize)
            if key not in joined:
                joined[key] = _joined(table, weight, read, ids)
            values, outputs = heads.ov_factors(layer)
            outputs = written(heads, layer, outputs)
            _check_finite(layer, values, heads.b_V[layer], outputs)
            scores.append(_eigenvalue_scores(joined[key], values, outputs))
            x_hat = read(at_least_float32(table[ids[sample]]))
            z = heads.values(x_hat.to(values.dtype), layer).movedim(-2, 0)
            group = heads.n_heads // heads.n_kv_heads
            z = z.repeat_interleave(group, dim=0)
            signs.append(_own_above_others(z, outputs, weight, ids, sample, done))

    above = torch.stack(signs, dim=1)  # [own or control, layer, head, row]
    own, control = (0.5 + above / (2 * (len(ids) - 1))).unbind()
    low, high = mean_interval(own.movedim(-1, 0), seed=seed)
    p_values = _p_values(own)
    settings = {"rows": rows, "embedding": embedding, "normalize": normalize, "special": special}
    return CopyingResult(
        provenance=provenance_of(heads, seed=seed, **settings),
        eigenvalue_score=torch.stack(scores),
        ranks=own,
        control_ranks=control,
        low=low,
        high=high,
        p_values=p_values,
        q_values=benjamini_hochberg(p_values),
        token_ids=ids[sample],
        layers=chosen,
        group=heads.n_heads // heads.n_kv_heads,
        n_tokens=len(ids),
        embedding=embedding,
    )


def _norm_key(heads: HeadWeights, layer: int, normalize: bool) -> Any:
    """Return what x / σ depends on: layers that agree on it share W_U W_E."""
    norm = heads.norms[layer]
    return (norm.kind, norm.eps) if normalize and norm is not None else None


def _joined(
    table: Tensor, weight: Tensor, read: Callable[[Tensor], Tensor], ids: Tensor
) -> Float[Tensor, "d d"]:
    """Return Σ_t W_U[:, t] x̂_t, [d_model, d_model], some tokens at a time."""
    total = torch.zeros(weight.shape[1], table.shape[1], dtype=torch.float64)
    for chunk in ids.split(4 * TILE):
        x_hat = read(at_least_float32(table[chunk]))
        unembedded = at_least_float32(weight[chunk]).to(x_hat.dtype)
        total += (unembedded.T @ x_hat).cpu()
    if not bool(torch.isfinite(total).all()):
        hint = "Look at the checkpoint."
        raise InputError(message("W_E and W_U", "finite", "NaN or infinity", hint))
    return total


def _check_finite(layer: int, *weights: Tensor) -> None:
    if not all(bool(torch.isfinite(weight).all()) for weight in weights):
        name = f"W_V, b_V and W_O of layer {layer}"
        raise InputError(message(name, "finite", "NaN or infinity", "Look at the checkpoint."))


def _eigenvalue_scores(joined: Tensor, values: Tensor, outputs: Tensor) -> Float[Tensor, " head"]:
    """Return Σ Re λ / Σ |λ| of every head of a layer."""
    read = joined.to(values) @ values  # [kv_head, d_model, r], once a key-value head
    read = read.repeat_interleave(len(outputs) // len(values), dim=0)
    eigenvalues = factored_eigenvalues(read, outputs.to(read.dtype)).cpu()
    return eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)


def _own_above_others(
    z: Float[Tensor, "head row r"],
    outputs: Float[Tensor, "head r d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    ids: Int[Tensor, " token"],
    sample: Int[Tensor, " row"],
    done: Callable[[int], None],
) -> Float[Tensor, "two head row"]:
    """Return how many logits are below a row's own, less how many are above.

    First for the row's own token, then, as a control, for that of the row before.
    Logits are made a tile of rows × TILE tokens at a time, and each tile serves both.
    """
    picked = sample, sample.roll(1)
    reference = [_logits_at(z, outputs, weight[ids[at]])[..., None] for at in picked]
    balance = torch.zeros(2, *z.shape[:2], dtype=torch.float64)
    for start in range(0, len(ids), TILE):
        chunk = at_least_float32(weight[ids[start : start + TILE]]).to(outputs.dtype)
        # The token itself must tie with itself, which rounding would not grant.
        inside = [((at >= start) & (at < start + len(chunk))).nonzero()[:, 0] for at in picked]
        columns = chunk @ outputs.mT  # [head, token, r]
        difference = z.new_empty(z.shape[1], len(chunk))
        for head in range(len(z)):
            tile = z[head] @ columns[head].T
            for which, (at, here) in enumerate(zip(picked, inside, strict=True)):
                own = reference[which][head]
                torch.sub(own, tile, out=difference)
                difference[here, at[here] - start] = 0
                balance[which, head] += difference.sign_().sum(dim=1).cpu()
        done(1)
    return balance


def _logits_at(z: Tensor, outputs: Tensor, unembedded: Tensor) -> Float[Tensor, "head row"]:
    """Return one logit of every row, that of the token whose unembedding stands beside it."""
    columns = at_least_float32(unembedded).to(outputs.dtype) @ outputs.mT
    return (z * columns).sum(dim=-1)


def _p_values(ranks: Float[Tensor, "layer head row"]) -> Float[Tensor, "layer head"]:
    z = (ranks.mean(dim=-1) - 0.5) * (12 * ranks.shape[-1]) ** 0.5
    return torch.special.erfc(z.abs() / 2**0.5)
