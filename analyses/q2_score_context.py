"""Is the query-key dot product fixed by the token pair? Ledgers, shares, and a corpus."""

# %% [markdown]
# # Is the query-key dot product fixed by the token pair?
#
# In "a power bank dropped into the river." and "The river bank is close to here." the same two
# tokens, `bank` and `river`, meet twice. This analysis asks of every head what their score is made
# of in each text, what makes it another in the other, how heads behave on text at large, and how
# much of a score's variance over a corpus the pair of tokens explains.
#
# Run it as a script (`python analyses/q2_score_context.py --model minilm-l6`), or cell by cell in
# an editor that knows percent cells. `--smoke` takes a small random model and finishes in seconds.
# With `--texts FILE`, one sentence a line (or a CoNLL-U file), the corpus is your own.

# %%
import argparse
import sys
from pathlib import Path

import wvprobe
from wvprobe.behaviour import behaviour_agreement, composed_with
from wvprobe.dissociation import double_dissociation
from wvprobe.errors import UnsupportedError
from wvprobe.inputs import mean_input
from wvprobe.ledger import check_terms

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
parser.add_argument("--texts", help="a file of sentences; the bundled prose without it")
parser.add_argument("--conllu", help="a treebank, for relations and for the corpus")
parser.add_argument("--sentences", type=int, default=2000, help="how many sentences of it")
parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
# In a notebook the arguments are the kernel's, not this analysis's.
options = parser.parse_args([] if "ipykernel" in sys.modules else None)

model = wvprobe.load("tiny:llama" if options.smoke else options.model)
text_a = "a power bank dropped into the river."
text_b = "The river bank is close to here."


def show(frame, rows=10):
    """Print the first rows of a frame."""
    print(frame.head(rows).round(3).to_string(index=False))


# %% [markdown]
# ## What makes the pair's score another one
#
# Exact Shapley shares of the query's content, the key's content and the offset in the change of
# the score between the two texts, at every head. At layer 0 the content is the same token in both,
# so that the offset is all there is.

# %%
for query, key in (("bank", "river"), ("river", "bank")):
    shares = wvprobe.context_dependence(model, text_a, text_b, query=query, key=key)
    frame = shares.to_frame()
    total = frame[["query_content", "key_content", "offset"]].abs().groupby(frame["layer"]).mean()
    total = total.div(total.sum(axis=1), axis=0)
    print(f"\n{query}→{key}: mean |share| over heads, by layer, of their sum:")
    show(total.reset_index(), rows=len(total))
    moved = frame["score_b"] - frame["score_a"]
    print(f"where the score changes most (masked: {shares.masked.any(dim=1).tolist()}):")
    show(frame.loc[moved.abs().sort_values(ascending=False).index], rows=5)
shares.figure()

# %% [markdown]
# ## One score, taken apart
#
# The head whose score of the pair differs most. Its score is an exact double sum over what the
# query and the key are made of: token, position, every earlier head and MLP, biases.

# %%
frame = wvprobe.context_dependence(model, text_a, text_b, query="bank", key="river").to_frame()
row = frame.loc[(frame["score_b"] - frame["score_a"]).abs().idxmax()]
layer, head = int(row["layer"]), int(row["head"])
for text in (text_a, text_b):
    ledger = wvprobe.score_ledger(model, text, query="bank", key="river", layer=layer, head=head)
    print(f"\nL{layer}H{head}, {text!r}: score {ledger.total:.3f}")
    print(f"reconstruction error {ledger.reconstruction_error:.1e} of c‖q‖‖k‖")
    show(ledger.top(8))
ledger.figure()

# %% [markdown]
# The same by kind, and by the token that each part came from through one step of attention.

# %%
for group in ("kind", "source"):
    grouped = wvprobe.score_ledger(
        model, text_b, query="bank", key="river", group=group, layer=layer, head=head
    )
    print(f"\nby {group}:")
    show(grouped.top(8))

# %% [markdown]
# Does a term predict what happens without it? Components are taken out and the model is run again:
# with the norm's scale frozen the ledger is exact, with the norm evaluated anew it is a prediction.

# %%
checked = check_terms(model, ledger, n=10 if options.smoke else 50)
print("\npredicted against measured:")
show(checked.to_frame())
print(checked.summary().round(3).to_string(index=False))
checked.figure()

# %% [markdown]
# ## What heads do on text, and what their weights say
#
# Attention to the token before, to earlier copies, to what followed them, to sinks; beside uniform
# attention over the same keys. Then rank correlations with numbers read off the weights alone.

# %%
behaviour = wvprobe.head_behaviour(model)
print("\nthe strongest heads of each kind:")
print(behaviour.named(3).round(3).to_string(index=False))
behaviour.figure()

# %%
heads = wvprobe.HeadWeights.from_model(model)
weights = {}
sentences = [item.sentence for item in wvprobe.load_senses()]
try:
    mean = mean_input(model, sentences).mean
    profile = wvprobe.offset_profile(heads, range(64), mean_input=mean)
    weights["b(1)"] = profile.weights()[..., profile.offsets.index(1)]
except UnsupportedError as refused:
    print(f"no profile of offsets: {refused}")
try:
    rows = 200 if options.smoke else 2000
    weights["copying rank"] = wvprobe.copying_scores(heads, rows=rows).rank
except UnsupportedError as refused:
    print(f"no copying scores: {refused}")
through_keys = wvprobe.composition(heads, "K")
first = behaviour.named(1, kinds=["previous_token"]).iloc[0]
weights["K-composition"] = composed_with(
    through_keys.scores, int(first["layer"]), int(first["head"])
)
pairs = [
    ("previous_token_text", "b(1)"),
    ("copying", "copying rank"),
    ("induction", "copying rank"),
    ("induction", "K-composition"),
]
pairs = [pair for pair in pairs if pair[1] in weights]
agreement = behaviour_agreement(behaviour, weights, pairs=pairs)
print("\nbehaviour and weights, rank correlation over heads:")
print(agreement.to_frame().round(3).to_string(index=False))
agreement.figure()

# %% [markdown]
# ## Values and patterns exchanged
#
# Between two texts of equal length a head's pattern alone, or its values alone, is taken from the
# other: which of the two brings the other's content along?

# %%
found = double_dissociation(model, n_pairs=20 if options.smoke else 200)
print("\nvalues against patterns:")
print(found.summary().round(3).to_string(index=False))
found.figure()

# %% [markdown]
# ## Where a head's words come from
#
# Attention beside the length of what it moves: a sink is looked at, and little comes of it.

# %%
flow = wvprobe.value_flow(model, text_b)
moving = flow.to_frame().sort_values("norm", ascending=False)
print("\nthe longest vectors moved to the last token:")
show(moving)
flow.figure()

# %% [markdown]
# ## Over a corpus
#
# Of the variance of a head's scores within a query's row: what the pair of tokens explains, what
# the offset adds, and what is left to context, in texts that the means were not learnt from.

# %%
texts = None
if options.conllu:
    texts = [s.text for s in wvprobe.load_conllu(options.conllu)][: options.sentences]
elif options.texts:
    texts = Path(options.texts).read_text(encoding="utf-8").splitlines()[: options.sentences]
variance = wvprobe.score_variance(model, texts)
frame = variance.to_frame()
print("\nmedian shares over the heads of a layer:")
columns = ["pair_corrected", "offset_corrected", "context_corrected"]
show(frame.groupby("layer")[columns].median().reset_index(), rows=len(frame))
print(frame["kind"].value_counts().to_string())
share, low, high = variance.heads_above
print(f"context share above .10: {share:.0%} ({low:.0%} to {high:.0%}) of the heads above layer 0")
variance.figure()
