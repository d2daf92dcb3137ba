"""docs/robustness.md names tests that are there; and holds those faults that no other file does."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from wvprobe.activations import capture
from wvprobe.models import load
from wvprobe.testing import tiny_tokenizer

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "robustness.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(test_\w+)::(test_\w+)`", PAGE)


def test_every_fault_has_its_tests_and_they_are_there():
    rows = re.findall(r"^\| (\d+) \|.*\|$", PAGE, flags=re.MULTILINE)
    assert rows == [str(number) for number in range(1, 26)]
    for row in re.findall(r"^\| \d+ \|.*\|$", PAGE, flags=re.MULTILINE):
        assert "::" in row
    for file, name in NAMED:
        source = (TESTS / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^ *def {name}\(", source, flags=re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_model_made_for_sdpa_shows_its_attention(kernel, small_config):
    """That kernel gives no weights; what is read is what an eager model computes."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(small_config, attn_implementation=kernel)
    assert made.config._attn_implementation == kernel
    reference = transformers.LlamaForCausalLM(small_config)
    reference.load_state_dict(made.state_dict())
    reference.set_attn_implementation("eager")
    model = load(made.eval(), tokenizer=tiny_tokenizer("llama"))
    seen = capture(model, "The river bank is close.", "pattern")
    tokens = torch.tensor(seen.tokens)
    with torch.no_grad():
        expected = reference.eval()(tokens, output_attentions=True).attentions
    torch.testing.assert_close(seen["pattern"][0], torch.stack(expected)[:, 0])
    torch.testing.assert_close(seen["pattern"].sum(-1), torch.ones_like(seen["pattern"].sum(-1)))
