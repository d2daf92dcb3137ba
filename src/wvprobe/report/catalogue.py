"""Every claim, in the order of the questions they belong to."""

from functools import cached_property
from typing import Any

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.contextual_drift import PairDriftResult, drift_pair
from wvprobe.report.claims import (
    Claim,
    Finding,
    judge_drift,
    judge_equal_cost,
    judge_full_width,
    judge_identity,
)

TEXT_A = "a power bank dropped into the river."
TEXT_B = "The river bank is close to here."
WORD, OTHER = "bank", "river"

QUESTIONS = {
    "1": "What does W_V carry?",
    "2": "Is the query-key dot product fixed by the token pair?",
    "3": "Are h parallel heads the same as h sequential ones?",
    "4": "What decides the number of heads?",
    "5": "Why split d_model evenly?",
}


class Measured:
    """A model, and what several claims and sections need of it, measured once."""

    def __init__(self, model: Any) -> None:
        """Measure nothing yet."""
        self.model = model

    @cached_property
    def bank(self) -> PairDriftResult:
        """The two 'bank' vectors by stream."""
        return drift_pair(self.model, TEXT_A, TEXT_B, word=WORD)


def different_vectors(measured: Measured) -> Finding:
    """Hold the two 'bank' vectors' cosine distance against same-sense pairs."""
    found = measured.bank
    limits = (1 - found.same_cosine[0]).tolist()
    return judge_drift((1 - found.cosine).tolist(), limits, found.n_same)


def concatenation(measured: Measured) -> Finding:
    """Hold Σ_h z_h W_O^h + b_O against what the model itself computes from Concat(z)."""
    model = measured.model
    arch = adapters.architecture(model)
    seen = capture(model, [TEXT_A, TEXT_B], ["z", "attn_out"])
    mask, errors = seen.mask, []
    for layer in range(arch.n_layers):
        w_o = adapters.output_weight(model, arch, layer).cpu().double()
        heads = seen["z"][:, :, layer].double()[mask]
        found = sum(heads[:, head] @ w_o[head] for head in range(arch.n_heads))
        bias = adapters.output_bias(model, layer)
        found = found if bias is None else found + bias.cpu().double()
        expected = seen["attn_out"][:, :, layer].double()[mask]
        errors += ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()
    return judge_identity(errors, len(errors))


def equal_cost(measured: Measured) -> Finding:
    """Count the loaded model's attention weights of one layer."""
    arch = adapters.architecture(measured.model)
    if arch.mla:
        return Finding(
            "not testable here",
            reason="Multi-head latent attention has no W_Q, W_K and W_V of the stream to count.",
        )
    shared = arch.d_model * (arch.d_head + arch.d_head_v)
    queries = arch.n_heads * shared
    own, unshared = queries + arch.n_kv_heads * shared, queries + arch.n_heads * shared
    return judge_equal_cost(arch.d_model, own, unshared)


CLAIMS = (
    Claim(
        "1.1",
        "W_Q and W_K carry routing, W_V carries content",
        "supported if v's decodability over its references exceeds q's and k's and exchanged "
        "values move the destination's content more than exchanged patterns do, intervals above "
        "0; refuted if neither",
    ),
    Claim(
        "1.2",
        "Each layer's W_V decides anew what flows on",
        "overlap of layers' W_V row spaces within .05 of random, and payload range over layers "
        "> .05",
    ),
    Claim(
        "2.1",
        "At layer 0 position alone makes the same pair's score differ",
        "content share 0 to 1e-5 of the scale; offset or position share not",
    ),
    Claim(
        "2.2",
        "After a few layers the two 'bank' vectors are different vectors",
        "cosine distance beyond the 95th percentile of same-sense pairs from some layer on; "
        "refuted if beyond it at none",
        different_vectors,
    ),
    Claim(
        "2.3",
        "The difference grows exponentially with depth",
        "the exponential law wins for more than half the words, interval, in cosine and in "
        "absolute score difference",
    ),
    Claim(
        "2.4",
        "A score is not fixed by its token pair",
        "context explains > .10 of the gauge-fixed variance in most heads above layer 0",
    ),
    Claim(
        "2.5",
        "Q of 'bank' and K of 'river' both differ at layer 0, since their positions do",
        "both differences > 1e-5 relative",
    ),
    Claim(
        "2.6",
        "In the first sentence 'bank' is steeped in 'dropped … river'",
        "influence of later tokens on 'bank' > .01 of the vector",
    ),
    Claim(
        "3.1",
        "h parallel heads are not h sequential heads",
        "KL (or relative change) of the rewrite beyond that of rounding to bf16",
    ),
    Claim(
        "3.2",
        "Width and depth are different inductive biases",
        "at equal parameters each side wins its own task by > .05 over at least 5 seeds",
    ),
    Claim(
        "3.3",
        "Concat(heads) W_O = Σ head W_O^h",
        "relative error < 1e-4 of every vector",
        concatenation,
    ),
    Claim(
        "3.4",
        "Parallel heads catch syntax, meaning and coreference at the same moment",
        "at least 3 heads of one layer each best on another dependency relation by > .05",
    ),
    Claim("4.1", "h must divide d_model", "refuted if any known architecture does without"),
    Claim(
        "4.2",
        "BERT-base, GPT-3, Llama-2-70B and DeepSeek-V3 have d_k 64, 128, 128 and 56",
        "all equal to the published configurations",
    ),
    Claim("4.3", "Practice settles on d_k of 64 or 128", "at least .8 of known architectures"),
    Claim(
        "4.4",
        "Hardware shapes the choice",
        "attention timed at equal FLOPs over d_head spreads by > 10 % beyond noise",
    ),
    Claim(
        "4.5",
        "h follows d_model at constant d_k",
        "the log-log slope of h on d_model includes 1",
    ),
    Claim(
        "5.1",
        "Full-width heads for GPT-3 would cost about 4.34 T parameters",
        "within 2 %",
        lambda _measured: judge_full_width(),
    ),
    Claim("5.2", "An uneven split brings no gain", "gain < .01 nat"),
    Claim("5.3", "An even split makes GQA and MQA possible", "sharing fails for uneven heads"),
    Claim(
        "5.4",
        "h heads of d_model/h cost what one full-width head costs",
        "equal, by arithmetic and by the loaded model's own count",
        equal_cost,
    ),
    Claim("5.5", "An uneven split needs a new W_O design", "construction from one W_O fails"),
    Claim(
        "5.6",
        "d_k of 64 to 128 is enough for a head",
        "99 % of the energy of QK and OV, in the data's metric, within .75 of d_head",
    ),
)
