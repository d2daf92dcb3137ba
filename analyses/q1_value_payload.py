"""What W_V carries: which heads' values know a label, and whether it matters that they do."""

# %% [markdown]
# # What does W_V carry?
#
# W_Q and W_K are said to route, W_V to carry what flows along the route. A linear probe on values
# puts that to the test, if its score is held against the right things: almost any 64 directions of
# a stream tell parts of speech apart. So each head stands beside random projections of the same
# input, its principal components, the layer's queries and keys, and the word's embedding.
#
# Run it as a script (`python analyses/q1_value_payload.py --model minilm-l6 --conllu FILE`), or
# cell by cell in an editor that knows percent cells. Without a treebank, parts of speech are nouns
# against verbs in the bundled sentences. `--smoke` takes a small random model.

# %%
import argparse
import sys

import wvprobe
from wvprobe.adapters import why_no_head
from wvprobe.value_payload import confirm_heads, payload_map

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--conllu", help="a treebank, for parts of speech")
parser.add_argument("--senses", help="words in context, for senses; else the bundled set")
parser.add_argument("--words", type=int, default=4000, help="at most so many words of a label")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
# In a notebook the arguments are the kernel's, not this analysis's.
options = parser.parse_args([] if "ipykernel" in sys.modules else None)

model = wvprobe.load("tiny:llama" if options.smoke else options.model)
senses = wvprobe.load_senses(options.senses)
treebank = wvprobe.load_conllu(options.conllu) if options.conllu else None
draws, words = (5, 300) if options.smoke else (200, options.words)


def shown(frame, columns):
    """Print some columns of a frame."""
    print(frame[columns].round(3).to_string(index=False))


# %% [markdown]
# ## Parts of speech
#
# One probe a head (LDA, out of fold), 4,000 words. `excess_random` is what a head has over a random
# projection of its input, with the interval for one such projection; `p` is its rank among them.

# %%
given = {"limit": words, "per_sentence": 3, "seed": 0}
data, label = (treebank, None) if treebank is not None else (senses, "pos")
pos = wvprobe.payload(model, data, label=label, draws=draws, **given)
columns = ["layer", "head", "score", "excess_random", "excess_random_low", "excess_pca"]
columns += ["excess_embedding", "excess_q", "excess_k", "p", "p_family"]
print(f"\n{pos.label}: {pos.n_items} words, {pos.n_groups} groups, {len(pos.classes)} labels")
shown(pos.best(8), columns)
pos.figure()

# %% [markdown]
# ## Senses
#
# Within each lemma, every sentence left out in turn: nearest centroid by cosine. Scores are means
# over lemmas. Lemmas whose senses share a part of speech are reported apart, since the others may
# be told apart by that alone. `method="lda"` says whether biases and scales of a site matter.

# %%
sense = wvprobe.payload(model, senses, draws=draws)
print(f"\nsenses: {sense.n_items} sentences, {sense.n_groups} lemmas")
shown(sense.best(5), columns)
if sense.same_pos is not None:
    print(f"one part of speech ({sense.same_pos.n_groups} lemmas):")
    shown(sense.same_pos.best(5), columns)
by_distance = wvprobe.payload(model, senses, draws=draws, method="lda")

# %% [markdown]
# ## Division of labour: v against q and k
#
# Claim 1.1 rests on this: v's excess must lie above q's and k's. Excesses differ between references
# only where these are not the same for all three sites.

# %%
results = {"part of speech": pos, "sense": sense, "sense, by distance": by_distance}
for name, found in results.items():
    if found.labour is None:  # there, since v, q and k were read
        continue
    print(f"\n{name}: excess of v, of q or k, and the difference, mean over layers")
    print(found.labour.contrasts_frame().round(3).to_string(index=False))
    value, low, high = found.labour.range.tolist()
    print(f"between layers v ranges over {value:.3f} [{low:.3f}, {high:.3f}]")
    found.labour.figure()

# %% [markdown]
# ## Where, and what: heads × layers × properties
#
# Which token it is, and where it stands, are properties as well.

# %%
for name in ("token", "position"):
    source = treebank if treebank is not None else senses
    results[name] = wvprobe.payload(model, source, label=name, draws=draws, **given)
payload_map(results).figure()

# %% [markdown]
# ## Named heads again, by a logistic probe

# %%
best = [(int(a), int(b)) for a, b in pos.best(3)[["layer", "head"]].to_numpy()]
again = confirm_heads(model, data, best, label=label, draws=2, penalty=1.0, **given)
print("\nlogistic:")
for head, row in zip(best, again.to_frame().itertuples(), strict=True):
    print(f"L{head[0]}H{head[1]}: {row.score:.3f}, {row.excess_random:+.3f} over random ones")

# %% [markdown]
# ## Does it matter?
#
# The label is taken linearly out of a head's values (LEACE), cross-fitted. Random directions of the
# same rank and energy are the control: what does the destination still show of the label, and how
# far does the next token's distribution move?

# %%
kl_heads = [] if why_no_head(model) else best
erased = wvprobe.erase(
    model, data, label=label, heads=best, draws=2 if options.smoke else 5, kl_heads=kl_heads,
    kl_words=20 if options.smoke else 100, **given,
)  # fmt: skip
print(f"\nerased (most frequent label: {erased.majority:.3f}):")
columns = ["layer", "head", "place", "before", "erased", "control", "excess_loss"]
shown(erased.to_frame(), [*columns, "excess_loss_low", "excess_loss_high", "p_family"])
if kl_heads:
    shown(erased.kl_frame(), ["layer", "head", "kl", "kl_control", "kl_excess"])
erased.figure()
