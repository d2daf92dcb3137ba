"""A model, and what several claims need of it, measured once."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from wvprobe.adapters import architecture
from wvprobe.attention_clock import AttentionTimes, time_attention
from wvprobe.auditing import AuditResult, audit
from wvprobe.behaviour import DependencyResult, dependency_heads
from wvprobe.context_shares import ContextResult, context_dependence
from wvprobe.contextual_drift import (
    GrowthResult,
    PairDriftResult,
    drift,
    drift_baseline,
    drift_pair,
    growth_law,
    score_drift,
)
from wvprobe.counterfactual import (
    BiasResult,
    HeadRanks,
    ResizeResult,
    SequentialResult,
    ShareResult,
    compare_biases,
    head_ranks,
    resize_heads,
    sequential_heads,
    share_kv_heads,
)
from wvprobe.datasets import SenseDataset, labelled_senses, load_senses
from wvprobe.dissociation import DissociationResult, double_dissociation
from wvprobe.errors import UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.influence import InfluenceResult, context_influence
from wvprobe.ledger import LedgerResult, score_ledger
from wvprobe.pair_variance import VarianceResult, score_variance
from wvprobe.report.given import BANK, QUICK, Given, Sizes, short_prose, spaced
from wvprobe.sense_maps import SenseMap, sense_map
from wvprobe.subspaces import OverlapResult, subspace_overlap
from wvprobe.value_payload import LabourResult, PayloadResult, payload
from wvprobe.word_pairs import PairScores, pair_scores

TEXT_A, TEXT_B = BANK.texts
CUT = 0.25  # of the total rank, which cut heads keep


class Measured:
    """A model, and what several claims need of it. Each is measured when first asked for."""

    def __init__(self, model: Any, given: Given | None = None, sizes: Sizes = QUICK) -> None:
        """Measure nothing yet.

        Args:
            model: a TransformerBridge.
            given: what the reader brings along; None for the bundled texts and words alone.
            sizes: how much of everything is taken.
        """
        self.model, self.sizes = model, sizes
        self.given = Given() if given is None else given
        self.pair = self.given.pair

    @property
    def other(self) -> str:
        """The word whose key is read.

        Raises:
            UnsupportedError: the two texts share no second word.
        """
        if self.pair.other is None:
            raise UnsupportedError(
                f"the two sentences share no word but “{self.pair.word}”, and a score needs two. "
                "Name one that both hold with --other."
            )
        return self.pair.other

    @cached_property
    def sample(self) -> SenseDataset:
        """Words in context: the reader's, or the bundled ones."""
        senses = load_senses() if self.given.senses is None else self.given.senses
        return self._spaced(senses)

    @cached_property
    def texts(self) -> tuple[str, ...] | None:
        """The reader's texts to judge on, or None."""
        texts = self.given.texts
        return None if texts is None else tuple(spaced(texts, self.sizes.sentences))

    @cached_property
    def audited(self) -> AuditResult:
        """What was read out of the model, held against what it computes itself."""
        return audit(self.model)

    @cached_property
    def payloads(self) -> dict[str, PayloadResult]:
        """What values, queries and keys carry of senses and of parts of speech.

        Parts of speech are the treebank's, or nouns against verbs of the bundled sentences.
        """
        treebank = self.given.treebank
        speech = labelled_senses(self._spaced(load_senses())) if treebank is None else treebank
        label = "pos" if treebank is None else None
        settings: dict[str, Any] = {"draws": self.sizes.draws, "control_draws": self.sizes.controls}
        # Not by cosine, whose contrasts between sites hang on their biases and scales.
        return {
            "sense": payload(self.model, self.sample, method="lda", **settings),
            "pos": payload(self.model, speech, label=label, **settings),
        }

    @cached_property
    def labours(self) -> dict[str, LabourResult]:
        """Of both labels, values against queries and keys."""
        found = self.payloads.items()
        return {name: each.labour for name, each in found if each.labour is not None}

    @cached_property
    def dissociation(self) -> DissociationResult:
        """What exchanged values and exchanged patterns do to heads' output."""
        return double_dissociation(self.model, n_pairs=self.sizes.exchanged, progress=False)

    @cached_property
    def overlap(self) -> OverlapResult:
        """Overlap of the spaces that layers' values are read from."""
        return subspace_overlap(HeadWeights.from_model(self.model), "V")

    @cached_property
    def growth(self) -> GrowthResult:
        """Which law the distance between a word's senses grows by, over the words in context."""
        curves = drift(self.model, self.sample).curves()
        score = score_drift(self.model, self.sample).difference
        return growth_law({"cosine": curves["cosine"], "score": score}, words=self.sample.words)

    def _spaced(self, senses: SenseDataset) -> SenseDataset:
        return replace(senses, items=tuple(spaced(senses.items, self.sizes.sentences)))

    @cached_property
    def bank(self) -> PairDriftResult:
        """The word's two vectors by stream."""
        senses, most = self.given.senses, self.sizes.baseline
        baseline = drift_baseline(self.model, senses, sentences=most)
        return drift_pair(self.model, *self.pair.texts, word=self.pair.word, baseline=baseline)

    @cached_property
    def scores(self) -> PairScores:
        """Scores between the two words, in both directions, in both texts."""
        return pair_scores(self.model, self.pair.texts, self.pair.word, self.other)

    @cached_property
    def shares(self) -> ContextResult:
        """The scores from the one word to the other in both texts, their difference taken apart."""
        words = {"query": self.pair.word, "key": self.other}
        return context_dependence(self.model, *self.pair.texts, **words)

    @cached_property
    def variance(self) -> VarianceResult:
        """What explains scores: pairs, offsets, context; over the texts, or the sentences."""
        texts = self.texts or [item.sentence for item in self.sample]
        return score_variance(self.model, texts, progress=False)

    @cached_property
    def ledger(self) -> LedgerResult:
        """The pair's score in the second text, at the head whose score differs most, by kind."""
        found = self.shares
        change = ((found.scores[1] - found.scores[0]) / found.scale).abs()
        layer, head = divmod(int(change.argmax()), change.shape[1])
        words = {"query": self.pair.word, "key": self.other}
        return score_ledger(self.model, self.pair.text_b, **words, layer=layer, head=head)

    @cached_property
    def dependencies(self) -> DependencyResult:
        """Which heads find the words that others depend on, in the treebank.

        Raises:
            UnsupportedError: there is no treebank.
        """
        if self.given.treebank is None:
            raise UnsupportedError(
                "it needs sentences with dependency relations, which do not come with wvprobe: "
                "wvprobe report --conllu FILE."
            )
        limit = self.sizes.treebank
        return dependency_heads(self.model, self.given.treebank, limit=limit, progress=False)

    @cached_property
    def sequence(self) -> SequentialResult:
        """All blocks with their heads one after another, in three orders."""
        return sequential_heads(self.model, self.prose, layers="all", orders=3)

    @cached_property
    def single_blocks(self) -> SequentialResult:
        """The first block, the middle one and the last, each alone, likewise."""
        n_layers = self.model.cfg.n_layers
        blocks = [[layer] for layer in sorted({0, n_layers // 2, n_layers - 1})]
        return sequential_heads(self.model, self.prose, layers=blocks)

    @cached_property
    def prose(self) -> Sequence[str]:
        """What changed models are judged on: the reader's texts, or held-out prose."""
        return spaced(self.given.texts or short_prose(), self.sizes.paragraphs)

    @cached_property
    def fitted(self) -> Sequence[str]:
        """What heads are cut and shared by: prose that nothing is judged on."""
        return spaced(short_prose("calibration"), 3 * self.sizes.paragraphs)

    @cached_property
    def influence(self) -> InfluenceResult:
        """What the words before and after the word do to its vector in the first text.

        Raises:
            UnsupportedError: nothing stands after it.
        """
        if not self.pair.later:
            raise UnsupportedError(
                f"nothing follows “{self.pair.word}” in “{self.pair.text_a}”. Use a first "
                "sentence that goes on behind it."
            )
        return context_influence(self.model, self.pair.text_a, word=self.pair.word)

    @cached_property
    def senses(self) -> SenseMap | None:
        """Sentences with the word, at the middle stream; None where no set has it."""
        sets = (self.given.senses, load_senses())
        found = next((some for some in sets if some and self.pair.word in some.words), None)
        return None if found is None else sense_map(self.model, self.pair.word, dataset=found)

    @cached_property
    def resized(self) -> ResizeResult:
        """Values of every head cut to a fourth of the rank, evenly or by energy, layer by layer."""
        return resize_heads(
            self.model,
            self.prose,
            budget=CUT,
            allocation=("uniform", "energy"),
            scope="layer",
            calibration=self.fitted,
        )

    @cached_property
    def shared(self) -> tuple[ShareResult, ShareResult]:
        """All key-value heads shared, after the even cut and after the uneven one.

        Raises:
            UnsupportedError: the model has one key-value head, or caches a latent.
        """
        if architecture(self.model).n_kv_heads == 1:
            raise UnsupportedError(
                f"{self.model.cfg.model_name} has one key-value head in each layer, which is "
                "shared already."
            )
        even, uneven = (
            share_kv_heads(
                self.model,
                self.prose,
                n_kv_heads=1,
                after=self.resized.plan(setting),
                calibration=self.fitted,
            )
            for setting in self.resized.settings[:2]
        )
        return even, uneven

    @cached_property
    def ranks(self) -> HeadRanks:
        """How many of its dimensions each head makes use of; few tokens would make it fewer."""
        return head_ranks(self.model, spaced(short_prose("calibration"), 6 * self.sizes.paragraphs))

    @cached_property
    def clock(self) -> AttentionTimes:
        """Attention timed over head widths on this machine."""
        return time_attention(directions=("forward",), uneven=(), seconds=self.sizes.clock)

    @cached_property
    def biases(self) -> BiasResult:
        """Small models trained from scratch, heads side by side against heads in a row."""
        return _trained(quick=not self.sizes.full_training)


@cache
def _trained(*, quick: bool) -> BiasResult:
    """Train small models once a process: all models of a report are held against the same."""
    return compare_biases(quick=quick, progress=False)
