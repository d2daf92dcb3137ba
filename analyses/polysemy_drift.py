"""How a polysemous token parts ways, from layer to layer, in two sentences and in many."""

# %% [markdown]
# # How a polysemous token parts ways
#
# **Question.** In "a power bank dropped into the river." and "The river bank is close to here." one
# token, `bank`, stands for two things. At the embedding its two vectors are the same. From which
# layer on are they the vectors of two senses, and which heads and MLPs part them?
#
# **Method.** Cosines stream by stream, held against pairs in which the word has one sense. Over the
# sentences of many words: how well senses are told, each sentence left out in turn, beside shuffled
# senses. The difference of two vectors is an exact sum over components; strong heads are exchanged.
#
# **Run it** as a script (`python analyses/polysemy_drift.py --model minilm-l6`), cell by cell in an
# editor that knows percent cells, or as a notebook (`make notebooks`). `--smoke` takes a small
# random model. `--senses FILE` brings your own words.

# %%
import argparse
import sys

import torch

import wvprobe
from wvprobe.contextual_drift import drift_baseline, growth_law, held_out_senses, score_drift
from wvprobe.datasets import SenseDataset
from wvprobe.influence import context_influence
from wvprobe.sense_maps import sense_map, sense_map_by_layer
from wvprobe.word_pairs import pair_scores

# %% tags=["parameters"]
# A notebook's arguments, such as ["--model", "minilm-l6"]; a script has those it is given.
arguments = [] if "ipykernel" in sys.modules else None

# %%
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--words", nargs="*", default=["bank", "bat", "spring", "seal", "match"])
parser.add_argument("--senses", help="marked words to follow; the bundled set unless given")
parser.add_argument("--split", help="marked words with a train and a test part (CoarseWSD-20)")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
options = parser.parse_args(arguments)

model = wvprobe.load("tiny:llama" if options.smoke else options.model)
words = options.words[:2] if options.smoke else options.words
text_a = "a power bank dropped into the river."
text_b = "The river bank is close to here."

# %% [markdown]
# ## The two vectors, stream by stream
#
# Cosine, raw and minus what random words have in common (Ethayarajh 2019), beside the 5th
# percentile of pairs in which `bank` has one sense. Below it, the two are further apart than
# context alone makes them.

# %% tags=["gallery"]
baseline = drift_baseline(model)
pair = wvprobe.drift_pair(model, text_a, text_b, word="bank", baseline=baseline)
columns = ["layer", "cosine", "same_low", "same_median", "cosine_adjusted", "distance"]
print(pair.to_frame()[columns].round(3).to_string(index=False))
beyond = pair.to_frame().query("cosine < same_low")["layer"].tolist()
print(f"below the band of {pair.n_same} same-sense pairs at streams: {beyond or 'none'}")
pair.figure()

# %% [markdown]
# ## What drives them apart
#
# The difference of the two vectors is an exact sum over everything that wrote them. Shares are
# taken along the difference, and sum to 1.

# %%
contributions = pair.contributions
print(f"at stream {contributions.layer} (they sum to {float(contributions.shares.sum()):.6f}):")
print(contributions.to_frame().head(10).round(3).to_string(index=False))
contributions.figure()

# %% [markdown]
# ## Scores of the pair
#
# At layer 0 the tokens are the same in both texts, so what differs is position's doing alone.
# Above, the same pair is scored by other vectors: shares of the query's content, the key's content
# and the offset say whose. Gauge-fixed scores can be compared between queries; raw ones cannot.

# %%
shares = wvprobe.context_dependence(model, text_a, text_b, query="bank", key="river")
parts = ["query_content", "key_content", "offset"]
frame = shares.to_frame()
print("layer 0, bank→river, by head:")
columns = ["head", "score_a", "score_b", *parts, "scale"]
print(frame.query("layer == 0")[columns].round(4).to_string(index=False))
print("\nby layer, mean over heads of |share| / c‖q‖‖k‖:")
sizes = frame[parts].abs().div(frame["scale"], axis=0).groupby(frame["layer"]).mean()
print(sizes.round(3).to_string())
shares.figure()

# %% [markdown]
# ## One score, term by term
#
# The head and layer where the raw scores differ most, in the second sentence: which parts of the
# query meet which parts of the key.

# %%
most = frame.loc[((frame["score_b"] - frame["score_a"]) / frame["scale"]).abs().idxmax()]
layer, head = int(most["layer"]), int(most["head"])
ledger = wvprobe.score_ledger(model, text_b, query="bank", key="river", layer=layer, head=head)
print(f"L{layer}H{head}: {ledger.total:.3f}, its largest terms:")
columns = ["query_component", "key_component", "term", "gauge_fixed", "sink", "is_gauge"]
print(ledger.top(8)[columns].round(3).to_string(index=False))
ledger.figure()

# %%
scores = pair_scores(model, [text_a, text_b], "bank", "river")
strongest = scores.to_frame().sort_values("attention", ascending=False)
print("where most attention goes from one to the other:")
print(strongest.head(5).round(3).to_string(index=False))
scores.figure()

# %% [markdown]
# ## What stands before the word, and what after it
#
# A decoder masks what lies ahead: `bank` in the first sentence knows nothing of the river.

# %%
influence = context_influence(model, text_a, word="bank", draws=4 if options.smoke else 24)
last = influence.to_frame().groupby("side", sort=False).tail(1)
print("relative change of the last vector when other words stand there:")
print(last.round(4).to_string(index=False))
influence.figure()

# %% [markdown]
# ## Other words
#
# How well the senses of each word are told apart at the middle stream, with the interval and with
# what the same procedure makes of shuffled senses.

# %%
print("word      senses  accuracy  interval        shuffled, 95th percentile")
for word in words:
    found = sense_map(model, word)
    low, high = found.interval
    print(
        f"{word:8s}  {len(set(found.senses)):6d}  {found.accuracy:8.2f}  {low:.2f} to {high:.2f}"
        f"    {found.control[1]:.2f}"
    )
sense_map(model, "bank").figure()

# %% [markdown]
# ## The vectors themselves
#
# Everything above is made of these: one vector a stream and text.

# %%
vectors = wvprobe.capture(model, [text_a, text_b], "stream", words="bank")["stream"]
print("shape of the two vectors [text, stream, d_model]:", list(vectors.shape))
lengths = torch.linalg.vector_norm(vectors, dim=-1)
print("their lengths at the last stream:", [round(x, 2) for x in lengths[:, -1].tolist()])

# %% [markdown]
# ## Many words
#
# The same for all words of a set, in one reading: how alike a word's occurrences are beside random
# words, how far its senses part, and how well they are told, each sentence left out in turn.
# Intervals are over words. Corrected numbers (here: the random words' mean taken off) stand beside.

# %%
senses = wvprobe.load_senses(options.senses)
if options.smoke:
    senses = SenseDataset("smoke", senses.only("bank").items[::4])
many = wvprobe.drift(model, senses, correction="mean")
measures = ["self_similarity_adjusted", "intra_sentence_adjusted", "gap", "gap_corrected"]
measures += ["centroid_accuracy", "knn_accuracy"]
table = many.summary().pivot(index="layer", columns="measure", values="mean")[measures]
print(f"{len(many.words)} words, {sum(many.n)} sentences, {len(many.dropped)} dropped as sinks:")
print(table.round(3).to_string())
rogue = many.rogue_frame().query("rank == 0")
print("\nthe dimension that makes up most of the likeness of random words:")
print(rogue.drop(columns="rank").round(3).to_string(index=False))
many.figure()

# %% [markdown]
# ## Streams beside each other
#
# What a stream keeps of those before it: CKA of all words' vectors, and of what contexts do to
# them.

# %%
likeness = many.layers.to_frame()
print("likeness of the last stream to the others:")
last_stream = likeness[likeness["layer2"] == likeness["layer2"].max()]
kept = ["layer", "cka", "cka_error", "cka_within", "cka_within_error"]
print(last_stream[kept].round(3).to_string(index=False))
many.layers.figure()

# %% [markdown]
# ## Told from before, told from after
#
# Read at the word a decoder can use the left context alone; read at the sentence's last token it
# has seen all of it. In an encoder the difference has no such reason to be there.

# %%
at_the_end = wvprobe.drift(model, senses, position="last_token")
for name, result in (("the word", many), ("the sentence's last token", at_the_end)):
    apart = result.context_frame()
    apart = apart[(apart["layer"] == apart["layer"].max()) & (apart["measure"] != "knn_accuracy")]
    print(f"\nread at {name}, last stream:")
    print(apart.drop(columns="layer").round(3).to_string(index=False))

# %% [markdown]
# ## Which heads and MLPs pull senses apart
#
# Over pairs of sentences, every component's contribution along the line from one sense to the
# other, beside pairs of one sense (`control`). The strongest heads are then checked: each head's
# output at the word is exchanged between the two sentences and the model run on. `predicted` is
# the direct contribution, `measured` what the exchange takes off the separation; later blocks
# make of a head's output more, or less, than the direct path shows.

# %%
drivers = wvprobe.drift_drivers(model, senses)
found = drivers.to_frame()
by_kind = found.groupby("kind")["share"].sum()
print(f"stream {drivers.layer}, {len(drivers.words)} words; shares of the separation by kind:")
print(by_kind.round(3).to_string())
columns = ["component", "contribution", "low", "high", "control_high", "predicted", "measured"]
columns += ["measured_same"]
print("\nthe strongest heads, and what exchanging them does:")
print(found[found["measured"].notna()][columns].round(3).to_string(index=False))
print("\npredicted against measured:")
print(drivers.agreement().round(2).to_string(index=False))
drivers.figure()

# %%
looks = drivers.looks_frame().pivot(index=["layer", "head"], columns="kind", values="attention")
print("where these heads look from the word (attention by kind of key):")
print(looks[list(drivers.kinds)].round(2).to_string())
for head, sources in zip(drivers.heads[:3], drivers.sources[:3], strict=True):
    most = (f"{one.target} → {one.source} ({one.attention:.2f})" for one in sources[:5])
    print(f"{head}: {', '.join(most)}")

# %% [markdown]
# ## By which law
#
# Four laws fitted to each word's curve, in four metrics; the share of words in which each is best.
# The last metric is a score: that of the word with itself, between sentences of different senses.

# %%
scores_apart = score_drift(model, senses)
curves = {**many.curves(), "score": scores_apart.difference}
laws = growth_law(curves, words=many.words)
if laws.untestable:
    print(f"\ngrowth laws are not testable: {laws.untestable}")
for errors in () if laws.untestable else ("absolute", "relative"):
    laws = growth_law(curves, words=many.words, errors=errors)
    print(f"\nbest law, least {errors} errors:")
    print(laws.summary().round(2).to_string(index=False))
laws.figure()

# %% [markdown]
# ## Other sentences
#
# Centroids of a training part, judged on a test part: `--split ../shared/data/coarsewsd20/bank`.

# %%
if options.split:
    held_out = held_out_senses(model, wvprobe.load_senses(options.split))
    columns = ["layer", "balanced_accuracy", "low", "high", "chance", "accuracy", "majority"]
    print("centroids of the training part on the test part:")
    print(held_out.to_frame()[columns].round(3).to_string(index=False))

# %% [markdown]
# ## The senses of one word, stream by stream
#
# Move the slider: in a decoder the senses lie on one point at the embedding.

# %%
by_layer = sense_map_by_layer(model, "bank")
print("accuracy by stream:", [round(x, 2) for x in by_layer.accuracy.tolist()])
by_layer.figure()

# %% [markdown]
# ## Result
#
# The rule: the two vectors are those of two senses from the stream on after which their cosine
# stays below the 5th percentile of same-sense pairs; a set's senses are told where the accuracy's
# interval lies above the 95th percentile of shuffled senses.

# %% tags=["finding"]
streams = len(pair.cosine)
below = (pair.cosine < pair.same_cosine[0]).tolist()
start = next((k for k in range(streams) if all(below[k:])), None)
print(
    f"`bank` in the two sentences: cosine {float(pair.cosine[0]):.2f} at the embedding, "
    f"{float(pair.cosine[-1]):.2f} at the last stream, where 95 of 100 same-sense pairs have "
    f"{float(pair.same_cosine[0][-1]):.2f} or more. Verdict: "
    f"{'not two senses to the end' if start is None else f'two senses from stream {start} on'} "
    f"(below the band at {sum(below)} of {streams} streams)."
)
accuracy = many.summary().query("measure == 'centroid_accuracy'").set_index("layer")
told = [k for k in accuracy.index if accuracy["low"][k] > float(many.control[1, k])]
most = accuracy["mean"].idxmax()
print(
    f"{len(many.words)} words: senses are told at {len(told)} of {streams} streams, best at stream "
    f"{most}: accuracy {accuracy['mean'][most]:.2f} ({accuracy['low'][most]:.2f} to "
    f"{accuracy['high'][most]:.2f}; shuffled {float(many.control[1, most]):.2f})."
)
places = many.context_frame().query("measure == 'centroid_accuracy'").groupby("context").last()
for place, row in places.iterrows():
    if place == "before - after":
        print(
            f"At the last stream words before it tell a sense by {row['mean']:+.2f} "
            f"({row['low']:+.2f} to {row['high']:+.2f}) better than words after it do."
        )
head, shared = drivers.heads[0], by_kind / by_kind.sum()
line = found.set_index("component").loc[str(head)]
print(
    f"Of the separation at stream {drivers.layer} MLPs write {shared.get('mlp', 0.0):.0%}, heads "
    f"{shared.get('head', 0.0):.0%}. {head} does most: {line['contribution']:.2f} "
    f"({line['low']:.2f} to {line['high']:.2f}); exchanging it takes off {line['measured']:.2f} "
    f"({line['measured_low']:.2f} to {line['measured_high']:.2f}), within one sense "
    f"{line['measured_same']:.2f}."
)
if not laws.untestable:
    for row in laws.summary().query("law == 'exponential'").itertuples():
        print(f"An exponential fits {row.metric} best in {row.share:.0%} of words.")

# %% [markdown]
# ## Caveats
#
# * One pair of sentences is one pair: the two differ in more than the sense of `bank`. The many
#   words are what a finding should rest on.
# * What goes with sense in a set counts as sense: position, part of speech, length of the sentence.
# * A decoder's word has seen what stands before it alone. Where the telling words come after it,
#   nothing can be told, and nothing should be concluded from its not being told.
# * Contributions are direct: what later blocks make of a head's output is in their contributions.
# * Layers are no independent observations; laws are judged word by word.
#
# ## What would change the verdict
#
# Another pair of sentences, or a set whose senses are nearer to each other (`--senses`): the
# bundled words are mostly homonyms. An encoder has no 'before' and 'after', so that its difference
# is the control for a decoder's.
