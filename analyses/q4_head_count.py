"""What decides the number of heads: budgets, published models, and the clock of this machine."""

# %% [markdown]
# # What decides the number of heads?
#
# The textbook says that h must divide d_model, that d_head is 64 or 128, that h follows d_model,
# and that h heads of d_model / h cost what one full-width head costs. This analysis holds each of
# these to published models and to arithmetic, and asks the machine what it has to say.
#
# Run it as a script (`python analyses/q4_head_count.py`), or cell by cell in an editor that knows
# percent cells. `--smoke` takes a small random model and a moment of timing. `--seconds` sets how
# long the clock runs; other work on the machine shows as noise.

# %%
import argparse
import sys

import wvprobe
from wvprobe.budget import Rest, head_scaling

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--d-model", type=int, default=1024, help="width that the clock splits")
parser.add_argument("--tokens", type=int, default=512, help="length of its sequence")
parser.add_argument("--seconds", type=float, default=60.0, help="how long the clock runs")
parser.add_argument("--figures", help="a folder for the figures, as HTML")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
# In a notebook the arguments are the kernel's, not this analysis's.
options = parser.parse_args([] if "ipykernel" in sys.modules else None)

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
print({part: f"{count:,}" for part, count in own.flops(1024).items()})

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

# %%
if options.figures:
    from pathlib import Path

    folder = Path(options.figures)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"known": known, "scaling": scaling, "alternatives": others, "clock": clock}
    for name, result in drawn.items():
        result.figure().write_html(folder / f"{name}.html")
    print(f"figures: {folder}")
