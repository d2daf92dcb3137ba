"""A stream as an exact sum of what wrote it: token, position, every head, every MLP, biases.

With their scales frozen at what they were, norms are linear, so that a component can be carried
through every norm that acts on the stream itself (BERT's) and added up in any block order. A second
norm on what a block puts out (Gemma-2) is part of what the block wrote.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._validate import index
from wvprobe.activations import Activations, read_sites
from wvprobe.adapters import Architecture, Norm


class Component(NamedTuple):
    """What wrote a part of a stream.

    Attributes:
        kind: ``token``, ``position``, ``head``, ``mlp`` or ``bias``.
        layer: the block, or None for what the embedding wrote.
        head: the head, or None.
    """

    kind: str
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class StreamComponents:
    """One text's stream, taken apart.

    Attributes:
        names: the components, in the order of the first axis of `vectors`.
        vectors: [component, pos, d_model], float64; they add up to `stream`.
        stream: [pos, d_model], float64, as the model has it.
        layer: which stream, 0 the embedding, k after block k − 1.
        tokens: token ids.
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


class Carried:
    """Components of a stream, each kept apart while blocks add to them and norms scale them."""

    def __init__(self) -> None:
        """Begin with none."""
        self.names: list[Component] = []
        self.parts: list[Tensor] = []

    def add(self, name: Component, part: Tensor) -> None:
        """Add what one component wrote, [pos, d_model]."""
        self.names.append(name)
        self.parts.append(part)

    def through(self, norm: Norm, x: Tensor, bias: Component) -> None:
        """Carry all parts through a norm whose input was `x`; its bias is a component."""
        scale = norm.scale(x)
        self.parts = [norm.linear(part, scale) for part in self.parts]
        if norm.bias is not None:
            self.add(bias, norm.bias.to(x.dtype).expand_as(x))

    def total(self) -> Tensor:
        """Return the sum of all parts."""
        return torch.stack(self.parts).sum(dim=0)


def stream_components(model: Any, text: str, *, layer: int) -> StreamComponents:
    """Take the stream of every token of a text apart.

    Args:
        model: a TransformerBridge.
        text: the text.
        layer: which stream: 0 the embedding, k after block k − 1, up to the number of blocks.

    Raises:
        InputError: no such stream.
    """
    arch = adapters.architecture(model)
    layer = index("layer", layer, arch.n_layers + 1, "streams")
    seen = read_sites(model, text, "stream", layers=sorted({0, layer}))
    carried = Carried()
    for name, part in _embedded(model, arch, seen):
        carried.add(name, part)
    if layer:
        _add_blocks(model, arch, text, layer, carried)
    return StreamComponents(
        names=tuple(carried.names),
        vectors=torch.stack(carried.parts),
        stream=seen["stream"][0, :, -1].double(),
        layer=layer,
        tokens=seen.tokens[0],
    )


def _embedded(
    model: Any, arch: Architecture, seen: Activations
) -> Iterator[tuple[Component, Tensor]]:
    """Yield what the embedding wrote: token, position, and what is the same for all tokens."""
    stream = seen["stream"][0, :, 0].double()
    table = adapters.position_table(model, arch)
    if table is None:
        yield Component("token"), stream
        return
    ids = torch.tensor(seen.tokens[0])
    token = adapters.embedding_table(model).detach().cpu()[ids].double()
    position = table.cpu()[: len(ids)].double()
    norm = adapters.embedding_norm(model, arch)
    if norm is None:
        yield Component("token"), token
        yield Component("position"), stream - token
        return
    kind = adapters.token_type_embedding(model)
    constant = torch.zeros_like(token) if kind is None else kind.cpu().double().expand_as(token)
    scale = norm.scale(token + position + constant)
    yield Component("token"), norm.linear(token, scale)
    yield Component("position"), norm.linear(position, scale)
    constant = norm.linear(constant, scale)
    yield Component("bias"), constant if norm.bias is None else constant + norm.bias.double()


def _add_blocks(model: Any, arch: Architecture, text: str, layer: int, carried: Carried) -> None:
    sites = ("head_out", "resid_pre", "attn_out", "attn_added", "mlp_out")
    seen = read_sites(model, text, sites, layers=range(layer))

    def read(site: str, block: int) -> Tensor:
        return seen[site][0, :, block].double()

    for block in range(layer):
        norms = adapters.stream_norms(model, arch, block)
        stream = read("resid_pre", block)
        heads = read("head_out", block)
        for head in range(arch.n_heads):
            carried.add(Component("head", block, head), heads[:, head])
        bias = adapters.output_bias(model, block)
        if bias is not None:
            carried.add(Component("bias", block), _bias_share(model, arch, block, bias, read))
        if norms is not None:
            stream = stream + read("attn_added", block)
            carried.through(norms[0], stream, Component("bias", block))
            stream = norms[0](stream)
        carried.add(Component("mlp", block), read("mlp_out", block))
        if norms is not None:
            carried.through(norms[1], stream + read("mlp_out", block), Component("bias", block))


def _bias_share(model: Any, arch: Architecture, block: int, bias: Tensor, read: Any) -> Tensor:
    """Return b_O's share of what attention adds, [pos, d_model]."""
    out = read("attn_out", block)
    bias = bias.cpu().double().expand_as(out)
    norm = adapters.post_attention_norm(model, arch, block)
    return bias if norm is None else norm.linear(bias, norm.scale(out))
