"""Are h parallel heads the same as h sequential ones? Rewrites of a real model's blocks."""

# %% [markdown]
# # Are h parallel heads the same as h sequential ones?
#
# **Question.** In a block of a transformer all heads read the same stream. Would it be another
# model if they read it one after another, each with what those before it wrote?
#
# **Method.** A real model's blocks are rewritten so, one at a time and all together, in several
# orders; and h narrow heads are replaced by one of full width. What the rewrite does to the next
# token (KL) or, without a head, to the last stream is held against what rounding the model to bf16
# does.
#
# **Run it** as a script (`python analyses/q3_parallel_vs_sequential.py --model minilm-l6`), cell by
# cell in an editor that knows percent cells, or as a notebook (`make notebooks`). `--smoke` takes a
# small random model. `--every` thins the bundled held-out prose (122 paragraphs, some 5,600 tokens
# of SmolLM2); `--texts FILE`, one text a line, replaces it.

# %%
import argparse
import sys
from pathlib import Path

import wvprobe
from wvprobe.datasets import load_prose

# %% tags=["parameters"]
# A notebook's arguments, such as ["--model", "minilm-l6"]; a script has those it is given.
arguments = [] if "ipykernel" in sys.modules else None

# %%
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--texts", help="a file of texts, one a line; the bundled prose without it")
parser.add_argument("--every", type=int, default=3, help="one paragraph in so many is taken")
parser.add_argument("--orders", type=int, default=5, help="orders of the heads, all blocks")
parser.add_argument("--full", action="store_true", help="train small models to the end: minutes")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
options = parser.parse_args(arguments)

model = wvprobe.load("tiny:llama" if options.smoke else options.model)
if options.texts:
    texts = Path(options.texts).read_text(encoding="utf-8").splitlines()
else:
    texts = load_prose("held-out")
    if options.smoke:  # whose context is short
        texts = [text for text in texts if len(text) < 120]
    texts = texts[:: 12 if options.smoke else options.every]


def show(result):
    """Print a result's table."""
    frame = result.to_frame()
    measures = ["kl", "loss_delta", "top1_agreement"]
    if result.measure != "kl":
        measures = ["relative_change", "final_distance"]
    ends = [f"{result.measure}_low", f"{result.measure}_high"]
    print(frame[["setting", *measures, *ends]].round(4).to_string(index=False))


# %% [markdown]
# ## Heads in sequence, block by block
#
# x ← x + head_h(norm(x)), head after head. The last row is what rounding the model to bf16 does:
# a rewrite that changes less is no other model in practice.

# %% tags=["gallery"]
blocks = wvprobe.sequential_heads(model, texts, progress=not options.smoke)
print(f"{len(texts)} texts, {int(blocks.n_tokens.sum())} tokens, measured by {blocks.measure}\n")
show(blocks)
blocks.figure()

# %% [markdown]
# ## Does the order matter?
#
# All blocks together, their heads in the natural order, reversed, and at random.

# %%
orders = wvprobe.sequential_heads(
    model, texts, layers="all", orders=3 if options.smoke else options.orders
)
print("all blocks, by order of the heads:")
show(orders)
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
print("median interaction by layer:")
print(frame.groupby("layer")["interaction"].median().round(3).to_string())
print("\nthe strongest pairs:")
print(frame.nlargest(8, "interaction").round(3).to_string(index=False))
print("\nagreement with composition, within layers:")
print(found.agreement().round(3).to_string(index=False))
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
print("one head of full width in the place of the block's heads:")
show(wide)
wide.figure()

# %% [markdown]
# ## Two inductive biases
#
# A rewrite of a trained model says how far its heads rely on running side by side. What either
# design would learn, only training tells: models trained from scratch at equal parameters. Unless
# `--full` is given they are trained too briefly to settle anything.

# %%
steps = 4 if options.smoke else None
seeds = 2 if options.smoke else 5
trained = wvprobe.compare_biases(seeds=seeds, quick=not options.full, steps=steps, progress=False)
columns = "task architecture accuracy low high over_parallel over_parallel_low over_parallel_high"
print(f"share of right answers, {trained.n_seeds} seeds:")
print(trained.final_frame()[[*columns.split(), "chance"]].round(3).to_string(index=False))
trained.figure()

# %% [markdown]
# ## Result
#
# The rule: heads in sequence are another model where the rewrite of all blocks changes more than
# bf16 rounding does, interval above it.

# %% tags=["finding"]
names = {"kl": "KL in nats", "relative_change": "relative change of the last stream"}
what = names[blocks.measure]
mean, low, high = (values.tolist() for values in blocks.interval(blocks.measure))
rounding = mean[-1]
whole = blocks.settings.index("all blocks, natural")
single = [n for n, layers in enumerate(blocks.layers) if len(layers) == 1]
beyond = sum(low[n] > rounding for n in single)
most = max(single, key=lambda n: mean[n])
print(
    f"{what}, {len(texts)} texts: all blocks in sequence {mean[whole]:.4f} ({low[whole]:.4f} to "
    f"{high[whole]:.4f}), bf16 rounding {rounding:.4f}."
)
print(
    f"{beyond} of {len(single)} single blocks lie beyond rounding; the most is {mean[most]:.4f} "
    f"({low[most]:.4f} to {high[most]:.4f}), {blocks.settings[most]}."
)
spread = orders.interval(orders.measure)[0][:-1]
print(f"Over {len(spread)} orders of the heads it is {spread.min():.4f} to {spread.max():.4f}.")
once = [n for n, name in enumerate(wide.settings) if name == "all blocks, once"]
value, least, largest = (float(values[once[0]]) for values in wide.interval(wide.measure))
print(f"One head of full width in each block: {value:.4f} ({least:.4f} to {largest:.4f}).")
for row in found.agreement().itertuples():
    print(
        f"Interaction and {row.mode}-composition: rank correlation {row.rho:.2f} ({row.low:.2f} to "
        f"{row.high:.2f}) within layers."
    )
for task, difference in trained.difference("parallel", "sequential").items():
    print(
        f"Right answers, trained {'long' if options.full else 'briefly'} on {task}: parallel − "
        f"sequential {difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})."
    )
verdict = "another model" if low[whole] > rounding else "not told apart from bf16 rounding"
print(f"Verdict: {verdict}.")

# %% [markdown]
# ## Caveats
#
# * The weights were learnt side by side. That they do not fit a sequence says that the designs
#   differ at these weights, not which of them learns more.
# * Composition scores are of weights alone, interactions of text; a correlation within layers is
#   not one over pairs at large.
# * A head of full width is a stand-in made of the others' scores. It is not the best that there is.
#
# ## What would change the verdict
#
# Heads that read nothing of what the others write: the rewrite then changes nothing. Smaller heads
# come near to that, since the change shrinks as the square of their scale. The inductive biases
# need `--full`, which trains to the end and takes minutes.
