"""A logit as a sum over what wrote to the stream, and the logit lens.

With the scale of the final norm frozen it is linear, so that every vector in the stream has a
direct effect on a logit (Elhage et al. 2021, https://transformer-circuits.pub/2021/framework).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._single_tokens import spell, token_id
from wvprobe._targets import check_finite, log_probs, token_logits
from wvprobe._writes import added_scale, head_values, on_cpu, output_map, value_bias
from wvprobe.activations import read_sites
from wvprobe.adapters import Architecture, Unembedding
from wvprobe.components import stream_components


@dataclass(frozen=True)
class LogitLens:
    """What the model would say if it stopped at a stream (nostalgebraist 2020, the logit lens).

    Every stream is normed by its own scale, never by the last one's.

    Attributes:
        logits: [stream] the target's logit before a final soft cap; stream 0 is the embedding, k
            what block k − 1 leaves. Of the target: less `against`, or centred, where asked for.
        log_probs: [stream] log p of the token, natural logarithm.
        ranks: [stream] how many tokens have a higher logit; 0 is the first place.
        heads: [layer, head] what each head's write does to the target's logit, the final norm's
            scale that of the stream which the head's own block leaves.
    """

    logits: Float[Tensor, " stream"]
    log_probs: Float[Tensor, " stream"]
    ranks: Int[Tensor, " stream"]
    heads: Float[Tensor, "layer head"]

    def to_frame(self) -> Any:
        """Return one row a stream: stream logit log_prob rank."""
        import pandas

        columns = {"logit": self.logits, "log_prob": self.log_probs, "rank": self.ranks}
        return pandas.DataFrame(
            {"stream": range(len(self.logits)), **{k: v.tolist() for k, v in columns.items()}}
        )


@dataclass(frozen=True)
class LogitEffects:
    """A logit as a sum over what wrote to the stream, the final norm's scale frozen.

    Attributes:
        heads: [layer, head, source] of a_ij v_j W_O, i the position that is read; b_V's part is in.
        value_bias: [layer, head] the part of `heads`, summed over sources, that is b_V's: rows of
            a pattern sum to 1, so it says nothing of the text. NaN where b_V is multiplied by a
            latent's scale.
        mlps: [layer] of each MLP.
        biases: [layer] of b_O.
        embedding: [part] of what the embedding wrote; `embedding_parts` names the parts.
        embedding_parts: ``token``, ``position``, ``bias``, as far as the model has them.
        constant: what does not depend on the stream: the head's bias, the final norm's bias.
        logit: the target's logit as the model's last stream gives it, before a soft cap; all
            parts sum to it.
        soft_cap: the bound of a final soft cap, or None.
        token: the target token, readable.
        token_id: its id.
        against: the token whose logit is subtracted, readable, or None.
        against_id: its id, or None.
        centred: whether the mean logit over the vocabulary is subtracted.
        reconstruction_error: |Σ parts − logit| / (‖x‖ ‖u‖ / σ), of the last stream x and the
            direction u that it is held against.
        lens: the target in every stream.
    """

    heads: Float[Tensor, "layer head source"]
    value_bias: Float[Tensor, "layer head"]
    mlps: Float[Tensor, " layer"]
    biases: Float[Tensor, " layer"]
    embedding: Float[Tensor, " part"]
    embedding_parts: tuple[str, ...]
    constant: float
    logit: float
    soft_cap: float | None
    token: str
    token_id: int
    against: str | None
    against_id: int | None
    centred: bool
    reconstruction_error: float
    lens: LogitLens

    @property
    def target(self) -> str:
        """The target's name: the token, or what is subtracted from what."""
        if self.against is not None:
            return f"{self.token!r} − {self.against!r}"
        return f"{self.token!r} − mean" if self.centred else repr(self.token)

    def to_frame(self) -> Any:
        """Return one row a component, by size: kind layer head effect; effects sum to the logit.

        Kinds: head (summed over sources), mlp, bias (b_O), token, position, embedding_bias,
        constant. Layer and head are NA where a component has none.
        """
        import pandas

        heads = self.heads.sum(dim=-1)
        rows: list[tuple[str, int | None, int | None, float]] = [
            ("head", layer, head, float(heads[layer, head]))
            for layer in range(heads.shape[0])
            for head in range(heads.shape[1])
        ]
        for kind, values in (("mlp", self.mlps), ("bias", self.biases)):
            rows += [(kind, layer, None, value) for layer, value in enumerate(values.tolist())]
        for part, value in zip(self.embedding_parts, self.embedding.tolist(), strict=True):
            rows.append(("embedding_bias" if part == "bias" else part, None, None, value))
        rows.append(("constant", None, None, self.constant))
        rows.sort(key=lambda row: -abs(row[3]))
        frame = pandas.DataFrame(rows, columns=["kind", "layer", "head", "effect"])
        return frame.astype({"layer": "Int64", "head": "Int64"})


def logit_effects(
    model: Any,
    arch: Architecture,
    head: Unembedding,
    text: str,
    *,
    position: int,
    token: str | int | None,
    against: str | int | None,
    centred: bool,
) -> LogitEffects:
    """Take a target's logit at a position of a text apart; arguments as in `value_flow`."""
    streams = read_sites(model, text, "stream", positions=position)["stream"][0].double()
    # Before a soft cap, in which single precision may tie.
    logits = token_logits(head, streams.to(at_least_float32(head.weight).dtype)).cpu()
    first = int(logits[-1].argmax()) if token is None else token
    chosen = token_id(model.tokenizer, first, len(head.weight))
    target = _Target.of(model, head, chosen, against, centred)
    scales = target.scale(streams)
    last = scales[-1]
    heads, value_bias, mlps, biases = _added(model, arch, text, position, target.direction)
    start = stream_components(model, text, layer=0)
    embedding = start.vectors[:, position] @ target.direction / last
    logit = streams[-1] @ target.direction / last + target.constant
    parts = (heads.sum() + mlps.sum() + biases.sum()) / last + embedding.sum()
    size = streams[-1].norm() * target.direction.norm() / last
    return LogitEffects(
        heads=heads / last,
        value_bias=value_bias / last,
        mlps=mlps / last,
        biases=biases / last,
        embedding=embedding,
        embedding_parts=tuple(name.kind for name in start.names),
        constant=target.constant,
        logit=float(logit),
        soft_cap=head.soft_cap,
        token=target.strings[0],
        token_id=target.ids[0],
        against=target.strings[1],
        against_id=target.ids[1],
        centred=centred,
        reconstruction_error=float((parts + target.constant - logit).abs() / size),
        lens=LogitLens(
            logits=streams @ target.direction / scales + target.constant,
            log_probs=log_probs(head, logits)[:, chosen].cpu(),
            ranks=(logits > logits[:, chosen, None]).sum(dim=-1).cpu(),
            heads=heads.sum(dim=-1) / scales[1:, None],
        ),
    )


@dataclass(frozen=True)
class _Target:
    """A direction in the final stream: logit = x · direction / σ(x) + constant."""

    head: Unembedding
    direction: Float[Tensor, " d_model"]
    constant: float
    ids: tuple[int, int | None]
    strings: tuple[str, str | None]

    @classmethod
    def of(
        cls, model: Any, head: Unembedding, token: int, against: str | int | None, centred: bool
    ) -> "_Target":
        """Fold the final norm into one column of the unembedding, less another or the mean."""
        size = len(head.weight)
        other = None if against is None else token_id(model.tokenizer, against, size, "against")
        column, bias = head.weight[token].cpu().double(), _bias(head, token)
        if other is not None:
            column, bias = column - head.weight[other].cpu().double(), bias - _bias(head, other)
        elif centred:
            column = column - head.weight.mean(dim=0, dtype=torch.float64).cpu()
            bias = bias - _bias(head, slice(None))
        norm = on_cpu(head.norm)
        if norm is not None and norm.bias is not None:
            bias = bias + float(column @ norm.bias.double())
        check_finite("the unembedding", column)
        strings = spell(model.tokenizer, [token] if other is None else [token, other])
        folded = column if norm is None else norm.fold(column[:, None])[:, 0]
        return cls(
            head,
            head.scale * folded,
            head.scale * bias,
            (token, other),
            (strings[0], strings[1] if other is not None else None),
        )

    def scale(self, x: Float[Tensor, "*b d_model"]) -> Float[Tensor, "*b"]:
        """Return the final norm's σ of streams; 1 without a final norm."""
        norm = on_cpu(self.head.norm)
        return torch.ones_like(x[..., 0]) if norm is None else norm.scale(x)[..., 0]


def _bias(head: Unembedding, at: int | slice) -> float:
    return 0.0 if head.bias is None else float(head.bias[at].double().mean())


def _added(
    model: Any, arch: Architecture, text: str, at: int, direction: Float[Tensor, " d_model"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what blocks add along a direction.

    These are [layer, head, source] of heads, [layer, head] of b_V in them, [layer] of MLPs and
    [layer] of b_O.
    """
    seen = read_sites(model, text, ["pattern", "attn_out", "mlp_out"], positions=at)
    values = read_sites(model, text, "v")["v"][0]
    heads, constants, biases = [], [], []
    for layer in range(arch.n_layers):
        out = seen["attn_out"][0, layer].double()
        reads = output_map(model, arch, layer) @ direction  # [head, r]
        reads = reads / added_scale(model, arch, layer, out)
        moved = torch.einsum("hjr,hr->hj", head_values(arch, values[:, layer]), reads)
        heads.append(seen["pattern"][0, layer, :, 0].double() * moved)
        constants.append((value_bias(model, arch, layer) * reads).sum(dim=-1))
        biases.append(_added_bias(model, arch, layer, out) @ direction)
    mlps = seen["mlp_out"][0].double() @ direction
    return torch.stack(heads), torch.stack(constants), mlps, torch.stack(biases)


def _added_bias(
    model: Any, arch: Architecture, layer: int, attn_out: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_model"]:
    """Return b_O's share of what attention adds at a position."""
    bias = adapters.output_bias(model, layer)
    if bias is None:
        return torch.zeros_like(attn_out)
    bias = bias.cpu().double()
    norm = on_cpu(adapters.post_attention_norm(model, arch, layer))
    return bias if norm is None else norm.linear(bias, norm.scale(attn_out))
