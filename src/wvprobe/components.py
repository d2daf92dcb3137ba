"""A stream as an exact sum of what wrote it: token, position, every head, every MLP, biases.

With their scales frozen at what they were, norms are linear, so that a component can be carried
through every norm that acts on the stream itself (BERT's) and added up in any block order. A second
norm on what a block puts out (Gemma-2) is part of what the block wrote.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._validate import index
from wvprobe.activations import Activations, read_sites
from wvprobe.adapters import Architecture, Norm
from wvprobe.words import encode

# What reads sites of given layers: of one text, or of one token of each of several.
_Read = Callable[..., Activations]


class Component(NamedTuple):
    """What wrote a part of a stream.

    Attributes:
        kind: ``token``, ``position``, ``head``, ``mlp`` or ``bias``.
        layer: the block, or None for what the embedding wrote.
        head: the head, or None.

    Examples:
        >>> from wvprobe.components import Component
        >>> str(Component("head", 5, 1)), str(Component("mlp", 5))
        ('L5H1', 'MLP 5')
    """

    kind: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        """Return a short name: ``token``, ``L5H1``, ``MLP 5``, ``bias 5``."""
        if self.layer is None:
            return self.kind
        if self.kind == "head":
            return f"L{self.layer}H{self.head}"
        return f"{'MLP' if self.kind == 'mlp' else self.kind} {self.layer}"


@dataclass(frozen=True)
class StreamComponents:
    """One text's stream, or that of chosen tokens of several texts, taken apart.

    Attributes:
        names: the components, in the order of the first axis of `vectors`.
        vectors: [component, pos, d_model], float64; they add up to `stream`.
        stream: [pos, d_model], float64, as the model has it.
        layer: which stream, 0 the embedding, k after block k − 1.
        tokens: token ids, one a position.

    Examples:
        >>> from wvprobe.components import stream_components
        >>> parts = stream_components(model, "The river bank.", layer=3)
        >>> parts.vectors.shape[0] == len(parts.names) == 1 + 3 * (6 + 1)  # token, heads, MLPs
        True
    """

    names: tuple[Component, ...]
    vectors: Float[Tensor, "component pos d_model"]
    stream: Float[Tensor, "pos d_model"]
    layer: int
    tokens: tuple[int, ...]

    @property
    def reconstruction_error(self) -> float:
        """Largest ‖Σ components − stream‖ / ‖stream‖ over positions."""
        error = (self.vectors.sum(dim=0) - self.stream).norm(dim=-1)
        return float((error / self.stream.norm(dim=-1)).max())


class _Block:
    """What one block wrote, and what it read: in one text, or at a token each of several."""

    def __init__(self, model: Any, arch: Architecture, seen: Activations, block: int) -> None:
        self.model, self.arch, self.seen, self.block = model, arch, seen, block

    def read(self, site: str) -> Tensor:
        """Return a site, [pos, ...], float64; a pattern is [head, query, key]."""
        if self.seen.positions is not None:
            return self.seen[site][:, self.block].double()
        at = (0, self.block) if site == "pattern" else (0, slice(None), self.block)
        return self.seen[site][at].double()

    def added(self, out: Tensor) -> Tensor:
        """Carry parts of what W_O gives, [..., pos, d_model], to the stream (Gemma-2's norm)."""
        norm = adapters.post_attention_norm(self.model, self.arch, self.block)
        return out if norm is None else norm.linear(out, norm.scale(self.read("attn_out")))


class Carried:
    """Components of a stream, each kept apart while blocks add to them and norms scale them."""

    SITES = ("head_out",)

    def __init__(self) -> None:
        """Begin with none."""
        self.names: list[Component] = []
        self.parts: list[Tensor] = []

    def add(self, name: Component, part: Tensor) -> None:
        """Add what one component wrote, [pos, d_model]."""
        self.names.append(name)
        self.parts.append(part)

    def add_heads(self, block: _Block) -> None:
        """Add what every head of a block wrote."""
        for head, part in enumerate(block.read("head_out").unbind(1)):
            self.add(Component("head", block.block, head), part)

    def through(self, norm: Norm, x: Tensor, bias: Component) -> None:
        """Carry all parts through a norm whose input was `x`; its bias is a component."""
        scale = norm.scale(x)
        self.parts = [norm.linear(part, scale) for part in self.parts]
        if norm.bias is not None:
            self.add(bias, norm.bias.to(x).expand_as(x))

    def total(self) -> Tensor:
        """Return the sum of all parts."""
        return torch.stack(self.parts).sum(dim=0)


class _Sources:
    """A stream kept apart by the token that its parts were last read from."""

    SITES = ("pattern", "v")

    def __init__(self, pos: int, d_model: int) -> None:
        self.parts = torch.zeros(pos, pos, d_model, dtype=torch.float64)  # [source, pos, d_model]

    def add(self, _name: Component, part: Tensor) -> None:
        """Add what was written at every position from that position itself."""
        self.parts.diagonal(dim1=0, dim2=1).add_(part.T)

    def add_heads(self, block: _Block) -> None:
        """Add a_js v_s W_O of every head, from every source s to every position j."""
        weight = adapters.output_weight(block.model, block.arch, block.block).double().cpu()
        values = block.read("v")
        values = values.repeat_interleave(len(weight) // values.shape[1], dim=1)
        written = torch.einsum("she,hed->shd", values, weight)
        self.parts += block.added(torch.einsum("hjs,shd->sjd", block.read("pattern"), written))

    def through(self, norm: Norm, x: Tensor, bias: Component) -> None:
        """Carry all parts through a norm whose input was `x`."""
        self.parts = norm.linear(self.parts, norm.scale(x))
        if norm.bias is not None:
            self.add(bias, norm.bias.to(x).expand_as(x))


def stream_components(model: Any, text: str, *, layer: int) -> StreamComponents:
    """Take the stream of every token of a text apart.

    Args:
        model: a TransformerBridge.
        text: the text.
        layer: which stream: 0 the embedding, k after block k − 1, up to the number of blocks.

    Raises:
        InputError: no such stream.

    Examples:
        >>> from wvprobe.components import stream_components
        >>> parts = stream_components(model, "The river bank.", layer=1)
        >>> [str(name) for name in parts.names][:3], parts.reconstruction_error < 1e-5
        (['token', 'L0H0', 'L0H1'], True)
    """
    arch = adapters.architecture(model)
    layer = index("layer", layer, arch.n_layers + 1, "streams")
    return _taken_apart(model, arch, partial(read_sites, model, text), layer)


def components_at(
    model: Any,
    texts: Sequence[str],
    positions: Sequence[int],
    *,
    layer: int,
    prepend_bos: bool | None = None,
) -> StreamComponents:
    """Take the stream of one token of each text apart, and keep nothing of the others.

    The same as :func:`stream_components` of every text, read in batches; a text that is given
    several times runs once.

    Args:
        model: a TransformerBridge.
        texts: the texts.
        positions: which token of each.
        layer: which stream, as in :func:`stream_components`.
        prepend_bos: as in the bridge's ``to_tokens``; None for its default.

    Returns:
        The place in the list stands where :func:`stream_components` has the position.

    Raises:
        InputError: no such stream or position.

    Examples:
        >>> from wvprobe.components import components_at
        >>> parts = components_at(model, ["A bank.", "The river bank."], [2, 3], layer=2)
        >>> parts.stream.shape
        torch.Size([2, 42])
    """
    arch = adapters.architecture(model)
    layer = index("layer", layer, arch.n_layers + 1, "streams")
    read = partial(
        read_sites, model, texts, positions=positions, prepend_bos=prepend_bos, share=True
    )
    return _taken_apart(model, arch, read, layer)


def _taken_apart(model: Any, arch: Architecture, read: _Read, layer: int) -> StreamComponents:
    carried = Carried()
    seen = _fill(model, arch, read, layer, carried)
    return StreamComponents(
        names=tuple(carried.names),
        vectors=torch.stack(carried.parts),
        stream=_Block(model, arch, seen, -1).read("stream"),
        layer=layer,
        tokens=_read_tokens(seen)[0],
    )


def stream_sources(model: Any, text: str, *, layer: int) -> Float[Tensor, "source pos d_model"]:
    """Take the stream of every token of a text apart by source token, one step back.

    What a head wrote at a position is split by the tokens that it looked at, a_js v_s W_O with the
    head's own pattern a and values v. All else (token, position, MLPs, biases) belongs to the
    position itself. It is one step and no more: the values at s hold what earlier heads brought
    there from elsewhere. Norms carry the parts with frozen scales; they add up to the stream.

    Args:
        model: a TransformerBridge.
        text: the text.
        layer: which stream: 0 the embedding, k after block k − 1, up to the number of blocks.

    Raises:
        InputError: no such stream.

    Examples:
        >>> from wvprobe.components import stream_components, stream_sources
        >>> parts = stream_sources(model, "The river bank.", layer=2)
        >>> stream = stream_components(model, "The river bank.", layer=2).stream
        >>> bool((parts.sum(dim=0) - stream).norm() < 1e-5 * stream.norm())
        True
    """
    arch = adapters.architecture(model)
    layer = index("layer", layer, arch.n_layers + 1, "streams")
    carried = _Sources(len(encode(model, text).ids), arch.d_model)
    _fill(model, arch, partial(read_sites, model, text), layer, carried)
    return carried.parts


def _read_tokens(seen: Activations) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ids and positions of the tokens read."""
    if seen.positions is None:
        return seen.tokens[0], tuple(range(len(seen.tokens[0])))
    at = tuple(position for (position,) in seen.positions)
    return tuple(ids[position] for ids, position in zip(seen.tokens, at, strict=True)), at


class EmbeddingParts(NamedTuple):
    """What a model of learned positions adds up before its blocks.

    Attributes:
        token: [pos, d_model], float64. Likewise:
        position: the learned position.
        constant: what is the same for all tokens (BERT's type embedding; zeros elsewhere).
        norm: the norm on their sum (BERT), or None.
    """

    token: Float[Tensor, "pos d_model"]
    position: Float[Tensor, "pos d_model"]
    constant: Float[Tensor, "pos d_model"]
    norm: Norm | None


def embedding_parts(
    model: Any,
    arch: Architecture,
    tokens: tuple[int, ...],
    positions: tuple[int, ...] | None = None,
) -> EmbeddingParts | None:
    """Return what the embedding of tokens is the sum of; None without learned positions.

    Args:
        model: a TransformerBridge.
        arch: its architecture.
        tokens: their ids.
        positions: where each stands; None for a text from its first token on.
    """
    table = adapters.position_table(model, arch)
    if table is None:
        return None
    token = adapters.embedding_table(model).detach().cpu()[list(tokens)].double()
    kind = adapters.token_type_embedding(model)
    constant = torch.zeros_like(token) if kind is None else kind.cpu().double().expand_as(token)
    at = range(len(tokens)) if positions is None else positions
    position = table.cpu()[list(at)].double()
    return EmbeddingParts(token, position, constant, adapters.embedding_norm(model, arch))


def position_parts(
    model: Any, arch: Architecture, seen: Activations, item: int
) -> Float[Tensor, "layer pos d_model"] | None:
    """Return the learned position's part of what every block reads, and nothing else.

    Blocks only add to the stream, so that it stays what it was; in a post-norm model (BERT) every
    norm scales it, by the text's own frozen scale.

    Args:
        model: a TransformerBridge.
        arch: its architecture.
        seen: of :func:`~wvprobe.capture` with ``resid_pre`` at all positions and layers; for a
            post-norm model ``attn_added`` and ``mlp_out`` too.
        item: which of its texts.

    Returns:
        float64; None without learned positions.
    """
    tokens = seen.tokens[item]
    parts = embedding_parts(model, arch, tokens)
    if parts is None:
        return None
    part, found = parts.position, []
    if parts.norm is not None:
        part = parts.norm.linear(part, parts.norm.scale(sum(parts[:3], torch.zeros(()))))
    for block in range(arch.n_layers):
        found.append(part)
        norms = adapters.stream_norms(model, arch, block)
        if norms is not None and block + 1 < arch.n_layers:
            sites = ("resid_pre", "attn_added", "mlp_out")
            x, attention, mlp = (seen[s][item, : len(tokens), block].double() for s in sites)
            part = norms[0].linear(part, norms[0].scale(x + attention))
            mid = norms[0](x + attention)
            part = norms[1].linear(part, norms[1].scale(mid + mlp))
    return torch.stack(found)


def _fill(
    model: Any, arch: Architecture, read: _Read, layer: int, carried: Carried | _Sources
) -> Activations:
    """Let everything that wrote a stream add its part; return the embedding and that stream."""
    seen = read("stream", layers=sorted({0, layer}))
    for name, part in _embedded(model, arch, seen):
        carried.add(name, part)
    if layer:
        _add_blocks(model, arch, read, layer, carried)
    return seen


def _embedded(
    model: Any, arch: Architecture, seen: Activations
) -> Iterator[tuple[Component, Tensor]]:
    """Yield what the embedding wrote: token, position, and what is the same for all tokens."""
    stream = _Block(model, arch, seen, 0).read("stream")
    parts = embedding_parts(model, arch, *_read_tokens(seen))
    if parts is None:
        yield Component("token"), stream
        return
    token, position, constant, norm = parts
    if norm is None:
        yield Component("token"), token
        yield Component("position"), stream - token
        return
    scale = norm.scale(token + position + constant)
    yield Component("token"), norm.linear(token, scale)
    yield Component("position"), norm.linear(position, scale)
    constant = norm.linear(constant, scale)
    yield Component("bias"), constant if norm.bias is None else constant + norm.bias.to(constant)


def _add_blocks(
    model: Any, arch: Architecture, read: _Read, layer: int, carried: Carried | _Sources
) -> None:
    sites = (*carried.SITES, "resid_pre", "attn_out", "attn_added", "mlp_out")
    seen = read(sites, layers=range(layer))
    for number in range(layer):
        block, name = _Block(model, arch, seen, number), Component("bias", number)
        carried.add_heads(block)
        bias = adapters.output_bias(model, number)
        if bias is not None:
            out = block.read("attn_out")
            carried.add(name, block.added(bias.cpu().double().expand_as(out)))
        norms = adapters.stream_norms(model, arch, number)
        stream = block.read("resid_pre")
        if norms is not None:
            stream = stream + block.read("attn_added")
            carried.through(norms[0], stream, name)
            stream = norms[0](stream)
        carried.add(Component("mlp", number), block.read("mlp_out"))
        if norms is not None:
            carried.through(norms[1], stream + block.read("mlp_out"), name)
