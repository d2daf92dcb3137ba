"""What decides the number of heads: budgets, published models, and the clock of this machine."""

# %% [markdown]
# # What decides the number of heads?
#
# **Question.** The textbook says that h must divide d_model, that d_head is 64 or 128, that h
# follows d_model, and that h heads of d_model / h cost what one full-width head costs. Which of
# these hold?
#
# **Method.** Each is held against published models with their sources, against arithmetic that
# equals a loaded model's own count of parameters, and against the clock: attention at one d_model
# over head widths, every kernel that torch has here, medians over interleaved rounds.
#
# **Run it** as a script (`python analyses/q4_head_count.py`), cell by cell in an editor that knows
# percent cells, or as a notebook (`make notebooks`). `--smoke` takes a small random model and a
# moment of timing. `--seconds` sets how long the clock runs; other work on the machine shows as
# noise.

# %%
import argparse
import sys

import wvprobe
from wvprobe.budget import Rest, head_scaling

# %% tags=["parameters"]
# A notebook's arguments, such as ["--model", "minilm-l6"]; a script has those it is given.
arguments = [] if "ipykernel" in sys.modules else None

# %%
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--d-model", type=int, default=1024, help="width that the clock splits")
parser.add_argument("--tokens", type=int, default=512, help="length of its sequence")
parser.add_argument("--seconds", type=float, default=60.0, help="how long the clock runs")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
options = parser.parse_args(arguments)

# %% [markdown]
# ## Does h have to divide d_model?
#
# In published models: n_heads · d_head is d_model, or it is not, or h does not even divide it.

# %%
known = wvprobe.known_architectures()
print(f"{len(known)} published models, 2017 to {known.to_frame()['year'].max()}")
print(known.divisibility()[["split", "models", "share"]].round(3).to_string(index=False))
apart = known.to_frame().query("not fills_d_model")
print(apart[["name", "year", "d_model", "n_heads", "d_head", "d_head_v"]].to_string(index=False))

# %% tags=["gallery"]
known.figure()

# %% [markdown]
# ## Head sizes that are often misquoted
#
# DeepSeek-V3's 7168 / 128 = 56 is no width of its heads.

# %%
for name in ("BERT-base", "GPT-3", "Llama-2-70B", "DeepSeek-V3"):
    found = known[name]
    print(
        f"{name:12s} d_model / h = {found.d_model / found.n_heads:6.1f}   queries and keys "
        f"{found.d_head}, values {found.d_head_v}   ({found.kind})"
    )

# %% [markdown]
# ## Does h follow d_model at constant d_head?
#
# Log-log slopes with intervals from resampling families: models of one family are no independent
# choices. Slope 1 for n_heads and 0 for d_head would say yes.

# %%
scaling = head_scaling(known)
print(scaling.to_frame().round(3).to_string(index=False))
share, low, high = scaling.common_share.tolist()
print(f"heads of 64 or 128: {share:.2f} of the models ({low:.2f} to {high:.2f})")
scaling.figure()

# %% [markdown]
# ## What GPT-3 would cost with other heads
#
# Full-width heads: 3 · 96 · 12288² for W_Q, W_K and W_V of a layer.

# %%
gpt3 = known["GPT-3"]
others = wvprobe.alternatives(gpt3, context=2048)
frame = others.to_frame()
full = frame[frame["kind"] == "full width"].iloc[0]
print(f"W_Q, W_K, W_V of a layer: {full['layer_qkv'] / 1e9:.2f} B")
print(f"over {gpt3.n_layers} layers: {gpt3.n_layers * full['layer_qkv'] / 1e12:.2f} T")
print(f"with W_O: {full['parameters'] / 1e12:.2f} T")
columns = "kind n_heads n_kv_heads d_head d_head_max parameters_ratio kv_ratio flops_ratio".split()
print(frame[columns].round(3).to_string(index=False))
others.figure()

# %% [markdown]
# The whole model from the numbers of its paper:

# %%
rest = Rest(50257, 4 * 12288, mlp_biases=True, norm_biases=True, n_positions=2048)
whole = wvprobe.HeadBudget(12288, 96, n_layers=96, biases="QKVO", rest=rest, name="GPT-3")
print(f"GPT-3: {whole.n_parameters:,} parameters, {whole.n_attention:,} of them in attention")

# %% [markdown]
# ## What a token leaves in the cache
#
# For some of the published models, in bfloat16.

# %%
for name in ("GPT-3", "Llama-2-7B", "Llama-2-70B", "Llama-3.1-405B", "PaLM-540B", "DeepSeek-V3"):
    found = known[name]
    print(f"{name:15s} {found.kind}  {found.kv_cache_bytes():>9,} bytes a token")

# %% [markdown]
# ## The loaded model's own budget
#
# Every parameter of its attention is explained by the sizes, or the model is refused.

# %%
model = wvprobe.load("tiny:qwen3" if options.smoke else options.model)
own = wvprobe.HeadBudget.from_model(model)
print(f"{own.name}: {own.n_parameters:,} parameters")
print(own.to_frame().round(4).to_string(index=False))
for part, count in own.flops(1024).items():
    print(f"FLOPs of a token at 1,024 tokens, {part}: {count:,}")

# %% [markdown]
# ## What the machine has to say
#
# Attention at one d_model and number of tokens: the multiplications are the same for every d_head.
# The uneven split has heads of three widths with the mean of an even one: padded to the widest, run
# one by one, or in one call a width.

# %%
if options.smoke:
    sizes = {"d_model": 64, "n_tokens": 16, "d_heads": (8, 16, 32), "seconds": 0.0}
else:
    sizes = {"d_model": options.d_model, "n_tokens": options.tokens, "seconds": options.seconds}
clock = wvprobe.time_attention(**sizes)
shown = clock.to_frame()
for column in ("seconds", "low", "high", "floor"):
    shown[column] = (1e3 * shown[column]).round(3)
columns = "device kernel layout direction d_head d_head_max seconds low high floor bound n".split()
print("milliseconds: median, quartiles, floor")
print(shown[columns].to_string(index=False))
for device, (flops, moved) in clock.peak.items():
    print(f"{device}: {flops / 1e9:.0f} GFLOP/s, {moved / 1e9:.1f} GB/s at most")
for (kernel, direction), rows in shown.groupby(["kernel", "direction"], sort=False):
    print(f"{kernel} {direction} ran {rows['ran'].iloc[0]}")
for kernel in shown["kernel"].unique():
    for direction in ("forward", "backward"):
        found = clock.spread(kernel, direction)
        print(
            f"{kernel} {direction}: d_head {found.slowest} takes {found.ratio:.2f} times as long "
            f"as {found.fastest} ({found.low:.2f} to {found.high:.2f}; noise {found.noise:.0%})"
        )
clock.figure()

# %% [markdown]
# ## Result
#
# The rules: h need not divide d_model if any model does otherwise; practice has settled on 64 and
# 128 if four in five models have them, the whole interval above that; h follows d_model if the
# slope's interval holds 1; the machine has a say if the slowest width takes over a tenth longer
# than the fastest, beyond noise.

# %% tags=["finding"]
splits = known.divisibility().set_index("split")["models"].tolist()
print(
    f"Of {len(known)} published models, {splits[0]} have n_heads · d_head = d_model, {splits[1]} "
    f"another width, and in {splits[2]} h does not even divide d_model. Verdict: h "
    f"{'must' if splits[1] + splits[2] == 0 else 'need not'} divide it."
)
share, low, high = scaling.common_share.tolist()
settled = "has settled on them" if low >= 0.8 else "has not settled on them"
print(
    f"Heads of 64 or 128: {share:.0%} ({low:.0%} to {high:.0%}) of the models. Verdict: "
    f"{'undecided' if low < 0.8 <= high else f'practice {settled}'}."
)
slope, low, high = scaling.slope("n_heads")
print(
    f"h grows as d_model to the power of {slope:.2f} ({low:.2f} to {high:.2f}). Verdict: "
    f"{'it follows d_model' if low <= 1 <= high else 'it does not follow d_model'}."
)
one = 4 * own.d_model**2
count = sum(rows * columns for rows, columns in own.matrices.values())
print(
    f"{own.name}: a layer's attention has {count:,} weights; one full-width head has {one:,}. "
    f"Verdict: {'equal' if count == one else f'{count / one:.0%} of it'}."
)
kernel = clock.fastest_kernel()
found = clock.spread(kernel)
beyond = found.low - 1 > max(0.1, found.noise)
print(
    f"On this machine, {kernel}, d_model {clock.d_model}, {clock.n_tokens} tokens: d_head "
    f"{found.slowest} takes {found.ratio:.2f} times as long as {found.fastest} ({found.low:.2f} to "
    f"{found.high:.2f}; noise {found.noise:.0%}). Verdict: the machine "
    f"{'has a say' if beyond else 'does not tell them apart by a tenth'}."
)

# %% [markdown]
# ## Caveats
#
# * The list of models is a choice: those whose sizes are published with a source. Intervals
#   resample families, since models of one family are no independent choices.
# * What practice settled on is not what is best. It is what was tried and kept.
# * Times are this machine's, at one width and length. On another, or on a GPU, the order may be
#   another.
# * FLOPs are the same for every even split; bytes of scores are not, they grow with h.
#
# ## What would change the verdict
#
# One model is enough to refute 'must'. A slope or share would take many models of other families.
# The clock asks for a quiet machine (`--seconds 300`) and for your own sizes (`--d-model`,
# `--tokens`).
