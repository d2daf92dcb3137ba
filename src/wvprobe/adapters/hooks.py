"""Where each site of the residual stream is read, and a forward that stops when it has it all.

Sites and their hook points differ from family to family (a BERT block norms after its sums,
Gemma-2 norms twice, OPT flattens the batch), and TransformerLens's aliases do not always mean
the same thing in all of them, so the table here names the raw hook points.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from wvprobe._validate import message
from wvprobe.adapters.boot import require_head
from wvprobe.adapters.rotation import fresh_rotation
from wvprobe.adapters.structure import Architecture, first_position, has
from wvprobe.errors import InputError, UnsupportedError

# Sites whose hook points give [batch, head, pos, d] instead of [batch, pos, ...].
_HEADS_FIRST = ("pattern",)
# What keys of latent attention are made of: their parts from the latent, beside the values, and
# the latent before its norm, beside the rotary part.
_LATENT = {"kv_up": "kv_b_proj", "kv_down": "kv_a_proj_with_mqa"}
# What is rounded where a coarser precision is played; every architecture has these.
_ROUNDED = ("q", "v", "z", "attn_out", "mlp_out", "resid_post")

Raw = tuple[str, int]

# How many calls of attention within a call of attention are under way: none of them is part of the
# forward that a reader outside looks at.
_depth: ContextVar[int] = ContextVar("depth", default=0)


# Whether NaN and infinity are read like other numbers.
_broken_too: ContextVar[bool] = ContextVar("broken_too", default=False)


class _Stop(Exception):
    """Raised inside the forward when everything asked for has been read."""


def hook_point(model: Any, arch: Architecture, site: str, layer: int) -> torch.nn.Module:
    """Return the hook point that carries a raw site of one layer.

    Raises:
        UnsupportedError: the architecture has no such site; the message says what to use.
    """
    block = model.blocks[layer]
    attention = block.attn
    if site == "resid_pre":
        return block.hook_in
    if site == "resid_post":
        return block.hook_out
    if site == "resid_mid":
        return _resid_mid(model, arch, block)
    if site == "attn_in":
        return attention.hook_in
    if site in ("q", "k"):
        return _query_or_key(model, arch, attention, site)
    if site in ("kv_up", "kv_down"):
        return getattr(attention, _LATENT[site]).hook_out
    if site == "v":
        return attention.hook_v if arch.mla else attention.v.hook_out
    if site == "z":
        return attention.o.hook_in
    if site == "attn_out":
        return attention.o.hook_out
    if site == "attn_added":
        return block.ln1_post.hook_out if arch.sandwich else attention.o.hook_out
    if site == "mlp_out":
        return _mlp_out(block)
    if site == "pattern":
        return attention.hook_pattern
    return {"cos": attention.hook_cos, "sin": attention.hook_sin}[site]


def _resid_mid(model: Any, arch: Architecture, block: Any) -> torch.nn.Module:
    if arch.wiring == "parallel":
        raise UnsupportedError(
            f"{model.cfg.model_name} runs attention and MLP side by side, so it has no resid_mid. "
            "Use resid_pre and resid_post, or attn_added and mlp_out."
        )
    # In a post-norm block the MLP reads, and adds to, what the first norm puts out.
    return block.ln1.hook_out if arch.wiring == "post_norm" else block.ln2.hook_in


def _query_or_key(model: Any, arch: Architecture, attention: Any, site: str) -> torch.nn.Module:
    if arch.mla:
        if site == "k":
            raise UnsupportedError(
                f"{model.cfg.model_name} puts its keys together from a latent and a rotary part, "
                "so no one hook point has them before rotation. Use capture(model, texts, 'k')."
            )
        return (attention.q_b_proj if has(attention, "q_b_proj") else attention.q_proj).hook_out
    if arch.qk_norm:
        return getattr(attention, f"{site}_norm").hook_out
    return getattr(attention, site).hook_out


def _mlp_out(block: Any) -> torch.nn.Module:
    if has(block, "ln2_post"):
        return block.ln2_post.hook_out
    # BLOOM and BERT add the residual inside the MLP module: the last projection is the output.
    return block.mlp.out.hook_out if has(block.mlp, "out") else block.mlp.hook_out


def shaped(arch: Architecture, site: str, value: Tensor, batch: int, pos: int) -> Tensor:
    """Bring a hook point's tensor to [batch, pos, ...] (pattern: [batch, head, query, key])."""
    if site in _HEADS_FIRST:
        return value
    if _heads_before_pos(arch, site):
        return value.transpose(1, 2)
    if site in ("q", "k"):
        heads = arch.n_heads if site == "q" else arch.n_kv_heads
        return value.reshape(batch, pos, heads, arch.d_head)
    if site == "v":
        return value.reshape(batch, pos, arch.n_kv_heads, arch.d_head_v)
    if site == "z":
        return value.reshape(batch, pos, arch.n_heads, arch.d_head_v)
    if site in ("cos", "sin", "kv_down"):
        return value
    if site == "kv_up":
        return value.reshape(batch, pos, arch.n_heads, -1)
    return value.reshape(batch, pos, arch.d_model)


def _heads_before_pos(arch: Architecture, site: str) -> bool:
    """Whether a hook point gives [batch, head, pos, d]: norms of q and k, values of a latent."""
    return (site in ("q", "k") and arch.qk_norm) or (site == "v" and arch.mla)


@contextmanager
def broken_too() -> Iterator[None]:
    """Read NaN and infinity like other numbers inside: an audit tells which identity they break."""
    token = _broken_too.set(True)
    try:
        yield
    finally:
        _broken_too.reset(token)


def _check_finite(model: Any, sums: Sequence[tuple[str, int, Tensor]]) -> None:
    """Refuse NaN and infinity, which would go on into all that is measured.

    Args:
        model: the bridge.
        sums: site, layer and the sum of what came there, which is finite where all of it is.

    Raises:
        InputError: one is not; the first site and its layer are named.
    """
    if not sums or _broken_too.get():
        return
    finite = torch.stack([own for _, _, own in sums]).isfinite().tolist()
    if not all(finite):
        site, layer, _ = sums[finite.index(False)]
        got = f"NaN or infinity in {site} of layer {layer} of {model.cfg.model_name}"
        hint = "Look at the checkpoint; if it is in half precision, load it in float32."
        raise InputError(message("model", "one whose streams are finite", got, hint))


def depth() -> int:
    """Return how many calls of attention within a call of attention are under way."""
    return _depth.get()


@contextmanager
def deeper() -> Iterator[None]:
    """Mark what runs inside as a call within a call: readers from outside do not see it."""
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


@contextmanager
def reading(
    model: Any,
    arch: Architecture,
    wanted: Sequence[tuple[str, int]],
    receive: Callable[[str, int, Tensor], None],
) -> Iterator[None]:
    """Call ``receive(site, layer, tensor)`` as the forward passes each wanted hook point.

    The forward is left as soon as every wanted site has been received. Hooks of the caller's
    own stay in place and act first.

    Raises:
        InputError: something received holds NaN or infinity (afterwards; see :func:`broken_too`).
    """
    pending, level = set(wanted), depth()
    # Looked at once, after the forward: a look at each would wait for the device each time. In
    # float32, since those of half precision can be beyond it where no number is.
    sums: list[tuple[str, int, Tensor]] = []

    def hook_for(site: str, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            if depth() != level:
                return
            sums.append((site, layer, output.detach().sum(dtype=torch.float32)))
            receive(site, layer, output)
            pending.discard((site, layer))
            if not pending:
                raise _Stop

        return hook

    handles = [
        hook_point(model, arch, site, layer).register_forward_hook(hook_for(site, layer))
        for site, layer in wanted
    ]
    try:
        yield
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
        pending.clear()
    _check_finite(model, sums)


@contextmanager
def changing(
    model: Any, arch: Architecture, changes: Mapping[Raw, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Put other tensors in place of what the forward carries at some sites.

    Later layers, and sites read inside (:func:`reading`, :func:`wvprobe.capture`), see the changed
    ones. A change that tells rows of a batch apart needs all texts in one batch. Some attention
    modules (OPT's, BERT's) only show their pattern: where it is to be another, change ``z``, which
    is the pattern times ``v``.

    Args:
        model: the bridge.
        arch: its architecture.
        changes: (raw site, layer) -> what maps its tensor, shaped as by :func:`shaped`, to
            another of the same shape.
    """
    size: list[int] = []

    def note_size(_module: Any, inputs: Any) -> None:
        size[:] = inputs[0].shape

    def hook_for(site: str, new: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def hook(_module: Any, _inputs: Any, value: Tensor) -> Tensor:
            changed = new(shaped(arch, site, value, *size)).to(value.dtype)
            if _heads_before_pos(arch, site):
                return changed.transpose(1, 2)
            return changed.reshape(value.shape)

        return hook

    # Every forward begins with looking up its tokens, [batch, pos].
    handles = [model.embed.original_component.register_forward_pre_hook(note_size)]
    for (site, layer), new in changes.items():
        point = hook_point(model, arch, site, layer)
        handles.append(point.register_forward_hook(hook_for(site, new)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def rounded(model: Any, arch: Architecture, dtype: torch.dtype) -> Iterator[None]:
    """Run a model as if it were held in a coarser precision: the yardstick for small changes.

    Weights are rounded to `dtype` and put back afterwards, bit for bit; queries, values, z, what
    attention and MLP put out, and the stream after every block are rounded as they pass. Sums in
    between keep the model's precision, so that this works in every architecture and on every
    device, whatever kernels there are for `dtype`.
    """

    def coarse(value: Tensor) -> Tensor:
        return value.to(dtype).to(value.dtype)

    sites = [(site, layer) for site in _ROUNDED for layer in range(arch.n_layers)]
    kept = [(p, p.data) for p in model.original_model.parameters() if p.is_floating_point()]
    try:
        for parameter, data in kept:
            parameter.data = coarse(data)
        with changing(model, arch, dict.fromkeys(sites, coarse)):
            yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def logits(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Run the whole model on padded tokens and return its logits, [batch, pos, d_vocab].

    Args:
        model: the bridge.
        tokens: as in :func:`run_backbone`.
        mask: likewise.

    Raises:
        UnsupportedError: the checkpoint carried no head.
        InputError: they hold NaN, or the model is in no state to run.
    """
    require_head(model, "logits")
    with torch.no_grad():
        found = model.original_model(**forward_arguments(model, tokens, mask)).logits
    # Logits of tokens that cannot come are −inf, so that the largest tells.
    if not (_broken_too.get() or math.isfinite(float(found.amax()))):
        raise InputError(
            f"logits of {model.cfg.model_name} hold NaN or infinity. Look at the checkpoint; if it "
            "is in half precision, load it in float32."
        )
    return found


def run_backbone(model: Any, tokens: Tensor, mask: Tensor) -> None:
    """Run the model without its head on padded tokens.

    Args:
        model: the bridge.
        tokens: [batch, pos] token ids, padded on either side.
        mask: [batch, pos], 1 for tokens, 0 for padding; never left out, since without it a
            padded batch silently gives other numbers than its sentences alone.
    """
    with torch.no_grad():
        model.original_model.base_model(**forward_arguments(model, tokens, mask))


def _check_state(model: Any) -> None:
    """Refuse a model whose forward fails, or gives other numbers each time."""
    name = model.cfg.model_name
    for parameter in model.original_model.parameters():
        if parameter.is_meta:
            raise InputError(
                f"{name} is on device 'meta', which holds no numbers. Load its weights."
            )
        if not parameter.is_floating_point():
            raise UnsupportedError(
                f"{name} has weights of {parameter.dtype}: it is quantised, which wvprobe does not "
                "model. Load the checkpoint that it was quantised from."
            )
    if any(module.training for module in model.original_model.modules()):
        raise InputError(
            f"{name} is in training mode, in which dropout draws anew at every call. "
            "Call model.eval() first."
        )


def forward_arguments(model: Any, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
    """Return what a forward on padded tokens is called with.

    Raises:
        InputError: the model has no numbers (``meta``), or is in training mode.
        UnsupportedError: its weights are quantised.
    """
    _check_state(model)
    fresh_rotation(model)
    known = inspect.signature(model.original_model.base_model.forward).parameters
    arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "position_ids" in known and bool((mask[:, 0] == 0).any()):
        # Models count positions from the first column; only padding on the left needs telling.
        counted = (mask.cumsum(dim=1) - 1).clamp(min=0)
        arguments["position_ids"] = counted + first_position(model)
    return arguments
