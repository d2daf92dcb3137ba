"""Published sizes, against the configurations that transformers carries as defaults."""

import pytest
import transformers

from wvprobe._types import Result
from wvprobe.budget import HeadBudget, known_architectures
from wvprobe.errors import InputError

# Models whose sizes are the defaults of their family's configuration class.
DEFAULTS = {
    "BERT-base": "BertConfig",
    "GPT-2": "GPT2Config",
    "Mistral-7B": "MistralConfig",
    "Gemma-7B": "GemmaConfig",
    "DeepSeek-V3": "DeepseekV3Config",
}


@pytest.mark.parametrize(("name", "kind"), DEFAULTS.items())
def test_sizes_are_those_of_transformers_defaults(name, kind):
    found, config = known_architectures()[name], getattr(transformers, kind)()
    assert found.d_model == config.hidden_size
    assert found.n_layers == config.num_hidden_layers
    assert found.n_heads == config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None)
    assert found.n_kv_heads == (kv_heads or found.n_heads)
    if name == "DeepSeek-V3":
        assert found.d_head == config.qk_nope_head_dim + config.qk_rope_head_dim
        assert found.d_head_v == config.v_head_dim
    else:
        width = getattr(config, "head_dim", None) or found.d_model // found.n_heads
        assert found.d_head == found.d_head_v == width


def test_every_model_has_a_source_and_a_name_of_its_own(tmp_path):
    known = known_architectures()
    assert len(known) >= 12
    assert len({budget.name for budget in known}) == len(known)
    assert all(budget.source and budget.year for budget in known)
    frame = known.to_frame()
    assert frame["year"].is_monotonic_increasing
    row = frame.set_index("name").loc["GLM-4.5"]
    assert 5120 % 96 and not row["divides_d_model"] and not row["fills_d_model"]
    assert known["T5-11B"].divides_d_model and not known["T5-11B"].fills_d_model
    assert Result.load(known.save(tmp_path)).to_frame().equals(frame)


@pytest.mark.real_model
def test_the_packaged_model_has_the_sizes_of_the_table(smollm2):
    from wvprobe.adapters import architecture

    arch, found = architecture(smollm2), known_architectures()["SmolLM2-135M"]
    sizes = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_head_v", "n_layers")
    assert all(getattr(arch, size) == getattr(found, size) for size in sizes)


def test_left_out_sizes_follow_from_the_others():
    found = HeadBudget(d_model=42, n_heads=7, d_head=6)
    assert (found.n_kv_heads, found.d_head_v) == (7, 6)
    assert found.fills_d_model and found.divides_d_model


def test_wrong_sizes_are_refused():
    with pytest.raises(InputError, match="`n_heads` must be an int from 1 on. Got 0"):
        HeadBudget(d_model=42, n_heads=0, d_head=6)
    with pytest.raises(InputError, match="`n_kv_heads` must be a divisor of n_heads = 7"):
        HeadBudget(d_model=42, n_heads=7, d_head=6, n_kv_heads=3)
    with pytest.raises(InputError, match="one of BERT-base.*Got 'GPT-9'"):
        known_architectures()["GPT-9"]
