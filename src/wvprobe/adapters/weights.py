"""A model's attention weights, norms and rotations, as the modules that run hold them."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._shapes import check_there
from wvprobe.adapters.boot import why_no_head
from wvprobe.adapters.structure import Architecture, first_position, has
from wvprobe.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Norm:
    """A layer norm as a formula: gain ⊙ (x − mean) / σ + bias, or gain ⊙ x / rms.

    Attributes:
        kind: ``layer`` (centred) or ``rms``.
        gain: [d_model], with Gemma's 1 + g written out.
        bias: [d_model], or None.
        eps: added to the variance or mean square.
    """

    kind: Literal["layer", "rms"]
    gain: Tensor
    bias: Tensor | None
    eps: float

    def scale(self, x: Tensor) -> Tensor:
        """Return σ, or rms, of every vector of x: [..., d_model] -> [..., 1]."""
        if self.kind == "layer":
            x = x - x.mean(dim=-1, keepdim=True)
        return (x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def linear(self, x: Tensor, scale: Tensor) -> Tensor:
        """Apply the norm without its bias and with a given scale: linear in x."""
        if self.kind == "layer":
            x = x - x.mean(dim=-1, keepdim=True)
        return self.gain.to(x) * x / scale

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the norm to [..., d_model]."""
        out = self.linear(x, self.scale(x))
        return out if self.bias is None else out + self.bias.to(x)

    def fold(self, weight: Tensor) -> Tensor:
        """Return weights [..., d_model, d_out] with gain and centring in them."""
        folded = self.gain.to(weight.dtype)[:, None] * weight
        return folded - folded.mean(dim=-2, keepdim=True) if self.kind == "layer" else folded


@dataclass(frozen=True)
class Unembedding:
    """The map from the final stream to logits, kept as the model stores it.

    Attributes:
        weight: [d_vocab, d_model].
        bias: [d_vocab], or None.
        norm: the norm before it, or None.
        soft_cap: bound of tanh(logit / cap) · cap, or None.
        scale: factor on the logits, before a soft cap (Cohere).
    """

    weight: Tensor
    bias: Tensor | None
    norm: Norm | None
    soft_cap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class LayerWeights:
    """One layer's attention weights; biases are None where the model has none.

    Shapes: W_Q [head, d_model, d_head], W_K [kv_head, d_model, d_head],
    W_V [kv_head, d_model, d_head_v], W_O [head, d_head_v, d_model].
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor | None
    b_K: Tensor | None
    b_V: Tensor | None
    b_O: Tensor | None


def layer_weights(model: Any, layer: int) -> LayerWeights:
    """Read one layer's attention weights."""
    attention = model.blocks[layer].attn
    found: dict[str, Any] = {}
    for letter in "QKVO":
        found[f"W_{letter}"] = _read(model, layer, f"W_{letter}")
        # TransformerLens raises where there is no bias, so the module itself is asked.
        module = getattr(attention, letter.lower()).original_component
        has_bias = getattr(module, "bias", None) is not None
        found[f"b_{letter}"] = getattr(attention, f"b_{letter}").detach() if has_bias else None
    return LayerWeights(**found)


def _read(model: Any, layer: int, name: str) -> Tensor:
    """Read one of a layer's weights as TransformerLens splits it by heads.

    Raises:
        UnsupportedError: it is on no device, or quantised.
    """
    try:
        return getattr(model.blocks[layer].attn, name).detach()
    except NotImplementedError as error:  # it says which of the two
        raise UnsupportedError(
            f"{name} of layer {layer} in {model.cfg.model_name} cannot be read: {error}"
        ) from error


def output_weight(model: Any, arch: Architecture, layer: int) -> Tensor:
    """Read W_O of one layer, [head, d_head_v, d_model]."""
    attention = model.blocks[layer].attn
    if not arch.mla:
        return _read(model, layer, "W_O")
    # TransformerLens splits by the wrong width here: values are narrower than queries.
    weight = attention.o.original_component.weight.detach()
    return weight.T.unflatten(0, (arch.n_heads, arch.d_head_v))


def token_type_embedding(model: Any) -> Tensor | None:
    """Return what BERT adds to every token of a single text, [d_model], or None."""
    if not has(model, "token_type_embed"):
        return None
    return model.token_type_embed.original_component.weight[0].detach()


def output_bias(model: Any, layer: int) -> Tensor | None:
    """Read b_O of one layer, [d_model], or None."""
    bias = getattr(model.blocks[layer].attn.o.original_component, "bias", None)
    return None if bias is None else bias.detach()


def norm(model: Any, component: Any) -> Norm:
    """Read a norm component as a formula, and hold the formula against the module itself.

    Raises:
        UnsupportedError: no formula known here does what the module does.
        InputError: its gain or bias holds NaN or infinity.
    """
    module = component.original_component
    _check_finite(model, component, module)
    eps = float(getattr(module, "eps", getattr(module, "variance_epsilon", 0.0)))
    weight = getattr(module, "weight", None)
    # OLMo's norm has no gain.
    like = next(model.original_model.parameters())
    weight = like.new_ones(model.cfg.d_model) if weight is None else weight.detach()
    # Its mean is not 0, so that centring shows, and half precision holds it exactly.
    probe = torch.arange(weight.shape[-1], device=weight.device, dtype=weight.dtype) % 8 + 1
    with torch.no_grad():
        expected = module(probe)
    bias = getattr(module, "bias", None)
    candidates = (
        Norm("layer", weight, None if bias is None else bias.detach(), eps),
        Norm("rms", weight, None, eps),
        Norm("rms", 1.0 + weight, None, eps),
    )
    expected = at_least_float32(expected)
    errors = [
        float((c(at_least_float32(probe)) - expected).norm() / expected.norm()) for c in candidates
    ]
    best = min(range(len(candidates)), key=errors.__getitem__)
    # transformers norms in float32 inside float64 models too.
    if errors[best] < 8 * max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps):
        return candidates[best]
    raise UnsupportedError(
        f"{model.cfg.model_name} has a {type(module).__name__} that is neither LayerNorm nor "
        "RMSNorm (with gain g or 1 + g); wvprobe does not model it."
    )


def _check_finite(model: Any, component: Any, module: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        check_there(f"the {name} of a norm in {model.cfg.model_name}", parameter)
        if not bool(torch.isfinite(parameter).all()):
            paths = (p for p, part in model.named_modules() if part is component)
            path = next(paths, "a norm").replace("._original_component", "")
            raise InputError(
                f"the {name} of {path} in {model.cfg.model_name} holds NaN or infinity. "
                "Look at the checkpoint."
            )


def attention_norm(model: Any, arch: Architecture, layer: int) -> Norm | None:
    """Return the norm that attention reads through; None in a post-norm model."""
    return None if arch.wiring == "post_norm" else norm(model, model.blocks[layer].ln1)


def post_attention_norm(model: Any, arch: Architecture, layer: int) -> Norm | None:
    """Return the second norm on what attention puts out (Gemma-2), or None."""
    return norm(model, model.blocks[layer].ln1_post) if arch.sandwich else None


def stream_norms(model: Any, arch: Architecture, layer: int) -> tuple[Norm, Norm] | None:
    """Return the norms after the two sums of a post-norm block (BERT), or None."""
    if arch.wiring != "post_norm":
        return None
    block = model.blocks[layer]
    return norm(model, block.ln1), norm(model, block.ln2)


def qk_norms(model: Any, arch: Architecture, layer: int) -> tuple[Norm, Norm] | None:
    """Return the norms of queries and keys, each over d_head, or None."""
    if not arch.qk_norm:
        return None
    attention = model.blocks[layer].attn
    pair = norm(model, attention.q_norm), norm(model, attention.k_norm)
    if any(found.gain.shape != (arch.d_head,) or found.kind != "rms" for found in pair):
        raise UnsupportedError(
            f"{model.cfg.model_name} norms queries and keys across heads, not within each; "
            "wvprobe does not model that. Use HeadWeights.from_tensors with W_Q, W_K of your own."
        )
    return pair


def score_scale(model: Any, layer: int) -> float:
    """Return the factor c of a score c · q·k."""
    raw = model.blocks[layer].attn.original_component
    raw = getattr(raw, "self", raw)  # BERT keeps it one module further in
    for attribute in ("scaling", "inv_norm_factor"):
        value = getattr(raw, attribute, None)
        if isinstance(value, float):
            return value
    raise UnsupportedError(
        f"{type(raw).__name__} of {model.cfg.model_name} does not state its score's scale."
    )


def soft_cap(model: Any, layer: int) -> float | None:
    """Return the bound of Gemma-2's soft cap, tanh(s / cap) · cap, or None."""
    raw = model.blocks[layer].attn.original_component
    value = getattr(raw, "attn_logit_softcapping", None)
    return None if value is None else float(value)


def sliding_window(model: Any, layer: int) -> int | None:
    """Return how many tokens back, itself included, a query of this layer sees, or None."""
    raw = model.blocks[layer].attn.original_component
    value = getattr(raw, "sliding_window", None)
    if not hasattr(raw, "sliding_window"):
        # Mistral hands the window to the mask and keeps it in the config only.
        value = getattr(model.original_model.config, "sliding_window", None)
        if not getattr(model.original_model.config, "use_sliding_window", True):
            value = None
    return None if value is None else int(value)


def alibi_slopes(model: Any, arch: Architecture) -> Tensor | None:
    """Return [head] slopes that multiply the key's position, or None."""
    if arch.position != "alibi":
        return None
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 2, device=model.cfg.device)
    alibi = build_alibi_tensor(mask, arch.n_heads, torch.float32)
    return alibi.reshape(arch.n_heads, 2)[:, 1].clone()


def embedding_scale(model: Any) -> float:
    """Return the factor on the token embedding before it enters the stream (Gemma: √d_model)."""
    family = model.original_model.config.model_type
    if not family.startswith("gemma"):
        return 1.0
    return float(model.original_model.config.hidden_size) ** 0.5


def embedding_norm(model: Any, arch: Architecture) -> Norm | None:
    """Return the norm on the embeddings (BLOOM, BERT), or None."""
    return norm(model, model.embed_ln) if has(model, "embed_ln") else None


def final_norm(model: Any, arch: Architecture) -> Norm | None:
    """Return the norm before the head; None in a post-norm model, where a head has its own."""
    if arch.wiring == "post_norm" or not has(model, "ln_final"):
        return None
    return norm(model, model.ln_final)


def position_table(model: Any, arch: Architecture) -> Tensor | None:
    """Return learned positions by position from 0, [pos, d_model]; OPT's spare rows are cut."""
    if arch.position != "learned":
        return None
    module = model.pos_embed.original_component
    table = module.weight.detach()
    return table[int(getattr(module, "offset", first_position(model))) :]


def unembedding(model: Any, arch: Architecture) -> Unembedding | str:
    """Return the map from the final stream to logits, or why there is no linear one."""
    reason = why_no_head(model)
    if reason:
        return reason
    if arch.wiring == "post_norm":
        return "its head is not linear in the final stream (a dense layer and a norm stand between)"
    module = model.unembed.original_component
    bias = getattr(module, "bias", None)
    config = model.original_model.config
    cap = getattr(config, "final_logit_softcapping", None)
    return Unembedding(
        module.weight.detach(),
        None if bias is None else bias.detach(),
        final_norm(model, arch),
        None if cap is None else float(cap),
        float(getattr(config, "logit_scale", None) or 1.0),
    )
