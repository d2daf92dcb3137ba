"""Head budgets: held against models' own parameters, published figures, and pen and paper."""

import dataclasses

import pytest
import torch
import transformers

from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.budget import (
    HeadBudget,
    KnownArchitectures,
    Rest,
    alternatives,
    head_scaling,
    known_architectures,
)
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.testing import FAMILIES, tiny_model

# Models whose sizes are the defaults of their family's configuration class.
DEFAULTS = {
    "GPT": "OpenAIGPTConfig",
    "BERT-base": "BertConfig",
    "GPT-2": "GPT2Config",
    "CTRL": "CTRLConfig",
    "T5-small": "T5Config",
    "GPT-Neo-1.3B": "GPTNeoConfig",
    "GPT-J-6B": "GPTJConfig",
    "GPT-NeoX-20B": "GPTNeoXConfig",
    "OPT-125M": "OPTConfig",
    "LLaMA-7B": "LlamaConfig",
    "Llama-2-7B": "LlamaConfig",
    "Mistral-7B": "MistralConfig",
    "Mixtral-8x7B": "MixtralConfig",
    "Gemma-7B": "GemmaConfig",
    "Gemma-2-2B": "Gemma2Config",
    "Phi-1.5": "PhiConfig",
    "Phi-3-mini": "Phi3Config",
    "OLMo-7B": "OlmoConfig",
    "StableLM-3B-4E1T": "StableLmConfig",
    "Persimmon-8B": "PersimmonConfig",
    "StarCoder2-3B": "Starcoder2Config",
    "Command-R": "CohereConfig",
    "DeepSeek-V3": "DeepseekV3Config",
    "ModernBERT-base": "ModernBertConfig",
    "Llama-4-Scout": "Llama4TextConfig",
    "SmolLM3-3B": "SmolLM3Config",
    "gpt-oss-120b": "GptOssConfig",
    "MiniMax-M2": "MiniMaxM2Config",
}


@pytest.mark.parametrize(("name", "kind"), DEFAULTS.items())
def test_sizes_are_those_of_transformers_defaults(name, kind):
    found, config = known_architectures()[name], getattr(transformers, kind)()

    def first(*keys):
        return next((v for key in keys if (v := getattr(config, key, None)) is not None), None)

    assert found.d_model == first("hidden_size", "d_model", "n_embd")
    assert found.n_layers == first("num_hidden_layers", "n_layer", "num_layers")
    assert found.n_heads == first("num_attention_heads", "n_head", "num_heads")
    assert found.n_kv_heads == (first("num_key_value_heads") or found.n_heads)
    if name == "DeepSeek-V3":
        assert found.d_head == config.qk_nope_head_dim + config.qk_rope_head_dim
        assert found.d_head_v == config.v_head_dim
        assert (found.kv_rank, found.q_rank) == (config.kv_lora_rank, config.q_lora_rank)
        assert found.d_shared_key == config.qk_rope_head_dim
    else:
        width = first("head_dim", "d_kv") or found.d_model // found.n_heads
        assert found.d_head == found.d_head_v == width


@pytest.mark.parametrize(("name", "kind"), DEFAULTS.items())
def test_published_parameters_are_those_of_transformers_defaults(name, kind):
    config = getattr(transformers, kind)()
    auto = transformers.AutoModelForCausalLM
    if kind in ("BertConfig", "ModernBertConfig"):
        auto = transformers.AutoModelForMaskedLM
    if kind == "T5Config":
        auto = transformers.AutoModelForSeq2SeqLM
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.from_config(config).parameters())
    assert known_architectures()[name].published_parameters == pytest.approx(count, rel=0.02)


def test_falcon_is_confirmed_but_for_the_flag_that_shares_its_keys():
    found, config = known_architectures()["Falcon-7B"], transformers.FalconConfig()
    assert config.multi_query and found.n_kv_heads == 1
    sizes = (config.hidden_size, config.num_attention_heads, config.num_hidden_layers)
    assert (found.d_model, found.n_heads, found.n_layers) == sizes


def test_the_table_has_names_sources_and_all_that_was_asked_for(tmp_path):
    known = known_architectures()
    assert len(known) >= 80 and len({budget.name for budget in known}) == len(known)
    assert all(b.source and b.year and b.family and b.published_parameters for b in known)
    assert all(("https://" in b.source) or b.name == "GPT" for b in known)
    families = {budget.family for budget in known}
    asked = (
        "Transformer BERT GPT T5 PaLM Llama Mistral Gemma Qwen Phi OLMo DeepSeek Falcon MPT "
        "EleutherAI SmolLM"
    ).split()
    assert set(asked) <= families
    assert {b.kind for b in known} == {"MHA", "GQA", "MQA", "MLA"}
    frame = known.to_frame()
    assert frame["year"].is_monotonic_increasing and frame["year"].min() == 2017
    assert "GPT-3" in known and "GPT-9" not in known
    loaded = Result.load(known.save(tmp_path))
    assert isinstance(loaded, KnownArchitectures) and loaded.to_frame().equals(frame)


def test_divisibility_is_counted():
    known = known_architectures()
    counted = known.divisibility().set_index("split")
    assert counted["models"].sum() == len(known)
    assert counted["share"].sum() == pytest.approx(1.0)
    undivided = counted.loc["n_heads does not divide d_model"]
    assert undivided["names"] == "GLM-4.5" and 5120 % 96
    assert "T5-11B" in counted.loc["another width, n_heads divides d_model"]["names"]
    assert "GPT-3" in counted.loc["n_heads · d_head = d_model"]["names"]


class TestParameters:
    """Three ways to a count, each held against the model's own."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_from_a_loaded_model(self, family, tiny):
        found = HeadBudget.from_model(tiny(family))
        assert found.n_parameters == FAMILIES[family].parameters
        assert isinstance(found.rest, Rest)
        assert found.causal == (family != "bert")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_from_a_config(self, family, tiny):
        spec = FAMILIES[family]
        found = HeadBudget.from_config({"model_type": spec.model_type, **spec.config})
        assert found.n_parameters == spec.parameters
        loaded = HeadBudget.from_model(tiny(family))
        assert found == dataclasses.replace(loaded, name="", family=found.family)

    # By hand, from the sizes in testing.FAMILIES.
    NUMBERS = {
        "gpt2": HeadBudget(
            35, 5, n_layers=3, biases="QKVO",
            rest=Rest(409, 53, mlp_biases=True, norm_biases=True, n_positions=257),
        ),
        "llama": HeadBudget(
            42, 6, d_head=14, n_kv_heads=2, n_layers=3,
            rest=Rest(409, 53, gated=True, head="untied"),
        ),
        "qwen3": HeadBudget(
            42, 6, d_head=10, n_kv_heads=2, n_layers=3, qk_norm=True,
            rest=Rest(409, 53, gated=True, head="untied"),
        ),
        "gemma2": HeadBudget(
            42, 6, d_head=10, n_kv_heads=2, n_layers=3,
            rest=Rest(409, 53, gated=True, norms_per_layer=4),
        ),
        "phi": HeadBudget(
            39, 3, n_layers=3, biases="QKVO",
            rest=Rest(
                409, 53, mlp_biases=True, norm_biases=True, norms_per_layer=1, head="untied",
                head_bias=True,
            ),
        ),
        "bert": HeadBudget(
            35, 5, n_layers=3, biases="QKVO", causal=False,
            rest=Rest(
                409, 53, mlp_biases=True, norm_biases=True, n_positions=257, n_token_types=2,
                head_bias=True, head_transform=True,
            ),
        ),
        "deepseek_v3": HeadBudget(
            44, 3, d_head=13, d_head_v=11, n_layers=3, kv_rank=19, q_rank=17, d_shared_key=6,
            rest=Rest(
                409, 53, gated=True, head="untied", n_experts=4, d_expert=12, n_active_experts=2,
                d_shared_expert=12, n_dense_layers=1,
            ),
        ),
    }  # fmt: skip

    @pytest.mark.parametrize("family", NUMBERS)
    def test_from_numbers(self, family):
        assert self.NUMBERS[family].n_parameters == FAMILIES[family].parameters

    @pytest.mark.parametrize("family", FAMILIES)
    def test_matrices_have_the_model_s_own_shapes(self, family, tiny):
        model = tiny(family)
        found, attention = HeadBudget.from_model(model), model.blocks[0].attn
        if found.kind == "MLA":
            parts = {
                "W_DQ": "q_a_proj", "W_UQ": "q_b_proj", "W_O": "o",
            }  # fmt: skip
            for name, part in parts.items():
                weight = getattr(attention, part).original_component.weight
                assert found.matrices[name] == tuple(weight.T.shape)
            return
        for letter in "QKVO":
            weight = getattr(attention, f"W_{letter}")
            assert found.layer_parameters[f"W_{letter}"] == weight.numel()
            has_bias = getattr(attention, letter.lower()).original_component.bias is not None
            assert (f"b_{letter}" in found.layer_parameters) == has_bias
            if has_bias:
                bias = getattr(attention, f"b_{letter}")
                assert found.layer_parameters[f"b_{letter}"] == bias.numel()

    def test_variants_of_a_family(self, tiny):
        for family, override in (
            ("llama", {"attention_bias": True, "mlp_bias": True}),
            ("llama", {"tie_word_embeddings": True}),
            ("gemma2", {"attention_bias": True, "num_key_value_heads": 1}),
            ("gpt2", {"n_inner": None, "tie_word_embeddings": False}),
            ("deepseek_v3", {"q_lora_rank": None}),
            ("deepseek_v3", {"attention_bias": True}),
        ):
            model = tiny_model(family, **override)
            found = HeadBudget.from_model(model)
            assert found.n_parameters == adapters.n_parameters(model), (family, override)
            assert isinstance(found.rest, Rest), (family, override)

    @pytest.mark.parametrize(
        "config",
        [
            transformers.GPTNeoXConfig(attention_bias=False, num_hidden_layers=2),
            transformers.OPTConfig(enable_bias=False, num_hidden_layers=2),
            transformers.OPTConfig(do_layer_norm_before=False, num_hidden_layers=2),
            transformers.LlamaConfig(mlp_bias=True, num_key_value_heads=4, num_hidden_layers=2),
            transformers.Qwen3Config(attention_bias=True, num_hidden_layers=2),
        ],
        ids=lambda config: config.model_type,
    )
    def test_options_of_configs(self, config):
        # from_config itself holds the arithmetic against the model that transformers builds.
        assert HeadBudget.from_config(config).n_parameters > 0

    @pytest.mark.parametrize(("family", "key"), [("mixtral", 8), ("gemma", 0)])
    def test_further_families_from_configs(self, family, key):
        found = HeadBudget.from_config(transformers.AutoConfig.for_model(family))
        assert isinstance(found.rest, Rest) and found.rest.n_experts == key
        published = {"mixtral": "Mixtral-8x7B", "gemma": "Gemma-7B"}[family]
        expected = known_architectures()[published].published_parameters
        assert found.n_parameters == pytest.approx(expected, rel=1e-3)

    def test_a_config_without_a_head_has_none(self):
        config = transformers.BertConfig(architectures=["BertModel"])
        with_head = HeadBudget.from_config(transformers.BertConfig())
        found = HeadBudget.from_config(config)
        assert "head" not in found.rest_parameters
        head = 768**2 + 768 + 2 * 768 + 30522
        assert found.n_parameters == with_head.n_parameters - head

    def test_options_that_are_not_known_are_refused(self):
        with pytest.raises(UnsupportedError, match="options that are not known.*explain"):
            HeadBudget.from_config(transformers.PhiConfig(qk_layernorm=True))
        with pytest.raises(UnsupportedError, match="'mamba' are not known here; known are gpt2"):
            HeadBudget.from_config(transformers.MambaConfig())
        with pytest.raises(InputError, match="`config` must be a transformers"):
            HeadBudget.from_config("gpt2")
        with pytest.raises(InputError, match="transformers cannot read this config"):
            HeadBudget.from_config({"model_type": "nothing"})

    def test_parts_that_the_sizes_do_not_explain_are_refused(self):
        model = tiny_model("llama")
        model.blocks[1].attn.k.original_component.bias = torch.nn.Parameter(torch.zeros(28))
        with pytest.raises(UnsupportedError, match="layer 1 .* 9,436 .* explain 9,408"):
            HeadBudget.from_model(model)

    def test_a_family_without_a_config_is_counted(self, tiny, monkeypatch):
        monkeypatch.delitem(
            __import__("wvprobe.budget._configs").budget._configs._FAMILIES, "llama"
        )
        found = HeadBudget.from_model(tiny("llama"))
        assert isinstance(found.rest, int)
        assert found.n_parameters == FAMILIES["llama"].parameters
        assert set(found.flops(3)) == {"projections", "scores", "values"}

    @pytest.mark.real_model
    def test_the_packaged_models(self, smollm2, minilm):
        found = HeadBudget.from_model(smollm2)
        assert found.n_parameters == 134_515_008 == adapters.n_parameters(smollm2)
        assert found.layer_parameters == {
            "W_Q": 331_776, "W_K": 110_592, "W_V": 110_592, "W_O": 331_776,
        }  # fmt: skip
        assert found.kv_cache_bytes() == 30 * 3 * 128 * 2
        sizes = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_head_v", "n_layers")
        known = known_architectures()["SmolLM2-135M"]
        assert all(getattr(found, size) == getattr(known, size) for size in sizes)
        encoder = HeadBudget.from_model(minilm)
        named = adapters.canonical_parameters(minilm)
        body = sum(p.numel() for name, p in named if not name.startswith("cls."))
        assert encoder.n_parameters == body == adapters.n_parameters(minilm) == 22_565_376


class TestArithmetic:
    def test_gpt3_from_the_paper_s_numbers(self):
        rest = Rest(50_257, 49_152, mlp_biases=True, norm_biases=True, n_positions=2048)
        found = HeadBudget(12_288, 96, n_layers=96, biases="QKVO", rest=rest)
        assert found.n_parameters == pytest.approx(174.6e9, rel=1e-3)
        assert found.d_head == 128 and found.fills_d_model and found.kind == "MHA"

    def test_full_width_heads_of_gpt3(self):
        full = HeadBudget(12_288, 96, d_head=12_288, n_layers=96)
        qkv = sum(full.layer_parameters[name] for name in ("W_Q", "W_K", "W_V"))
        assert qkv == 43_486_543_872
        assert 96 * qkv == pytest.approx(4.1747e12, rel=1e-4)
        assert full.n_attention == pytest.approx(5.5663e12, rel=1e-4)

    @pytest.mark.parametrize(
        ("name", "kilobytes"),
        # DeepSeek-AI 2025, https://arxiv.org/abs/2505.09343, table 1: bfloat16, decimal kilobytes.
        [("DeepSeek-V3", 70.272), ("Qwen2.5-72B", 327.680), ("Llama-3.1-405B", 516.096)],
    )
    def test_cached_bytes_are_the_published_ones(self, name, kilobytes):
        found = known_architectures()[name]
        assert found.kv_cache_bytes() == round(1000 * kilobytes)
        assert found.kv_cache_bytes("float32") == 2 * found.kv_cache_bytes()

    def test_latent_cache_in_the_paper_s_proportions(self):
        # DeepSeek-AI 2024, table 1 of https://arxiv.org/abs/2405.04434: 9/2 d_h a layer.
        plain = HeadBudget(5120, 128, d_head=128, n_layers=60)
        latent = next(o for o in alternatives(plain) if o.kind == "MLA")
        assert latent.kv_bytes == 2 * 60 * 9 * 128 // 2

    @pytest.mark.parametrize("family", ["gpt2", "llama", "deepseek_v3", "bert"])
    def test_flops_are_those_that_torch_counts(self, family, tiny):
        from torch.utils.flop_counter import FlopCounterMode

        from wvprobe.testing import _hf_model

        model, found, n = _hf_model(family, 0, {}), HeadBudget.from_model(tiny(family)), 7
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.arange(3, 3 + n)[None], use_cache=False)
        expected = found.flops(n)
        if family == "deepseek_v3":
            # Each expert that a token reaches is run on it alone, but the counter sees them all.
            names = ("self_attn", "lm_head")
            by_module = counter.get_flop_counts()
            seen = sum(
                sum(counts.values())
                for module, counts in by_module.items()
                if module.endswith(names)
            )
            parts = ("projections", "scores", "values", "unembedding")
            assert seen == n * sum(expected[part] for part in parts)
        else:
            # Eager attention scores every pair, masked ones included, as n tokens that see n.
            assert counter.get_total_flops() == n * sum(expected.values())

    def test_absorbed_latents(self):
        found = known_architectures()["DeepSeek-V3"]
        expanded, absorbed = found.flops(1000), found.flops(1000, absorbed=True)
        assert absorbed["projections"] == expanded["projections"]
        assert absorbed["scores"] == 2 * 61 * 1000 * 128 * (512 + 64)
        assert absorbed["values"] == 2 * 61 * 1000 * 128 * 512
        assert expanded["scores"] == 2 * 61 * 1000 * 128 * 192
        with pytest.raises(InputError, match="`absorbed` must be False without latent"):
            HeadBudget(42, 7).flops(3, absorbed=True)

    def test_left_out_sizes_follow_from_the_others(self):
        found = HeadBudget(d_model=42, n_heads=7)
        assert (found.d_head, found.n_kv_heads, found.d_head_v) == (6, 7, 6)
        assert found.fills_d_model and found.divides_d_model
        assert HeadBudget(42, 6, n_kv_heads=1).kind == "MQA"
        assert HeadBudget(42, 6, n_kv_heads=2).kind == "GQA"
        other = HeadBudget(42, 6, d_head=10, n_kv_heads=2, d_head_v=11)
        assert other.matrices == {
            "W_Q": (42, 60), "W_K": (42, 20), "W_V": (42, 22), "W_O": (66, 42),
        }  # fmt: skip
        assert other.concat_width == 66 and not other.fills_d_model
        assert other.kv_cache_numbers == 2 * 21

    @pytest.mark.parametrize(
        ("numbers", "told"),
        [
            ({"n_heads": 0}, "`n_heads` must be an int of at least 1. Got 0"),
            ({"n_heads": 5}, "`d_head` must be given, since n_heads = 5 does not divide 42"),
            ({"n_heads": 7, "n_kv_heads": 3}, "`n_kv_heads` must be a divisor of n_heads = 7"),
            ({"n_heads": 7, "q_rank": 3}, "`q_rank` must be left out.*give kv_rank"),
            ({"n_heads": 7, "kv_rank": 3, "d_shared_key": 6}, "`d_shared_key` must be from 0 to"),
            ({"n_heads": 7, "kv_rank": 3, "n_kv_heads": 1}, "`n_kv_heads` must be 7"),
            ({"n_heads": 7, "kv_rank": 3, "qk_norm": True}, "`qk_norm` must be False"),
            ({"n_heads": 7, "biases": "QX"}, "`biases` must be one of 'Q', 'K', 'V', 'O'"),
            ({"n_heads": 7, "rest": -1}, "`rest` must be an int of at least 0"),
        ],
    )
    def test_wrong_sizes_are_refused(self, numbers, told):
        with pytest.raises(InputError, match=told):
            HeadBudget(d_model=42, **numbers)

    @pytest.mark.parametrize(
        ("numbers", "told"),
        [
            ({"d_mlp": -1}, "`d_mlp` must be at least 0"),
            ({"head": "bound"}, "`head` must be 'tied', 'untied' or 'none'"),
            ({"n_experts": 4}, "`n_active_experts` must be from 1 to n_experts = 4"),
            ({"n_experts": 4, "n_active_experts": 2}, "`d_expert` must be at least 1"),
        ],
    )
    def test_a_wrong_rest_is_refused(self, numbers, told):
        with pytest.raises(InputError, match=told):
            Rest(409, **numbers)

    def test_what_there_is_not_is_refused(self):
        found = HeadBudget(42, 7)
        with pytest.raises(InputError, match="`rest` must be told"):
            _ = found.n_parameters
        with pytest.raises(UnsupportedError, match="BERT-base that looks both ways keeps no keys"):
            known_architectures()["BERT-base"].kv_cache_bytes()
        with pytest.raises(InputError, match="`dtype` must be one of 'float64'"):
            found.kv_cache_bytes("float31")
        with pytest.raises(InputError, match="`context` must be an int of at least 1"):
            found.flops(0)
        with pytest.raises(InputError, match="one of Transformer-base.*Got 'GPT-9'"):
            known_architectures()["GPT-9"]

    def test_frame_lists_every_part(self):
        found = TestParameters.NUMBERS["gpt2"]
        frame = found.to_frame().set_index("part")
        assert frame["parameters"].sum() == found.n_parameters
        assert frame["share"].sum() == pytest.approx(1.0)
        assert frame.loc["b_V", "layer_parameters"] == 35
        assert frame["layer_parameters"].isna().sum() == 4


class TestAlternatives:
    def test_even_splits_cost_the_same_and_are_all_divisors(self):
        found = alternatives(HeadBudget(42, 7, n_layers=3))
        even = [option for option in found if option.kind == "even split"]
        assert [option.n_heads for option in even] == [1, 2, 3, 6, 7, 14, 21, 42]
        assert {option.layer_parameters for option in even} == {4 * 42**2}
        assert {option.kv_bytes for option in even} == {2 * 3 * 84}
        assert len({option.flops for option in even}) == 1
        assert all(sum(option.widths) == 42 for option in even)
        breaks = {option.n_heads: "; ".join(option.breaks) for option in even}
        assert "odd widths" in breaks[14] and "odd widths" not in breaks[7]
        assert "pads d_head 42 to 64" in breaks[1]

    def test_gpt3(self, tmp_path):
        found = alternatives(known_architectures()["GPT-3"], context=1024)
        frame = found.to_frame()
        own = frame.iloc[0]
        assert (own["kind"], own["breaks"], own["parameters_ratio"]) == ("as given", "", 1.0)
        full = frame[frame["kind"] == "full width"].iloc[0]
        assert full["layer_qkv"] == 43_486_543_872 and full["parameters_ratio"] == 96
        assert full["concat_width"] == 96 * 12_288 and "W_O is not square" in full["breaks"]
        assert "beyond FlashAttention-2's 256" in full["breaks"]
        shared = frame[frame["kind"] == "MQA"].iloc[0]
        assert shared["kv_ratio"] == pytest.approx(1 / 96) and shared["breaks"] == ""
        uneven = frame[frame["kind"] == "uneven split"]
        assert (uneven["parameters_ratio"] == 1).all() and (uneven["n_heads"] == 96).all()
        assert uneven["breaks"].str.contains("cannot share keys and values").all()
        assert uneven["breaks"].iloc[0].startswith("no tensor holds all heads")
        assert "(+50% of" in uneven["breaks"].iloc[0]
        assert Result.load(found.save(tmp_path)).to_frame().equals(frame)

    @pytest.mark.parametrize("heads", range(1, 9))
    @pytest.mark.parametrize("width", [1, 2, 7, 10])
    def test_uneven_widths_sum_to_the_whole(self, heads, width):
        found = alternatives(HeadBudget(heads * width, heads, d_head=width))
        uneven = [option for option in found if option.kind == "uneven split"]
        assert bool(uneven) == (heads > 1 and width > 1)
        for option in uneven:
            assert sum(option.widths) == heads * width and min(option.widths) >= 1
            assert option.n_heads == heads and len(set(option.widths)) > 1

    def test_biases_norms_and_other_widths(self):
        budget = HeadBudget(42, 6, d_head=10, n_kv_heads=2, biases="QKVO", qk_norm=True)
        kinds = {}
        for option in alternatives(budget):
            kinds.setdefault(option.kind, []).append(option)
        (mha,) = kinds["MHA"]
        assert mha.layer_parameters == 4 * 42 * 60 + 3 * 60 + 42 + 20
        growing = kinds["uneven split"][-1]
        # Gains of its own for every head, where even heads share them.
        assert growing.layer_parameters == mha.layer_parameters - 20 + 2 * 60
        assert [option.n_kv_heads for option in kinds["GQA"]] == [3]  # 2 is its own
        (latent,) = kinds["MLA"]
        by_hand = 42 * 90 + 42 * 40 + 42 * 5 + 2 * 40 * 60 + 60 * 42 + 90 + 42 + 40
        assert latent.layer_parameters == by_hand
        assert latent.kv_bytes == 2 * 45

    def test_latent_attention_without_its_latents(self):
        found = alternatives(known_architectures()["DeepSeek-V3"])
        kinds = [option.kind for option in found]
        assert "MLA" not in kinds and "MHA" in kinds
        mha = found.options[kinds.index("MHA")]
        assert mha.layer_qkv == 7168 * 128 * (192 + 192 + 128)
        assert any("keys of 192 and values of 128" in text for text in mha.breaks)

    def test_more_heads_than_can_be_listed_are_refused(self):
        with pytest.raises(InputError, match="`n_heads` must be at most 1048576"):
            alternatives(HeadBudget(64, 10**9, n_layers=1, d_head=1))

    def test_nothing_is_cached_where_attention_looks_both_ways(self):
        frame = alternatives(known_architectures()["BERT-base"]).to_frame()
        assert frame["kv_bytes"].isna().all() and frame["kv_ratio"].isna().all()
        assert frame["flops_ratio"].iloc[0] == 1


class TestScaling:
    @staticmethod
    def models(rows):
        budgets = [
            HeadBudget(d, h, d_head=w, name=f"{family}-{d}", family=family, year=2020)
            for family, d, h, w in rows
        ]
        return KnownArchitectures(known_architectures().provenance, tuple(budgets))

    def test_a_constant_width_has_slope_one(self, tmp_path):
        rows = [(f, d, d // 64, 64) for f, k in (("a", 1), ("b", 3)) for d in (256 * k, 1024 * k)]
        found = head_scaling(self.models(rows))
        assert found.slope("n_heads") == pytest.approx((1.0, 1.0, 1.0))
        assert found.slope("d_head", "within families") == pytest.approx((0.0, 0.0, 0.0))
        assert found.common_share.tolist() == [1.0, 1.0, 1.0]
        again = Result.load(found.save(tmp_path))
        assert again.to_frame().equals(found.to_frame())

    def test_slopes_are_those_of_numpy_and_families_are_taken_apart(self):
        import numpy

        rows = [("a", 128, 2, 64), ("a", 512, 16, 48), ("b", 384, 9, 40), ("c", 900, 10, 128)]
        found = head_scaling(self.models(rows))
        d, h, w = numpy.log(numpy.array([row[1:] for row in rows], dtype=float)).T
        for name, y in (("n_heads", h), ("d_head", w), ("n_heads · d_head", h + w)):
            assert found.slope(name)[0] == pytest.approx(numpy.polyfit(d, y, 1)[0])
        # Only the two models of family a can be compared within a family.
        assert found.slope("n_heads", "within families")[0] == pytest.approx(1.5)
        frame = found.to_frame().set_index(["scope", "quantity"])
        assert tuple(frame.loc[("within families", "d_head")][["n", "n_families"]]) == (2, 1)
        assert float(found.common_share[0]) == 0.5

    def test_published_models(self):
        found = head_scaling()
        slope, low, high = found.slope("n_heads")
        assert low < slope < high
        total = found.slope("n_heads")[0] + found.slope("d_head")[0]
        assert found.slope("n_heads · d_head")[0] == pytest.approx(total)
        assert head_scaling(seed=0).slopes.equal(found.slopes)
        assert not head_scaling(seed=1).slopes.equal(found.slopes)
        wide = head_scaling(widths=[256])
        assert float(wide.common_share[0]) < float(found.common_share[0])

    def test_too_few_models_are_refused(self):
        with pytest.raises(InputError, match="at least three models of at least two families"):
            head_scaling(self.models([("a", 128, 2, 64), ("a", 256, 4, 64), ("a", 512, 8, 64)]))
        with pytest.raises(InputError, match="one of"):
            head_scaling().slope("n_head")
