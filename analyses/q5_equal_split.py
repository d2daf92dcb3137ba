"""Why split d_model evenly? Heads of other ranks, shared keys and values, the ranks heads need."""

# %% [markdown]
# # Why split d_model evenly?
#
# Every head of a textbook transformer is d_model / h wide. This analysis asks of a trained model
# how much of that width each head makes use of, whether ranks that go to the heads that need them
# keep more than the same rank for all, and whether it takes even heads to share keys and values.
#
# Nothing is trained here but in the last part: heads that learnt to be even are cut afterwards.
#
# Run it as a script (`python analyses/q5_equal_split.py --model minilm-l6`), or cell by cell in an
# editor that knows percent cells. `--smoke` takes a small random model and finishes in seconds.
# `--every 1` judges on all of the bundled held-out prose instead of a third of it.

# %%
import argparse
import sys

import wvprobe
from wvprobe.counterfactual import head_ranks
from wvprobe.datasets import load_prose
from wvprobe.errors import UnsupportedError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--every", type=int, default=3, help="of the held-out prose every n-th text")
parser.add_argument("--figures", help="a folder for the figures, as HTML")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
# In a notebook the arguments are the kernel's, not this analysis's.
options = parser.parse_args([] if "ipykernel" in sys.modules else None)

model = wvprobe.load("tiny:llama" if options.smoke else options.model)
held_out = load_prose("held-out")[:: options.every]
calibration = load_prose("calibration")[::2]
if options.smoke:
    held_out, calibration = (
        [text for text in texts if len(text) < 100][:6] for texts in (held_out, calibration)
    )
data = {"calibration": calibration, "progress": not options.smoke}
figures = {}


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
print(frame.groupby("part")[["d_head", "effective_rank", "needed"]].median())
for part in ("OV", "QK"):
    limit = 0.75 * ranks.energies(part).shape[-1]
    share, low, high = ranks.within(part, limit)
    print(f"{part}: {share:.0%} ({low:.0%} to {high:.0%}) of heads need at most .75 of their width")
figures["ranks"] = ranks

# %% [markdown]
# ## An even cut against uneven ones
#
# The same total of ranks, shared out evenly, to where the energy is, or to where the loss is most
# sensitive; over the whole model, and within each layer, which is what a split of d_model is. The
# bf16 row is the yardstick for what is small.

# %%
CHANGES = "setting total_rank smallest_rank largest_rank kept_energy kl loss_delta loss_delta_low"
CHANGES += " loss_delta_high relative_change"
GAINS = "setting versus measure gain low high n_texts"
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
figures["values"] = values

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
figures["scores"] = scores

# %% [markdown]
# ## Fewer key-value heads
#
# From the model's own number down to one, four ways. The latent (`mla`) has as many numbers as the
# heads it stands for; from d_model numbers on it is as good as the stream itself.

# %%
SHARED = "setting after bytes_per_token bytes_saved key_error value_error kl low high"
SHARED += " loss_delta relative_change"
whole = wvprobe.HeadWeights.from_model(model).n_kv_heads
fewer = [n for n in range(1, whole) if whole % n == 0]
if fewer:
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
    figures["shared"] = shared

# %% [markdown]
# ## Does sharing take even heads?
#
# Heads are cut first, evenly or not, and then share. Each row is held against the cut model.

# %%
if fewer:
    for setting in within.settings[2:4]:
        after = wvprobe.share_kv_heads(
            model, held_out, n_kv_heads=1, method=("svd", "mla"), after=within.plan(setting), **data
        )
        show(after.to_frame().iloc[:-1], SHARED)

# %% [markdown]
# ## Uneven heads trained from scratch
#
# A cut shows what even heads make use of, not what uneven ones could have learnt. That takes
# training, of models with even and with uneven heads side by side: `wvprobe.compare_biases`.

# %%
if options.figures:
    from pathlib import Path

    folder = Path(options.figures)
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in figures.items():
        result.figure().write_html(folder / f"{name}.html")
    print(f"figures: {folder}")
