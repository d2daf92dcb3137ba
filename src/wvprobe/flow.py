"""What flows along attention: the vectors that heads move, and what these do to a logit.

A pattern's weight says how much of a value is taken, not how long the value is. Kobayashi et al.
2020 (https://arxiv.org/abs/2004.10102) measure ‖a_ij v_j W_O‖ instead. With the final norm's scale
frozen a logit is a sum over everything that wrote to the stream, so that each such vector also has
a direct effect on it (Elhage et al. 2021, https://transformer-circuits.pub/2021/framework).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._logit_effects import LogitEffects, logit_effects
from wvprobe._targets import check_finite, position_in, require_linear_head
from wvprobe._types import Result
from wvprobe._validate import indices
from wvprobe._writes import added_scale, head_values, output_factor, output_map, value_bias
from wvprobe.activations import read_sites
from wvprobe.errors import InputError
from wvprobe.words import encode


@dataclass(frozen=True)
class FlowResult(Result):
    """Attention of a text beside the length of what it moves, and effects on one logit.

    Attributes:
        pattern: [layer, head, query, key].
        value_norms: [layer, head, key] ‖v_j W_O^h‖, through a second norm's gain and centring.
        scales: [layer, query] what a second norm divides by (Gemma-2); 1 elsewhere.
        bias_norms: [layer, head] ‖b_V W_O^h‖ on the footing of `value_norms`: part of every value,
            and since rows of a pattern sum to 1 a constant of the block. NaN where b_V is
            multiplied by a latent's scale, token by token.
        layers: the layers that the first axes stand for.
        position: the token position whose logit is read, and whose query `to_frame` lists.
        text: the text.
        strings: its tokens.
        effects: effects on a logit, of all layers; None where the model has no linear head.

    Examples:
        >>> flow = wvprobe.value_flow(model, "The river bank is closed.", layer=1)
        >>> list(flow.to_frame())
        ['layer', 'head', 'source', 'token', 'attention', 'norm', 'effect']
    """

    pattern: Float[Tensor, "layer head query key"]
    value_norms: Float[Tensor, "layer head key"]
    scales: Float[Tensor, "layer query"]
    bias_norms: Float[Tensor, "layer head"]
    layers: tuple[int, ...]
    position: int
    text: str
    strings: tuple[str, ...]
    effects: LogitEffects | None

    AXES: ClassVar = {
        "pattern": ("layer", "head", "query", "key"),
        "value_norms": ("layer", "head", "key"),
        "scales": ("layer", "query"),
        "bias_norms": ("layer", "head"),
    }

    @property
    def norms(self) -> Float[Tensor, "layer head query key"]:
        """‖a_ij v_j W_O‖, its share of what is added to the stream, computed when asked.

        The weight a_ij and the frozen scale of a second norm are numbers, so the norm is
        a_ij ‖v_j W_O‖ / scale_i: one vector a key is measured, not one a pair.
        """
        factors = self.value_norms[:, :, None] / self.scales[:, None, :, None]
        pattern = at_least_float32(self.pattern)
        return pattern * factors.to(pattern.dtype)

    def to_frame(self) -> Any:
        """Return one row a layer, head and source, at the query `position`.

        Columns: layer head source token attention norm effect (NaN without a logit).
        """
        import pandas

        n_heads, size = self.value_norms.shape[1:]
        norms = self.pattern[:, :, self.position].double() * self.value_norms
        norms = norms / self.scales[:, None, self.position, None]
        effects = torch.full_like(norms, torch.nan)
        if self.effects is not None:
            effects = self.effects.heads[list(self.layers)]
        return pandas.DataFrame(
            {
                "layer": [layer for layer in self.layers for _ in range(n_heads * size)],
                "head": [h for h in range(n_heads) for _ in range(size)] * len(self.layers),
                "source": list(range(size)) * (n_heads * len(self.layers)),
                "token": list(self.strings) * (n_heads * len(self.layers)),
                "attention": self.pattern[:, :, self.position].flatten().tolist(),
                "norm": norms.flatten().tolist(),
                "effect": effects.flatten().tolist(),
            }
        )


def value_flow(
    model: Any,
    text: str,
    *,
    layer: int | Sequence[int] | None = None,
    token: str | int | None = None,
    position: int | str | None = None,
    against: str | int | None = None,
    centred: bool = False,
) -> FlowResult:
    """Measure ‖a_ij v_j W_O‖ of every head and pair, and each source's direct effect on a logit.

    Norms (Kobayashi et al. 2020, https://arxiv.org/abs/2004.10102, eq. 5): [layer, head, query,
    key], in units of the stream, b_V counted as part of v. Behind a second norm (Gemma-2) a
    head's share of what is added counts, the norm's scale frozen. The norm that a post-norm block
    (BERT) applies to the sum afterwards, which Kobayashi et al. 2021 include, is left out.

    Effects (Elhage et al. 2021): a_ij v_j W_O · W_U[:, token] / σ, σ the final norm's scale at
    the position, frozen, its gain and centring folded into the column of W_U. With those of the
    MLPs, the embedding and the biases they sum to the logit before a final soft cap. A logit is
    known up to a constant that all tokens share; `against` or `centred` fix it. A direct effect
    leaves out what later layers make of a vector, and a frozen σ what taking it away would do.

    Only [layer, head, query, key] grows with the square of the text's length.

    Args:
        model: a TransformerBridge.
        text: the text.
        layer: layers whose pattern and norms are kept, None for all; effects cover all layers.
        token: the token whose logit is taken apart, as a string that is one token (its leading
            space included) or an id; None for the model's own first choice at the position.
        position: where it is read: a token position or a word (its last token); None for the
            last token of the text.
        against: subtract this token's logit.
        centred: subtract the mean logit over the vocabulary.

    Raises:
        UnsupportedError: `token`, `against` or `centred` for a model whose head is missing or not
            linear; without them `effects` is None there.
        InputError: no such layer or position; both `against` and `centred`; NaN in a weight.
        WordError: the word is not in the text, or a string is no single token.

    Examples:
        >>> flow = wvprobe.value_flow(model, "The river bank is closed.")
        >>> flow.norms.shape  # layer, head, query, key
        torch.Size([3, 6, 8, 8])
    """
    arch = adapters.architecture(model)
    encoding = encode(model, text)
    layers = indices("layer", layer, arch.n_layers, "layers")
    at = position_in(encoding, position, "position")
    head = adapters.unembedding(model, arch)
    if token is not None or against is not None or centred:
        head = require_linear_head(model, head, "an effect on a token's logit")
    if against is not None and centred:
        raise InputError("give `against` or `centred`, not both: each fixes what a logit is above.")
    effects = None
    if not isinstance(head, str):
        effects = logit_effects(
            model, arch, head, text, position=at, token=token, against=against, centred=centred
        )
    seen = read_sites(model, text, ["pattern", "v", *["attn_out"] * arch.sandwich], layers=layers)
    norms, constants, scales = [], [], []
    for row, each in enumerate(layers):
        factor = output_factor(output_map(model, arch, each))
        values = check_finite(f"values of layer {each}", head_values(arch, seen["v"][0, :, row]))
        norms.append((values @ factor).norm(dim=-1))
        constants.append((value_bias(model, arch, each)[:, None] @ factor)[:, 0].norm(dim=-1))
        if arch.sandwich:
            scales.append(added_scale(model, arch, each, seen["attn_out"][0, :, row]))
    ones = torch.ones(len(layers), len(encoding.ids), dtype=torch.float64)
    settings = {"text": text, "layers": list(layers), "position": at, "centred": centred}
    chosen = {} if effects is None else {"token": effects.token_id, "against": effects.against_id}
    return FlowResult(
        provenance=adapters.provenance(model, **settings, **chosen),
        pattern=seen["pattern"][0],
        value_norms=torch.stack(norms),
        scales=torch.stack(scales) if scales else ones,
        bias_norms=torch.stack(constants),
        layers=layers,
        position=at,
        text=text,
        strings=encoding.strings,
        effects=effects,
    )
