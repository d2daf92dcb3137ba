"""What is put in place of a site, in every family: what comes after must be computed from it."""

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import read_sites
from wvprobe.errors import UnsupportedError
from wvprobe.testing import FAMILIES
from wvprobe.words import encode

TEXTS = ("The bank by the river.", "The boat by the river.")


def _seen(model, sites, changes=None, layers=None):
    arch = adapters.architecture(model)
    with adapters.changing(model, arch, changes or {}):
        return read_sites(model, TEXTS, sites, layers=layers, batch_size=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_is_computed_from_changed_values(family, tiny):
    """z = Σ_j pattern v by hand, with one text's values in the other's place."""
    model = tiny(family)
    before = _seen(model, ["pattern", "v", "z"], layers=1)
    n_heads, n_kv_heads = before["pattern"].shape[2], before["v"].shape[3]
    values = before["v"][:, :, 0].repeat_interleave(n_heads // n_kv_heads, dim=2)
    after = _seen(model, ["z"], {("v", 1): lambda value: value.flip(0)}, layers=1)["z"]
    expected = torch.einsum("bhij,bjhe->bihe", before["pattern"][:, 0], values.flip(0))
    torch.testing.assert_close(after[:, :, 0], expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(after, before["z"], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_that_can_be_changed_is_seen_changed_and_put_back(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    sites = ["resid_pre", "q", "k", "v", "z", "attn_out", "attn_added", "mlp_out", "resid_post"]
    for site in sites:
        if arch.mla and site in ("q", "k"):
            continue  # put together from several hook points
        before = _seen(model, [site], layers=1)[site]
        changed = _seen(model, [site], {(site, 1): lambda value: value.roll(1, dims=-1)}, layers=1)
        torch.testing.assert_close(changed[site], before.roll(1, dims=-1))
        torch.testing.assert_close(_seen(model, [site], layers=1)[site], before)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma2", "bert", "deepseek_v3"])
def test_logits_are_the_models_and_follow_a_change(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    tokens = torch.tensor([encode(model, text).ids for text in TEXTS])
    mask = torch.ones_like(tokens)
    expected = model(tokens, attention_mask=mask)
    torch.testing.assert_close(adapters.logits(model, tokens, mask), expected)
    with adapters.changing(model, arch, {("resid_post", 2): lambda value: value.flip(0)}):
        flipped = adapters.logits(model, tokens, mask)
    torch.testing.assert_close(flipped, expected.flip(0))


def test_changes_are_taken_back_after_an_error(tiny):
    model = tiny("llama")
    before = _seen(model, ["resid_post"])["resid_post"]

    def fail(_value):
        raise UnsupportedError("not here")

    with pytest.raises(UnsupportedError, match="not here"):
        _seen(model, ["resid_post"], {("z", 0): fail})
    torch.testing.assert_close(_seen(model, ["resid_post"])["resid_post"], before)
