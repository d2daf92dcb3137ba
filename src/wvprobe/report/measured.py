"""A model, and what several claims need of it, measured once."""

from dataclasses import replace
from functools import cached_property
from typing import Any

from wvprobe.adapters import architecture
from wvprobe.attention_clock import AttentionTimes, time_attention
from wvprobe.behaviour import DependencyResult, dependency_heads
from wvprobe.context_shares import ContextResult, context_dependence
from wvprobe.contextual_drift import (
    GrowthResult,
    PairDriftResult,
    drift,
    drift_pair,
    growth_law,
    score_drift,
)
from wvprobe.counterfactual import (
    HeadRanks,
    ResizeResult,
    ShareResult,
    head_ranks,
    resize_heads,
    share_kv_heads,
)
from wvprobe.datasets import (
    LabelledDataset,
    SenseDataset,
    labelled_senses,
    load_prose,
    load_senses,
)
from wvprobe.dissociation import DissociationResult, double_dissociation
from wvprobe.errors import UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.influence import InfluenceResult, context_influence
from wvprobe.ledger import LedgerResult, score_ledger
from wvprobe.pair_variance import VarianceResult, score_variance
from wvprobe.sense_maps import SenseMap, sense_map
from wvprobe.subspaces import OverlapResult, subspace_overlap
from wvprobe.value_payload import LabourResult, PayloadResult, payload
from wvprobe.word_pairs import PairScores, pair_scores

TEXT_A = "a power bank dropped into the river."
TEXT_B = "The river bank is close to here."
WORD, OTHER = "bank", "river"
_DRAWS = 20  # random projections a layer
_EXCHANGED = 20  # pairs of texts
_EVERY = 4  # of the bundled sentences every fourth, some seconds of them
_SENTENCES = 1000  # of a treebank, which a report takes
# Paragraphs of prose that heads are cut by, and that cut models are judged on: short ones.
_SHORT, _FITTED, _JUDGED = 160, 36, 16
CUT = 0.25  # of the total rank, which cut heads keep


class Measured:
    """A model, and what several claims need of it. Each is measured when first asked for."""

    def __init__(self, model: Any, *, treebank: LabelledDataset | None = None) -> None:
        """Measure nothing yet.

        Args:
            model: a TransformerBridge.
            treebank: sentences with dependencies, for the claims that need some.
        """
        self.model, self.treebank = model, treebank

    @cached_property
    def payloads(self) -> dict[str, PayloadResult]:
        """What values, queries and keys carry of senses and of parts of speech.

        Parts of speech are the treebank's, or nouns against verbs of the bundled sentences.
        """
        sample = self._sample()
        speech: tuple[Any, str | None] = (labelled_senses(sample), "pos")
        if self.treebank is not None:
            speech = (self.treebank, None)
        settings: dict[str, Any] = {"draws": _DRAWS, "control_draws": 2}
        # Not by cosine, whose contrasts between sites hang on their biases and scales.
        return {
            "sense": payload(self.model, sample, method="lda", **settings),
            "pos": payload(self.model, speech[0], label=speech[1], **settings),
        }

    @cached_property
    def labours(self) -> dict[str, LabourResult]:
        """Of both labels, values against queries and keys."""
        found = self.payloads.items()
        return {name: each.labour for name, each in found if each.labour is not None}

    @cached_property
    def dissociation(self) -> DissociationResult:
        """What exchanged values and exchanged patterns do to heads' output."""
        return double_dissociation(self.model, n_pairs=_EXCHANGED)

    @cached_property
    def overlap(self) -> OverlapResult:
        """Overlap of the spaces that layers' values are read from."""
        return subspace_overlap(HeadWeights.from_model(self.model), "V")

    @cached_property
    def growth(self) -> GrowthResult:
        """Which law the distance between a word's senses grows by, over the bundled words."""
        sample = self._sample()
        curves = drift(self.model, sample).curves()
        curves = {"cosine": curves["cosine"], "score": score_drift(self.model, sample).difference}
        return growth_law(curves, words=sample.words)

    @staticmethod
    def _sample() -> SenseDataset:
        senses = load_senses()
        return replace(senses, items=senses.items[::_EVERY])

    @cached_property
    def bank(self) -> PairDriftResult:
        """The two 'bank' vectors by stream."""
        return drift_pair(self.model, TEXT_A, TEXT_B, word=WORD)

    @cached_property
    def scores(self) -> PairScores:
        """Scores between the two words, in both directions, in both texts."""
        return pair_scores(self.model, [TEXT_A, TEXT_B], WORD, OTHER)

    @cached_property
    def shares(self) -> ContextResult:
        """The scores from 'bank' to 'river' in both texts, their difference taken apart."""
        return context_dependence(self.model, TEXT_A, TEXT_B, query=WORD, key=OTHER)

    @cached_property
    def variance(self) -> VarianceResult:
        """What explains scores: pairs, offsets, context; a fourth of the bundled sentences."""
        texts = [item.sentence for item in self._sample()]
        return score_variance(self.model, texts)

    @cached_property
    def ledger(self) -> LedgerResult:
        """The pair's score in the second text, at the head whose score differs most, by kind."""
        found = self.shares
        change = ((found.scores[1] - found.scores[0]) / found.scale).abs()
        layer, head = divmod(int(change.argmax()), change.shape[1])
        return score_ledger(self.model, TEXT_B, query=WORD, key=OTHER, layer=layer, head=head)

    @cached_property
    def dependencies(self) -> DependencyResult:
        """Which heads find the words that others depend on, in the treebank.

        Raises:
            UnsupportedError: there is no treebank.
        """
        if self.treebank is None:
            raise UnsupportedError(
                "it needs sentences with dependency relations, which do not come with wvprobe: "
                "wvprobe report --conllu FILE."
            )
        return dependency_heads(self.model, self.treebank, limit=_SENTENCES)

    @cached_property
    def influence(self) -> InfluenceResult:
        """What the words before and after 'bank' do to its vector in the first text."""
        return context_influence(self.model, TEXT_A, word=WORD)

    @cached_property
    def senses(self) -> SenseMap:
        """The bundled sentences with 'bank', at the middle stream."""
        return sense_map(self.model, WORD)

    @staticmethod
    def _prose(split: str, count: int) -> list[str]:
        return [text for text in load_prose(split) if len(text) <= _SHORT][:count]

    @cached_property
    def resized(self) -> ResizeResult:
        """Values of every head cut to a fourth of the rank, evenly or by energy, layer by layer."""
        return resize_heads(
            self.model,
            self._prose("held-out", _JUDGED),
            budget=CUT,
            allocation=("uniform", "energy"),
            scope="layer",
            calibration=self._prose("calibration", _FITTED),
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
                self._prose("held-out", _JUDGED),
                n_kv_heads=1,
                after=self.resized.plan(setting),
                calibration=self._prose("calibration", _FITTED),
            )
            for setting in self.resized.settings[:2]
        )
        return even, uneven

    @cached_property
    def ranks(self) -> HeadRanks:
        """How many of its dimensions each head makes use of; few tokens would make it fewer."""
        return head_ranks(self.model, self._prose("calibration", 2 * _FITTED))

    @cached_property
    def clock(self) -> AttentionTimes:
        """Attention timed over head widths on this machine."""
        return time_attention(directions=("forward",), uneven=(), seconds=5)
