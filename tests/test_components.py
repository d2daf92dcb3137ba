"""A stream's components add up to it, and each is what taking it away would say."""

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.components import Component, stream_components
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


def test_streams_that_are_not_there(tiny):
    with pytest.raises(InputError, match=r"`layer` must be in 0\.\.3. Got 4"):
        stream_components(tiny("llama"), TEXT, layer=4)


@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    for model, layer in ((smollm2, 30), (minilm, 6)):
        assert stream_components(model, TEXT, layer=layer).reconstruction_error < 1e-5
