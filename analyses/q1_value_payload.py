"""What W_V carries: which heads' values know a label, and whether it matters that they do."""

# %% [markdown]
# # What does W_V carry?
#
# **Question.** W_Q and W_K are said to route, W_V to carry what flows along the route. Do a head's
# values know more of a word than its queries and keys do, and does it matter that they know it?
#
# **Method.** A linear probe reads a label off every head's v, q and k, on words it was not fitted
# to. Almost any 64 directions of a stream tell parts of speech apart, so each score stands beside
# random projections of the same input, its principal components and the word's embedding. Then the
# label is erased from the best heads' values, against random directions of the same energy.
#
# **Run it** as a script (`python analyses/q1_value_payload.py --model minilm-l6 --conllu FILE`),
# cell by cell in an editor that knows percent cells, or as a notebook (`make notebooks`). Without a
# treebank, parts of speech are nouns against verbs in the bundled sentences. `--smoke` takes a
# small random model.

# %%
import argparse
import sys

import wvprobe
from wvprobe.adapters import why_no_head
from wvprobe.value_payload import confirm_heads, payload_map

# %% tags=["parameters"]
# A notebook's arguments, such as ["--model", "minilm-l6"]; a script has those it is given.
arguments = [] if "ipykernel" in sys.modules else None

# %%
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--conllu", help="a treebank, for parts of speech")
parser.add_argument("--senses", help="words in context, for senses; else the bundled set")
parser.add_argument("--words", type=int, default=4000, help="at most so many words of a label")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
options = parser.parse_args(arguments)

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
# One probe a head (LDA, out of fold). `excess_random` is what a head has over a random projection
# of its input, with the lower end of the interval for one such projection; `p` is its rank among
# them, and `p_family` accounts for the number of heads.

# %%
given = {"limit": words, "per_sentence": 3, "seed": 0}
data, label = (treebank, None) if treebank is not None else (senses, "pos")
pos = wvprobe.payload(model, data, label=label, draws=draws, **given)
columns = ["layer", "head", "score", "excess_random", "excess_random_low", "excess_pca"]
columns += ["excess_embedding", "excess_q", "excess_k", "p", "p_family"]
print(f"{pos.label}: {pos.n_items} words, {pos.n_groups} groups, {len(pos.classes)} labels")
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
print(f"senses: {sense.n_items} sentences, {sense.n_groups} lemmas")
shown(sense.best(5), columns)
if sense.same_pos is not None:
    print(f"one part of speech ({sense.same_pos.n_groups} lemmas):")
    shown(sense.same_pos.best(5), columns)
by_distance = wvprobe.payload(model, senses, draws=draws, method="lda")
sense.figure()

# %% [markdown]
# ## Division of labour: v against q and k
#
# Excesses of v, and of q or k, as means over layers; `value` is their difference. It depends on the
# reference only where that is not the same for all three sites.

# %%
results = {"part of speech": pos, "sense": sense, "sense, by distance": by_distance}
# None would be there if one of v, q and k had not been read.
labours = {name: found.labour for name, found in results.items() if found.labour is not None}
for name, labour in labours.items():
    print(f"\n{name}: excess of v, of q or k, and the difference, mean over layers")
    shown(labour.contrasts_frame(), slice(None))
    value, low, high = labour.range.tolist()
    print(f"between layers v ranges over {value:.3f} ({low:.3f} to {high:.3f})")

# %% tags=["gallery"]
labours["part of speech"].figure()

# %%
labours["sense, by distance"].figure()

# %% [markdown]
# ## Where, and what: heads × layers × properties
#
# Which token it is, and where it stands, are properties as well.

# %%
properties = dict(results)
for name in ("token", "position"):
    source = treebank if treebank is not None else senses
    properties[name] = wvprobe.payload(model, source, label=name, draws=draws, **given)
payload_map(properties).figure()

# %% [markdown]
# ## Named heads again, by a logistic probe

# %%
best = [(int(a), int(b)) for a, b in pos.best(3)[["layer", "head"]].to_numpy()]
again = confirm_heads(model, data, best, label=label, draws=2, penalty=1.0, **given)
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
print(f"most frequent label: {erased.majority:.3f}")
columns = ["layer", "head", "place", "before", "erased", "control", "excess_loss"]
shown(erased.to_frame(), [*columns, "excess_loss_low", "excess_loss_high", "p_family"])
if kl_heads:
    shown(erased.kl_frame(), ["layer", "head", "kl", "kl_control", "kl_excess"])
erased.figure()

# %% [markdown]
# ## Result
#
# The rule: values carry a label, and queries and keys do not, where v's excess over random
# projections lies above q's and k's, intervals above 0.

# %% tags=["finding"]
divided = []
for name, found in results.items():
    head = found.best(1).iloc[0]
    at = f"L{head['layer']}H{head['head']}"
    print(
        f"{name.capitalize()}: the best of {len(found.best(10**6))} key-value heads, {at}, has a "
        f"score of {head['score']:.2f}, {head['excess_random']:+.3f} over random projections "
        f"({head['excess_random_low']:+.3f} to {head['excess_random_high']:+.3f}; p over all heads "
        f"{head['p_family']:.3f})."
    )
    rows = list(labours[name].contrasts_frame().query("reference == 'random'").itertuples())
    divided += [(row.low > 0) - (row.high < 0) for row in rows]
    each = ", ".join(
        f"{row.value:+.3f} ({row.low:+.3f} to {row.high:+.3f}) from {row.against}'s" for row in rows
    )
    print(f"v's excess, mean over layers, differs by {each}.")
of_best = f"place == 'attn_added' and layer == {best[0][0]} and head == {best[0][1]}"
loss = erased.to_frame().query(of_best).iloc[0]
print(
    f"With the label erased from L{loss['layer']}H{loss['head']}'s values, the score in what its "
    f"layer adds goes from {loss['before']:.3f} to {loss['erased']:.3f}, a loss of "
    f"{loss['excess_loss']:+.3f} ({loss['excess_loss_low']:+.3f} to "
    f"{loss['excess_loss_high']:+.3f}) over that of random directions."
)
above, below = divided.count(1), divided.count(-1)
verdict = "values carry more" if above == len(divided) else "mixed"
if below == len(divided):
    verdict = "values carry less"
print(f"Verdict: {verdict} (v above in {above} of {len(divided)} contrasts, below in {below}).")

# %% [markdown]
# ## Caveats
#
# * A probe says what can be read off a vector, not what the model reads. Erasing is nearer to that,
#   and other heads may carry the label as well.
# * The best of many heads is best by luck, too: its own interval does not know of the choice.
#   `p_family` does.
# * Under grouped queries a layer has fewer keys and values than queries, and a layer's mean is over
#   the heads that there are.
# * Senses by cosine hang on a site's biases and scales; by distance they do not.
#
# ## What would change the verdict
#
# Another label or other texts: queries and keys carry whatever they route by. Another reference,
# where it is not the same for all three sites. A treebank (`--conllu`) has finer parts of speech
# than nouns and verbs, and a set of senses of your own (`--senses`) other words.
