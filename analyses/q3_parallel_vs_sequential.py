"""Are h parallel heads the same as h sequential ones? Rewrites of a real model's blocks."""

# %% [markdown]
# # Are h parallel heads the same as h sequential ones?
#
# In a block of a transformer all heads read the same stream. This analysis lets them read it one
# after another instead, each with what those before it wrote, in one block and in all, in several
# orders; asks which heads would change which others, and whether composition scores know; and puts
# one head of full width in the place of the h narrow ones.
#
# Run it as a script (`python analyses/q3_parallel_vs_sequential.py --model minilm-l6`), or cell by
# cell in an editor that knows percent cells. `--smoke` takes a small random model and finishes in
# seconds. `--every` thins the bundled held-out prose (122 paragraphs, some 5,600 tokens of
# SmolLM2); `--texts FILE`, one text a line, replaces it.

# %%
import argparse
import sys
from pathlib import Path

import wvprobe
from wvprobe.datasets import load_prose

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--texts", help="a file of texts, one a line; the bundled prose without it")
parser.add_argument("--every", type=int, default=3, help="one paragraph in so many is taken")
parser.add_argument("--orders", type=int, default=5, help="orders of the heads, all blocks")
parser.add_argument("--figures", help="a folder for the figures, as HTML")
parser.add_argument("--full", action="store_true", help="train small models to the end: minutes")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
# In a notebook the arguments are the kernel's, not this analysis's.
options = parser.parse_args([] if "ipykernel" in sys.modules else None)

model = wvprobe.load("tiny:llama" if options.smoke else options.model)
if options.texts:
    texts = Path(options.texts).read_text(encoding="utf-8").splitlines()
else:
    texts = load_prose("held-out")
    if options.smoke:  # whose context is short
        texts = [text for text in texts if len(text) < 120]
    texts = texts[:: 12 if options.smoke else options.every]


def show(result, name):
    """Print a result's table, and draw it."""
    frame = result.to_frame()
    measures = ["kl", "loss_delta", "top1_agreement"]
    if result.measure != "kl":
        measures = ["relative_change", "final_distance", "pooled_distance"]
    ends = [f"{result.measure}_low", f"{result.measure}_high"]
    print(frame[["setting", *measures, *ends]].round(4).to_string(index=False))
    draw(result, name)


def draw(result, name):
    """Write a result's figure, where a folder is named."""
    if options.figures:
        folder = Path(options.figures)
        folder.mkdir(parents=True, exist_ok=True)
        result.figure().write_html(folder / f"{name}.html", include_plotlyjs="cdn")


# %% [markdown]
# ## Heads in sequence, block by block
#
# x ← x + head_h(norm(x)), head after head. The last row is what rounding the model to bf16 does:
# a rewrite that changes less is no other model in practice.

# %%
blocks = wvprobe.sequential_heads(model, texts, progress=not options.smoke)
print(f"{len(texts)} texts, {int(blocks.n_tokens.sum())} tokens, measured by {blocks.measure}\n")
show(blocks, "blocks")
mean, low, _ = blocks.interval(blocks.measure)
print(f"\nbeyond bf16 rounding: {int((low[:-1] > mean[-1]).sum())} of {len(mean) - 1} settings")
blocks.figure()

# %% [markdown]
# ## Does the order matter?
#
# All blocks together, their heads in the natural order, reversed, and at random.

# %%
orders = wvprobe.sequential_heads(
    model, texts, layers="all", orders=3 if options.smoke else options.orders
)
print("\nall blocks, by order of the heads:")
show(orders, "orders")
orders.figure()

# %% [markdown]
# ## Which heads would change which
#
# ‖head_b(norm(x + head_a)) − head_b(norm(x))‖ / ‖head_b(norm(x))‖ for all pairs of a block: what
# the parallel design keeps from happening. Beside it, rank correlations within layers with the
# composition scores of the same pairs, which parallel heads cannot use.

# %%
found = wvprobe.head_interactions(model, texts, progress=not options.smoke)
frame = found.to_frame().query("writer != reader")
print("\nmedian interaction by layer:")
print(frame.groupby("layer")["interaction"].median().round(3).to_string())
print("\nthe strongest pairs:")
print(frame.nlargest(8, "interaction").round(3).to_string(index=False))
print("\nagreement with composition, within layers:")
print(found.agreement().round(3).to_string(index=False))
draw(found, "interactions")
found.figure()

# %% [markdown]
# ## One head of full width, run h times
#
# Scores s = Σ_h s_h/√h, one pattern for all values: once, h times, and h times in steps of 1/h.
# Single blocks show what the h patterns are worth; all blocks together what is left of the model.

# %%
n_layers = model.cfg.n_layers
chosen = sorted({0, n_layers // 2, n_layers - 1})
wide = wvprobe.repeated_head(model, texts, layers=[*([layer] for layer in chosen), range(n_layers)])
print("\none head of full width in the place of the block's heads:")
show(wide, "repeated")
wide.figure()

# %% [markdown]
# ## Two inductive biases
#
# A rewrite of a trained model says how far its heads rely on running side by side. What either
# design would learn, only training tells: models trained from scratch at equal parameters.

# %%
steps = 4 if options.smoke else None
seeds = 2 if options.smoke else 5
trained = wvprobe.compare_biases(seeds=seeds, quick=not options.full, steps=steps, progress=False)
told = "" if options.full else " (briefly trained, too briefly to settle anything: see --full)"
print(f"\nshare of right answers, {trained.n_seeds} seeds{told}:")
print(trained.final_frame().round(3).to_string(index=False))
for task, difference in trained.difference("parallel", "sequential").items():
    low, high = difference.low, difference.high
    print(f"{task}: parallel − sequential {difference.value:+.3f} ({low:+.3f} to {high:+.3f})")
trained.figure()
