"""The small models that other people's tests stand on."""

import subprocess
import sys

import pytest
import torch

from wvprobe.adapters import architecture, weight_hash
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights
from wvprobe.testing import FAMILIES, _hf_model, induction_model, tiny_model

PROMISED = "gpt2 opt bloom gpt_neox phi llama mistral qwen2 qwen3 gemma2 gemma3 bert deepseek_v3"


def test_the_promised_families_are_there():
    assert set(FAMILIES) == set(PROMISED.split())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_count_and_names(family, tiny):
    # Counted before TransformerLens splits a fused projection, which would count it twice.
    model = _hf_model(family, 0, {})
    assert sum(p.numel() for p in model.parameters()) == FAMILIES[family].parameters
    assert tiny(family).cfg.model_name == f"tiny:{family}"


@pytest.mark.parametrize("family", FAMILIES)
def test_gains_and_biases_are_far_from_one_and_zero(family, tiny):
    for name, parameter in tiny(family).original_model.named_parameters():
        if parameter.dim() == 1:
            assert parameter.abs().mean() > 0.1, name
            assert (parameter - 1).abs().mean() > 0.1, name


def test_config_keys_reach_the_model():
    model = tiny_model("llama", num_hidden_layers=5, num_key_value_heads=3)
    facts = architecture(model)
    assert (facts.n_layers, facts.n_kv_heads) == (5, 3)


def test_unknown_keys_and_families_are_refused():
    with pytest.raises(InputError, match="`n_layerz` must be a key of GPT2Config"):
        tiny_model("gpt2", n_layerz=5)
    with pytest.raises(InputError, match="Did you mean 'llama'"):
        tiny_model("lama")


def test_seeds_differ_and_the_callers_random_state_is_left_alone():
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    one, other, again = (weight_hash(tiny_model("gpt2", seed=s)) for s in (0, 1, 0))
    assert one == again != other
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_another_process_builds_the_same_model(tiny):
    code = (
        "from wvprobe.testing import tiny_model; from wvprobe.adapters import weight_hash;"
        "m = tiny_model('bert'); print(weight_hash(m), m.to_tokens('a power bank')[0].tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    model = tiny("bert")
    here = f"{weight_hash(model)} {model.to_tokens('a power bank')[0].tolist()}"
    assert out.stdout.strip().splitlines()[-1] == here


@pytest.mark.parametrize("text", ["Żółć 你好 🙂", "a\tb\n\nc", "don't—stop", "bank" * 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_encode_any_text(family, text, tiny):
    model = tiny(family)
    tokens = model.to_tokens(text, truncate=False)[0]
    assert 0 < len(tokens) and int(tokens.max()) < 409
    if family != "bert":  # which lower-cases, and has [UNK]
        assert text in model.tokenizer.decode(tokens)


class TestInduction:
    """Known answers, written down beforehand."""

    @pytest.fixture
    def model(self):
        return induction_model()

    @pytest.fixture
    def run(self, model):
        half = torch.randint(5, 409, (1, 31), generator=torch.Generator().manual_seed(1))
        tokens = torch.cat([torch.tensor([[1]]), half, half], dim=1)
        logits, cache = model.run_with_cache(tokens)
        return tokens, logits, cache

    def test_the_first_head_attends_to_the_token_before(self, run):
        pattern = run[2]["blocks.0.attn.hook_pattern"][0]
        assert float(pattern[0].diagonal(-1).min()) > 0.99
        assert float(pattern[1].diagonal(-1).mean()) < 0.1

    def test_the_induction_head_attends_after_the_earlier_occurrence(self, run):
        pattern = run[2]["blocks.1.attn.hook_pattern"][0]
        queries = torch.arange(32, 63)
        assert float(pattern[1][queries, queries - 30].min()) > 0.99
        assert float(pattern[0][queries, queries - 30].mean()) < 0.1

    def test_it_predicts_the_repeated_token(self, run):
        tokens, logits, _ = run
        assert torch.equal(logits[0, 32:62].argmax(-1), tokens[0, 33:])

    def test_offset_one_is_preferred(self, model):
        heads = HeadWeights.from_model(model)
        constant = [float(heads.qk(0, 0, offset=o).matrix()[0, 0]) for o in range(-3, 7)]
        assert max(range(10), key=constant.__getitem__) - 3 == 1

    def test_the_induction_head_copies(self, model):
        heads = HeadWeights.from_model(model)
        circuit = heads.ov(1, 1)
        values = torch.linalg.eigvals(circuit.right @ heads.W_U @ heads.W_E @ circuit.left)
        assert float(values.real.sum() / values.abs().sum()) > 0.99

    def test_only_one_pair_composes_through_keys(self, model):
        heads = HeadWeights.from_model(model)
        scores = {}
        for writer in (0, 1):
            for reader in (0, 1):
                ov, qk = heads.ov(0, writer).matrix(), heads.qk(1, reader, offset=None).matrix()
                scores[writer, reader] = float((ov @ qk.T).norm() / ov.norm() / qk.norm())
        best = max(scores, key=scores.__getitem__)
        assert best == (0, 1)
        # A sub-space of 42 dimensions met exactly, against chance in 86.
        assert scores[best] == pytest.approx(42**-0.5, rel=0.01)
        assert all(s == pytest.approx(86**-0.5, rel=0.06) for p, s in scores.items() if p != best)
