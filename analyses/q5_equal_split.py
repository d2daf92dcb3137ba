"""Why split d_model evenly? Heads of other ranks, shared keys and values, the ranks heads need."""

# %% [markdown]
# # Why split d_model evenly?
#
# **Question.** Every head of a textbook transformer is d_model / h wide. How much of that width
# does each head of a trained model make use of, do ranks that go to the heads that need them keep
# more than the same rank for all, and does it take even heads to share keys and values?
#
# **Method.** Heads are cut to fewer dimensions at the same total, evenly or not, and the loss on
# held-out prose is compared text by text. Key-value heads are merged four ways. What is fitted is
# fitted on other prose; the change that rounding to bf16 makes is the yardstick for what is small.
#
# **Run it** as a script (`python analyses/q5_equal_split.py --model minilm-l6`), cell by cell in an
# editor that knows percent cells, or as a notebook (`make notebooks`). `--smoke` takes a small
# random model. `--every 1` judges on all of the bundled held-out prose instead of a third of it.

# %%
import argparse
import sys

import wvprobe
from wvprobe.counterfactual import head_ranks
from wvprobe.datasets import load_prose
from wvprobe.errors import UnsupportedError

# %% tags=["parameters"]
# A notebook's arguments, such as ["--model", "minilm-l6"]; a script has those it is given.
arguments = [] if "ipykernel" in sys.modules else None

# %%
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--every", type=int, default=3, help="of the held-out prose every n-th text")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
options = parser.parse_args(arguments)

model = wvprobe.load("tiny:llama" if options.smoke else options.model)
held_out = load_prose("held-out")[:: options.every]
calibration = load_prose("calibration")[::2]
if options.smoke:
    held_out, calibration = (
        [text for text in texts if len(text) < 100][:6] for texts in (held_out, calibration)
    )
data = {"calibration": calibration, "progress": not options.smoke}


def show(frame, columns):
    """Print some columns of a frame, those that do not apply left out."""
    kept = frame[columns.split()].dropna(axis="columns", how="all")
    print(kept.round(4).to_string(index=False))


# %% [markdown]
# ## How many dimensions a head makes use of
#
# OV: principal components of what a head adds on text. QK: directions of queries and keys, turned
# to their positions, in which scores vary over pairs. How many hold 99 % of the energy?

# %%
ranks = head_ranks(model, calibration)
frame = ranks.to_frame()
medians = frame.groupby("part")[["d_head", "effective_rank", "needed"]].median()
print(medians.round(1).to_string())
for part in ("OV", "QK"):
    limit = 0.75 * ranks.energies(part).shape[-1]
    share, low, high = ranks.within(part, limit)
    print(f"{part}: {share:.0%} ({low:.0%} to {high:.0%}) of heads need at most .75 of their width")
ranks.figure()

# %% [markdown]
# ## An even cut against uneven ones
#
# The same total of ranks, shared out evenly, to where the energy is, or to where the loss is most
# sensitive; over the whole model, and within each layer, which is what a split of d_model is. The
# bf16 row is the yardstick for what is small.

# %%
CHANGES = "setting total_rank kept_energy kl loss_delta loss_delta_low loss_delta_high"
CHANGES += " relative_change"
GAINS = "setting versus measure gain low high"
budgets = (0.5, 0.25)
allocations = ("uniform", "energy", "loss")
try:
    values = wvprobe.resize_heads(model, held_out, budget=budgets, allocation=allocations, **data)
except UnsupportedError as refused:
    print(refused)
    allocations = ("uniform", "energy")
    values = wvprobe.resize_heads(model, held_out, budget=budgets, allocation=allocations, **data)
show(values.to_frame(), CHANGES)
show(values.gain_frame(), GAINS)
print(values.kv_note)
within = wvprobe.resize_heads(
    model, held_out, budget=budgets, allocation=("uniform", "energy"), scope="layer", **data
)
show(within.gain_frame(), GAINS)
values.figure()

# %% tags=["gallery"]
within.figure()

# %% [markdown]
# ## What each head asks for
#
# Ranks by layer at half of the total, where they go to the energy.

# %%
asked = values.ranks[values.settings.index("OV, energy, 0.50")]
for layer, row in enumerate(asked.tolist()):
    print(f"layer {layer:2d}: {' '.join(f'{rank:3d}' for rank in row)}")

# %% [markdown]
# ## What kernels want
#
# Ranks rounded to multiples of 8 at the same total: rows that hold a setting against itself
# without "multiples of 8" are what the rounding costs (less than 0: it costs).

# %%
multiple = 4 if options.smoke else 8
rounded = wvprobe.resize_heads(
    model,
    held_out,
    budget=0.5,
    allocation=("uniform", "energy"),
    multiple_of=multiple,
    **data,
)
show(rounded.gain_frame().query("multiple_of > 1"), GAINS)

# %% [markdown]
# ## Queries and keys
#
# Under rotary positions only whole planes can go.

# %%
scores = wvprobe.resize_heads(
    model, held_out, budget=0.5, allocation=allocations, part="QK", **data
)
show(scores.to_frame(), CHANGES)
show(scores.gain_frame(), GAINS)
scores.figure()

# %% [markdown]
# ## Fewer key-value heads
#
# From the model's own number down to one, four ways. The latent (`mla`) has as many numbers as the
# heads it stands for; from d_model numbers on it is as good as the stream itself.

# %%
SHARED = "setting bytes_per_token key_error value_error kl low high loss_delta relative_change"
whole = wvprobe.HeadWeights.from_model(model).n_kv_heads
fewer = [n for n in range(1, whole) if whole % n == 0] or [1]
shared = wvprobe.share_kv_heads(
    model,
    held_out,
    n_kv_heads=fewer,
    method=("mean", "lstsq", "svd", "mla"),
    grouping=("order", "similarity"),
    **data,
)
show(shared.to_frame(), SHARED)
print(shared.to_frame()[["method", "refitted"]].drop_duplicates().to_string(index=False))
print(shared.note)
shared.figure()

# %% [markdown]
# ## Does sharing take even heads?
#
# Heads are cut first, to a fourth, evenly or not, and then share. Each row is held against the cut
# model.

# %%
cuts = dict(zip(("evenly", "unevenly"), within.settings[2:4], strict=True))
after = {}
for how, setting in cuts.items():
    after[how] = wvprobe.share_kv_heads(
        model, held_out, n_kv_heads=1, method=("svd", "mla"), after=within.plan(setting), **data
    )
    print(f"after {setting}:")
    show(after[how].to_frame().iloc[:-1], SHARED)

# %% [markdown]
# ## Uneven heads trained from scratch
#
# A cut shows what even heads make use of, not what uneven ones could have learnt. That takes
# training, of models with even and with uneven heads side by side: `wvprobe.compare_biases`, which
# `q3_parallel_vs_sequential.py --full` runs to the end.
#
# ## Result
#
# The rules: a head has width to spare where 99 % of its energy lies within .75 of it. An uneven
# split brings a gain if, at a fourth of the ranks in each layer, the held-out loss gains over .01
# nat, interval above it. Sharing takes even heads if it changes uneven ones over 1.5 times as much,
# their intervals apart by that.

# %% tags=["finding"]
for part in ("OV", "QK"):
    width = ranks.energies(part).shape[-1]
    share, low, high = ranks.within(part, 0.75 * width)
    print(
        f"{part}: {share:.0%} of heads ({low:.0%} to {high:.0%}) hold 99 % of their energy within "
        f".75 of their width; the median needs {ranks.needed(part).double().median():.0f} of "
        f"{width}."
    )
gains = within.gain_frame().query("budget == 0.25").set_index("measure")
measure = "loss_delta" if "loss_delta" in gains.index else "relative_change"
gain = gains.loc[measure]
ends = f"{gain['low']:+.3f} to {gain['high']:+.3f}"
if measure == "loss_delta":
    told = "a gain" if gain["low"] > 0.01 else ("no gain" if gain["high"] < 0.01 else "not settled")
    print(
        f"At a fourth of each layer's ranks, those that go to the energy gain {gain['gain']:+.3f} "
        f"nats ({ends}) over the same rank for all. Verdict: {told}."
    )
else:
    print(
        f"At a fourth of each layer's ranks, those that go to the energy change the last stream by "
        f"{gain['gain']:+.3f} ({ends}) less than the same rank for all. Without a head there is no "
        "loss to gain: no verdict."
    )
found = {}
for how, result in after.items():
    at = result.settings.index(next(name for name in result.settings if name.endswith("svd")))
    mean, low, high = (float(values[at]) for values in result.interval(result.measure))
    found[how] = (mean, low, high)
    what = {"kl": "KL in nats", "relative_change": "relative change"}[result.measure]
    print(
        f"One key-value head for all, after heads were cut {how}: {what} {mean:.3f} "
        f"({low:.3f} to {high:.3f})."
    )
told = "not settled"
if found["unevenly"][1] > 1.5 * found["evenly"][2]:
    told = "it takes even heads"
elif found["unevenly"][2] < 1.5 * found["evenly"][1]:
    told = "it does not take even heads"
print(f"Verdict on sharing: {told}.")

# %% [markdown]
# ## Caveats
#
# * Post hoc: the model learnt with even heads, and is not trained again after a cut. Published
#   methods that share heads train on.
# * Energy is not loss. Ranks by loss (`allocation="loss"`) use gradients, on calibration prose.
# * A layer's heads are not independent; intervals of shares are over layers, those of losses over
#   texts.
# * The bundled prose is small. Texts that ask for other heads would give other ranks.
#
# ## What would change the verdict
#
# A gain whose interval lies on the other side of .01 nat, on more texts (`--every 1`) or at another
# budget; heads that were trained unevenly and lose nothing by it, or win.
