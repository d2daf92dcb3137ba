"""A stream's components add up to it, and each is what taking it away would say."""

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.components import (
    Component,
    components_at,
    position_parts,
    stream_components,
    stream_sources,
)
from wvprobe.errors import InputError
from wvprobe.testing import FAMILIES, tiny_model

TEXT = "The river bank is close to here."


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_components_add_up(family, layer, tiny):
    model = tiny(family)
    found = stream_components(model, TEXT, layer=layer)
    assert found.reconstruction_error < 1e-5
    heads = adapters.architecture(model).n_heads
    assert sum(name.kind == "head" for name in found.names) == layer * heads
    assert sum(name.kind == "mlp" for name in found.names) == layer
    stream = capture(model, TEXT, "stream", layers=layer)["stream"][0, :, 0].double()
    assert torch.equal(stream, found.stream)


@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_tokens_of_several_texts(family, tiny):
    """Batched reading of a token each is every text alone; a text may be asked for twice."""
    model = tiny(family)
    rows = [(TEXT, 3), ("A boat on the other bank was empty.", 5), (TEXT, 1)]
    for layer in (0, 3):
        found = components_at(model, [t for t, _ in rows], [p for _, p in rows], layer=layer)
        assert found.reconstruction_error < 1e-5
        for row, (text, at) in enumerate(rows):
            alone = stream_components(model, text, layer=layer)
            assert found.names == alone.names and found.tokens[row] == alone.tokens[at]
            scale = float(alone.stream[at].norm())
            torch.testing.assert_close(
                found.vectors[:, row], alone.vectors[:, at], rtol=0, atol=1e-5 * scale
            )


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert"])
def test_position_is_a_component_of_its_own(family, tiny):
    """The same token at two places differs at the embedding by its position (and the norm)."""
    model = tiny(family)
    found = stream_components(model, "bank bank bank bank", layer=0)
    kinds = [name.kind for name in found.names]
    assert kinds[:2] == ["token", "position"]
    same = [p for p, t in enumerate(found.tokens) if t == found.tokens[-2]]
    assert len(same) > 1
    token, position = found.vectors[0][same], found.vectors[1][same]
    spread = (position - position[0]).norm() / position.norm()
    assert spread > 0.5
    if family != "bert":  # whose norm scales the token's part by the sum
        assert torch.equal(token, token[:1].expand_as(token))
        table = adapters.position_table(model, adapters.architecture(model))
        torch.testing.assert_close(found.vectors[1], table[: len(found.tokens)].double())


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2"])
def test_a_head_of_the_last_block_is_what_the_stream_loses_without_it(family):
    """The causal check: zeroing z of one head takes away its component, and nothing else."""
    model = tiny_model(family)
    facts = adapters.architecture(model)
    # Where the MLP reads what the head wrote, only what attention adds is held against it.
    site = "resid_post" if facts.wiring == "parallel" else "attn_added"
    found = stream_components(model, TEXT, layer=facts.n_layers)
    part = found.vectors[found.names.index(Component("head", 2, 1))]
    width = facts.d_head_v

    def zero(z, hook):
        z = z.clone().reshape(*z.shape[:2], facts.n_heads, width)
        z[:, :, 1] = 0
        return z

    plain = capture(model, TEXT, site, layers=2)[site][0, :, 0].double()
    with model.hooks(fwd_hooks=[("blocks.2.attn.o.hook_in", zero)]):
        without = capture(model, TEXT, site, layers=2)[site][0, :, 0].double()
    if facts.sandwich:  # the norm's scale moves with the head, so only the direction is kept
        cosine = torch.cosine_similarity(plain - without, part, dim=-1)
        assert cosine.min() > 0.8
    else:
        torch.testing.assert_close(plain - without, part, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 3])
def test_sources_add_up(family, layer, tiny):
    model = tiny(family)
    sources = stream_sources(model, TEXT, layer=layer)
    stream = stream_components(model, TEXT, layer=layer).stream
    error = (sources.sum(dim=0) - stream).norm(dim=-1) / stream.norm(dim=-1)
    assert error.max() < 1e-5
    if layer == 0:
        own = sources.diagonal(dim1=0, dim2=1).T
        torch.testing.assert_close(own, stream, rtol=1e-5, atol=1e-5)
        assert sources.abs().sum() == own.abs().sum()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_source_is_what_the_heads_brought_from_it(family, tiny):
    """Block 0 by hand: pattern · v W_O of all heads; BERT's first norm after it, scale frozen."""
    model = tiny(family)
    sources = stream_sources(model, TEXT, layer=1)
    seen = capture(model, TEXT, ["pattern", "v", "resid_pre", "attn_added"], layers=0)
    pattern, values = seen["pattern"][0, 0].double(), seen["v"][0, :, 0].double()
    weight = model.blocks[0].attn.W_O.detach().double()
    values = values.repeat_interleave(len(weight) // values.shape[1], dim=1)
    source, at = 2, 5
    brought = torch.einsum("h,he,hed->d", pattern[:, at, source], values[source], weight)
    if family == "bert":
        block = model.blocks[0]
        x = (seen["resid_pre"] + seen["attn_added"])[0, at, 0].double()
        mid = block.ln1.original_component(x.float())
        y = mid + capture(model, TEXT, "mlp_out", layers=0)["mlp_out"][0, at, 0]
        for ln, into in ((block.ln1, x), (block.ln2, y.double())):
            gain = ln.original_component.weight.detach().double()
            brought = gain * (brought - brought.mean()) / into.var(correction=0).sqrt()
    torch.testing.assert_close(sources[source, at], brought, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(sources[at, at], brought)


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert", "llama"])
def test_the_position_alone_is_carried_as_among_all(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    sites = ["resid_pre", "attn_added", "mlp_out"]
    texts = [TEXT, "A boat."]
    seen = capture(model, texts, sites)
    for item, text in enumerate(texts):
        found = position_parts(model, arch, seen, item)
        if family == "llama":
            assert found is None
            continue
        for layer in range(arch.n_layers):
            whole = stream_components(model, text, layer=layer)
            expected = whole.vectors[whole.names.index(Component("position"))]
            torch.testing.assert_close(found[layer], expected, rtol=1e-5, atol=1e-6)


def test_streams_that_are_not_there(tiny):
    with pytest.raises(InputError, match=r"`layer` must be in 0\.\.3. Got 4"):
        stream_components(tiny("llama"), TEXT, layer=4)


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    for model, layer in ((smollm2, 30), (minilm, 6)):
        assert stream_components(model, TEXT, layer=layer).reconstruction_error < 1e-5
