"""Why split d_model evenly?"""

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.budget import HeadBudget, alternatives, known_architectures
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import Measured
from wvprobe.report.splits import SHARED, UNEVEN, WIDE


def judge_full_width(full: HeadBudget, claimed: float = 4.34e12, margin: float = 0.02) -> Finding:
    """Judge the cost of full-width heads, W_Q, W_K and W_V of each, by arithmetic (claim 5.1).

    Args:
        full: heads that are as wide as the stream.
        claimed: parameters that they are said to cost.
        margin: how far off that may be, as a share.
    """
    weights = full.layer_parameters
    a_layer = weights["W_Q"] + weights["W_K"] + weights["W_V"]
    total, with_output = full.n_layers * a_layer, full.n_attention
    numbers = {
        "per_layer": float(a_layer),
        "total": float(total),
        "total_with_W_O": float(with_output),
        "claimed": claimed,
        "relative_difference": total / claimed - 1,
    }
    near = abs(total / claimed - 1) <= margin
    return Finding(
        "supported" if near else "refuted",
        numbers,
        reason=f"3 · {full.n_heads} · {full.d_model}² is {a_layer / 1e9:.2f} B a layer, "
        f"{total / 1e12:.2f} T in all ({with_output / 1e12:.2f} T with W_O), "
        f"{total / claimed - 1:+.1%} from the claim.",
    )


def full_width(_measured: Measured) -> Finding:
    """Reckon GPT-3's heads at full width."""
    gpt3 = known_architectures()["GPT-3"]
    return judge_full_width(
        HeadBudget(gpt3.d_model, gpt3.n_heads, gpt3.d_model, n_layers=gpt3.n_layers)
    )


def full_width_exhibits(_measured: Measured) -> list[Exhibit]:
    """Show what else GPT-3's heads could be."""
    text = (
        "Attention of GPT-3 with other heads, relative to its own: parameters against the bytes "
        "that a token leaves in the cache. Every even split costs the same; hover for what breaks."
    )
    return [Exhibit(alternatives(known_architectures()["GPT-3"]), text)]


def judge_equal_cost(d_model: int, own: int, own_unshared: int) -> Finding:
    """Judge whether split heads cost what one full-width head costs (claim 5.4).

    Args:
        d_model: width of the stream.
        own: attention weights of one layer of the model, biases left out.
        own_unshared: the same, had every query head a key and a value head of its own.
    """
    full = 4 * d_model**2
    numbers = {
        "full_width_head": float(full),
        "model": float(own),
        "model_with_unshared_heads": float(own_unshared),
    }
    if own == full:
        verdict, why = "supported", "The model's heads cost exactly what one full-width head costs."
    elif own_unshared == full:
        verdict = "mixed"
        why = (
            f"The arithmetic holds, and the model's heads would cost the same; sharing keys and "
            f"values makes them {1 - own / full:.0%} cheaper."
        )
    else:
        verdict = "refuted"
        why = f"The model's heads times d_head are not d_model: {own_unshared / full:.2f} of it."
    return Finding(verdict, numbers, reason=f"4 · d_model² = {full:,} weights a layer. {why}")


def equal_cost(measured: Measured) -> Finding:
    """Count the loaded model's attention weights of one layer."""
    own = HeadBudget.from_model(measured.model)
    if own.kind == "MLA":
        return Finding(
            "not testable here",
            reason="Latent attention stores maps down and up, not W_Q, W_K and W_V, which are "
            "their products: counting those would count weights that are not there.",
        )
    unshared = HeadBudget(own.d_model, own.n_heads, own.d_head, d_head_v=own.d_head_v)
    return judge_equal_cost(own.d_model, _weights(own), _weights(unshared))


def _weights(budget: HeadBudget) -> int:
    """Count one layer's matrices, without biases and norms."""
    return sum(rows * columns for rows, columns in budget.matrices.values())


def judge_construction(even: float, uneven: float, widths: tuple[int, int]) -> Finding:
    """Judge whether uneven heads can share one W_O (claim 5.5).

    Args:
        even: error of the model's own, even heads rebuilt in the same way, against the model.
        uneven: error of Σ z_h W_O[rows of h] against Concat(z) W_O for uneven heads.
        widths: the narrowest and the widest of them.
    """
    numbers = {"even_error": even, "uneven_error": uneven}
    numbers |= {"narrowest": float(widths[0]), "widest": float(widths[1])}
    if even >= 1e-4:
        reason = f"The model's own heads are not reproduced ({even:.1e}), so nothing follows."
        return Finding("not testable here", numbers, reason=reason)
    works = uneven < 1e-4
    what = f"Heads of {widths[0]} to {widths[1]} dimensions take their rows of the model's own W_O"
    reason = f"{what}: error {uneven:.1e}. {'No new design is needed.' if works else 'It fails.'}"
    return Finding("refuted" if works else "supported", numbers, reason=reason)


def uneven_widths(total: int, heads: int) -> list[int]:
    """Return widths that grow from head to head and sum to `total`."""
    cuts = [total * h * (h + 1) // (heads * (heads + 1)) for h in range(heads + 1)]
    return [end - start for start, end in zip(cuts[:-1], cuts[1:], strict=True)]


def construction(measured: Measured) -> Finding:
    """Cut the middle layer's values unevenly, and let each head have its rows of W_O."""
    model = measured.model
    arch = adapters.architecture(model)
    layer = arch.n_layers // 2
    seen = capture(model, measured.pair.text_a, ["v", "pattern", "attn_out"], layers=layer)
    values, pattern = seen["v"][0, :, 0].double(), seen["pattern"][0, 0].double()
    values = values.repeat_interleave(arch.n_heads // arch.n_kv_heads, dim=1).flatten(1)
    w_o = adapters.output_weight(model, arch, layer).cpu().double().flatten(0, 1)
    bias = adapters.output_bias(model, layer)
    own = seen["attn_out"][0, :, 0].double()
    own = own if bias is None else own - bias.cpu().double()

    def heads(widths: list[int]) -> tuple[Tensor, Tensor]:
        """Return Concat(z) W_O and Σ z_h W_O[rows of h] for heads of these widths."""
        z = [p @ v for p, v in zip(pattern, values.split(widths, dim=1), strict=True)]
        each = sum(part @ rows for part, rows in zip(z, w_o.split(widths), strict=True))
        return torch.cat(z, dim=1) @ w_o, torch.as_tensor(each)

    _, even = heads([arch.d_head_v] * arch.n_heads)
    widths = uneven_widths(len(w_o), arch.n_heads)
    together, apart = heads(widths)
    return judge_construction(
        float((even - own).norm() / own.norm()),
        float((apart - together).norm() / together.norm()),
        (min(widths), max(widths)),
    )


CLAIMS = (
    Claim(
        "5.1",
        "Full-width heads for GPT-3 would cost about 4.34 T parameters",
        "within 2 %",
        full_width,
        "A claim of 4.09 to 4.26 T, which is within 2 % of 4.17 T.",
        """\
from wvprobe.budget import HeadBudget, known_architectures

gpt3 = known_architectures()["GPT-3"]
full = HeadBudget(gpt3.d_model, gpt3.n_heads, d_head=gpt3.d_model, n_layers=gpt3.n_layers)
per_layer = sum(full.layer_parameters[name] for name in ("W_Q", "W_K", "W_V"))
total = full.n_layers * per_layer
numbers = {
    "per_layer": per_layer,
    "total": total,
    "total_with_W_O": full.n_attention,
    "relative_difference": total / 4.34e12 - 1,
}""",
        full_width_exhibits,
        any_model=True,
    ),
    UNEVEN,
    SHARED,
    Claim(
        "5.4",
        "h heads of d_model/h cost what one full-width head costs",
        "equal, by arithmetic and by the loaded model's own count",
        equal_cost,
        "A model with as many key-value heads as heads, and n_heads · d_head = d_model, supports "
        "it; one with n_heads · d_head ≠ d_model refutes it.",
        """\
budget = wvprobe.HeadBudget.from_model(model)  # held against the model's own parameters
numbers = {
    "full_width_head": 4 * budget.d_model**2,
    "model": sum(rows * columns for rows, columns in budget.matrices.values()),
}""",
    ),
    Claim(
        "5.5",
        "An uneven split needs a new W_O design",
        "refuted if uneven heads whose rows partition the model's own W_O give Concat(z) W_O to "
        "1e-4; supported if that fails",
        construction,
        "Nothing but a fault: rows of one matrix can be handed out in any numbers.",
        """\
import torch

heads, layer = wvprobe.HeadWeights.from_model(model), model.cfg.n_layers // 2
seen = wvprobe.capture(model, text_a, ["v", "pattern"], layers=layer)
group = heads.n_heads // heads.n_kv_heads
values = seen["v"][0, :, 0].double().repeat_interleave(group, dim=1).flatten(1)
w_o, n = heads.W_O[layer].double().flatten(0, 1), heads.n_heads
cuts = [len(w_o) * h * (h + 1) // (n * (n + 1)) for h in range(n + 1)]
rows = [slice(start, end) for start, end in zip(cuts[:-1], cuts[1:])]
z = [seen["pattern"][0, 0, h].double() @ values[:, rows[h]] for h in range(n)]
together = torch.cat(z, dim=1) @ w_o
apart = sum(z[h] @ w_o[rows[h]] for h in range(n))
widths = [row.stop - row.start for row in rows]
numbers = {
    "uneven_error": ((apart - together).norm() / together.norm()).item(),
    "narrowest": min(widths),
    "widest": max(widths),
}""",
    ),
    WIDE,
)
