"""`payload`: what the label probes read off values, queries and keys, beside its references."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._decompositions import svd
from wvprobe._progress import progress as progress_bar
from wvprobe._shapes import check_there
from wvprobe._validate import at_least, finite, instance, length, listed, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.activations import Activations, StoredActivations, checked_pool, read_sites
from wvprobe.datasets import LabelledDataset, SenseDataset
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.labelled import LabelledWords
from wvprobe.value_payload._assembling import Settings, assembled
from wvprobe.value_payload._averages import Averages
from wvprobe.value_payload._closed import METHODS, Probe
from wvprobe.value_payload._items import Items, Selection, items_of
from wvprobe.value_payload._scorers import ClassScorer
from wvprobe.value_payload._strata import METHODS as SENSE_METHODS
from wvprobe.value_payload._strata import StratumScorer
from wvprobe.value_payload.results import PayloadResult
from wvprobe.words import encode

SITES = ("v", "q", "k", "z", "attn_in")
SCORES = ("accuracy", "balanced_accuracy")
# Bytes of activations in memory at a time; beyond, texts run again for the next layers.
_BYTES = 1_200_000_000
# Draws of one layer's frames and of the next one's must have nothing in common.
_SEEDS_A_LAYER = 10


def payload(
    model: Any,
    dataset: LabelledDataset | SenseDataset | LabelledWords,
    *,
    label: str | None = None,
    sites: Sequence[str] = ("v", "q", "k", "attn_in"),
    method: str | None = None,
    penalty: float | int | None = None,
    score: str = "accuracy",
    draws: int = 200,
    control_draws: int = 5,
    null_draws: int = 0,
    reinitialised: bool = False,
    limit: int | None = 4_000,
    per_sentence: int | None = 2,
    per_label: int | None = None,
    min_count: int = 20,
    groups: str = "auto",
    folds: int = 5,
    pool: str | None = None,
    seed: int = 0,
    progress: bool = False,
    prepend_bos: bool | None = None,
    store: StoredActivations | None = None,
) -> PayloadResult:
    """Measure how well a label can be read off every head's values, queries and keys.

    A probe a head, layer and site at the target word, out of fold, held against what the same
    probe makes of other features of the same words:

    * ``random``: Haar projections of the same attention input to the head's width, `draws` of them
      a layer, the mean (``p``: how many of them reach the head's score);
    * ``pca``: the input's leading principal components, as many, found in the training sets;
    * ``full``: the whole input; ``embedding``: the word's token embedding, and nothing of its
      context; ``majority``: the most frequent label;
    * ``q``, ``k`` (for v): the mean over the layer's query and key heads;
    * ``control``: for classes Hewitt & Liang's (2019) control task, a random label for each word
      type; for senses labels permuted within their lemma;
    * ``reinitialised``: the same head of a model of the same shape with weights drawn anew;
    * ``null`` (for v): what W_V drops of its input, less what random projections of its rank drop.

    For classes the probe has a closed form: LDA with oracle-approximating shrinkage (Chen et al.
    2010), or least squares. Random projections take the input's moments, no pass over the items.
    Senses mean something within their lemma alone: there each item is left out in turn and given
    the sense of the nearest centroid by cosine, scores are means over lemmas, and lemmas are what
    is resampled; `same_pos` has the same for lemmas whose senses share a part of speech.

    Args:
        model: a bridge with a tokenizer.
        dataset: labelled sentences, words in context, or words already chosen (`limit`,
            `per_sentence`, `per_label`, `min_count` do not act on these).
        label: the column of labels; None for the dataset's own. ``token`` (which token it is, the
            30 most frequent) and ``position`` (in five bins) need no column.
        sites: of ``v q k z attn_in``.
        method: ``lda`` (the default) or ``least_squares``; for senses ``centroid`` (the default, by
            cosine) or ``lda``, whose distances are those of the covariance within senses of other
            lemmas, so that biases and scales of a site play no part.
        penalty: a fixed shrinkage (0 to 1) or ridge; None for the method's own.
        score: ``accuracy``, or ``balanced_accuracy`` (classes count alike, as priors too).
        draws: random projections a layer.
        control_draws: control tasks or permutations; 0 for none.
        null_draws: random projections for ``null``; 0 leaves it out.
        reinitialised: whether to build and read the re-initialised model, too.
        limit: at most so many words.
        per_sentence: at most so many words of a sentence; folds keep sentences whole.
        per_label: at most so many words of a label, for labels of which one is most of all words.
        min_count: labels of fewer words are left out.
        groups: what folds keep together and intervals resample: ``sentence``, ``lemma``, ``word``;
            ``auto`` for the sentence, and the lemma with words in context.
        folds: of the cross-validation.
        pool: as in :func:`wvprobe.capture`.
        seed: of folds, projections, control tasks and resamples.
        progress: whether to draw a bar.
        prepend_bos: as in :func:`wvprobe.capture`.
        store: the words' activations on disk, read a layer at a time, in place of forwards:
            ``capture(model, words.texts, (*sites, "attn_in"), words=words.spans, out=folder)`` of
            :func:`~wvprobe.labelled.labelled_words`; it may hold more words than are measured.
            Numbers differ from those without it by rounding, since batches do.

    Returns:
        Scores of every site, layer and head (key-value heads for v and k, each once), their excess
        over every reference, 95 % intervals of both (paired bootstrap over groups), and the
        division of labour between v, q and k.

    Raises:
        InputError: an argument cannot be used; too few words of a label; the store lacks a word,
            a site or a layer, or was captured with another model, pool or prepend_bos.
        UnsupportedError: ``null`` is asked for of latent attention, whose values are no linear map
            of the input.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"sites": ("v",), "draws": 2, "control_draws": 0, "min_count": 4, "folds": 2}
        >>> found = wvprobe.payload(model, few, label="pos", groups="sentence", **given)
        >>> found.grid("v", found.score).shape, found.classes
        (torch.Size([3, 2]), ('noun', 'verb'))
    """
    seed = checked_seed(seed)
    wanted = _checked_sites(sites)
    chosen = Selection(limit, per_sentence, per_label, min_count, groups, seed, prepend_bos)
    items = items_of(model, dataset, label, chosen)
    if length("draws", draws) < 2:
        raise InputError(message("draws", "at least 2, to know how draws differ", draws))
    for name, value in (("control_draws", control_draws), ("null_draws", null_draws)):
        at_least(name, value)
    scorer = scorer_of(
        items,
        method=method,
        penalty=penalty,
        score=score,
        folds=folds,
        control_draws=control_draws,
        seed=seed,
    )
    run = _Run(model, items, scorer, wanted, pool, draws, null_draws, seed, store)
    measured = run.all(progress)
    if reinitialised:
        fresh = adapters.reinitialised(model, seed)
        again = _Run(fresh, items, scorer, wanted, pool, 0, 0, seed).all(progress)
        measured.reinitialised = again.right
    kind = scorer.method if isinstance(scorer, StratumScorer) else scorer.probe.method
    settings = Settings(
        dataset=items.dataset,
        label=items.label,
        method=kind,
        score=score,
        classes=tuple(str(x) for x in scorer.classes),
        folds=None if isinstance(scorer, StratumScorer) else folds,
        seed=seed,
        provenance=adapters.provenance(
            model,
            seed=seed,
            label=items.label,
            sites=list(wanted),
            method=kind,
            penalty=penalty,
            score=score,
            draws=draws,
            control_draws=control_draws,
            null_draws=null_draws,
            reinitialised=reinitialised,
            folds=folds,
            pool=measured.pool,
            store=None if store is None else store.store.manifest.identity,
            selection=dict(items.settings),
        ),
    )
    result = assembled(measured, Averages(scorer.weights, scorer.groups, seed), settings)
    same = torch.tensor([stratum in items.same_pos for stratum in items.strata or ()])
    if not (bool(same.any()) and scorer.groups[same].unique().numel() > 1):
        return result
    subset = Averages(scorer.weights, scorer.groups, seed, same)
    return result.beside(assembled(measured, subset, settings))


def scorer_of(
    items: Items,
    *,
    method: str | None,
    penalty: float | int | None,
    score: str,
    folds: int,
    control_draws: int,
    seed: int,
) -> ClassScorer | StratumScorer:
    """Return what says which items are right: classes out of fold, senses within their lemma."""
    one_of("score", score, SCORES)
    folds = at_least("folds", folds, 2)
    if items.strata is not None:
        kind = one_of("method", "centroid" if method is None else method, SENSE_METHODS)
        if score != "accuracy" or penalty is not None:
            hint = "Senses are given by the nearest mean, and lemmas count alike."
            raise InputError(message("score and penalty", "left out for senses", score, hint))
        return StratumScorer(
            items, method=kind, folds=folds, control_draws=control_draws, seed=seed
        )
    probe = checked_probe("lda" if method is None else method, penalty, score)
    return ClassScorer(
        items,
        probe,
        folds=folds,
        balanced=probe.equal_priors,
        control_draws=control_draws,
        seed=seed,
    )


def checked_probe(method: str, penalty: float | int | None, score: str) -> Probe:
    """Return a closed-form probe, its arguments checked."""
    one_of("method", method, METHODS)
    if penalty is not None:
        finite("penalty", penalty, least=0.0)
    if penalty is not None and method == "lda" and penalty > 1:
        raise InputError(message("penalty", "a shrinkage from 0 to 1", penalty))
    if method == "least_squares" and score == "balanced_accuracy":
        hint = "Least squares has no class shares to set equal. Use method='lda'."
        raise InputError(message("score", "'accuracy' for least squares", score, hint))
    value = None if penalty is None else float(penalty)
    return Probe(method, value, equal_priors=score == "balanced_accuracy")


@dataclass
class Measured:
    """What is right, item by item, of every site and reference.

    Attributes:
        right: site -> [layer, head, item].
        control: likewise, of control tasks or permuted labels; empty where there are none.
        widths: site -> the width of the projections that it is held against.
        random: width -> [layer, item] mean over draws.
        draws: width -> [layer, draw, unit] scores; one unit for classes, lemmas for senses.
        components: width -> [layer, item].
        full: [layer, item].
        null: [layer, head, item], and [layer, item] of random projections; empty where not asked.
        embedding: [item].
        majority: [item].
        pool: how several tokens of a word became one vector.
        reinitialised: `right` of the re-initialised model; empty where there is none.
    """

    right: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    random: dict[int, Any] = field(default_factory=dict)
    draws: dict[int, Any] = field(default_factory=dict)
    components: dict[int, Any] = field(default_factory=dict)
    full: Any = None
    null: Any = None
    null_random: Any = None
    embedding: Any = None
    majority: Any = None
    pool: str | None = None
    reinitialised: dict[str, Any] = field(default_factory=dict)


class _Run:
    """One model read and scored, a block of layers at a time."""

    def __init__(
        self,
        model: Any,
        items: Items,
        scorer: ClassScorer | StratumScorer,
        sites: tuple[str, ...],
        pool: str | None,
        draws: int,
        null_draws: int,
        seed: int,
        store: StoredActivations | None = None,
    ) -> None:
        self.model, self.items, self.scorer = model, items, scorer
        self.arch = adapters.architecture(model)
        self.pool = checked_pool(self.arch, pool)
        self.sites, self.draws, self.null_draws, self.seed = sites, draws, null_draws, seed
        if null_draws and self.arch.mla:
            raise UnsupportedError(
                f"{model.cfg.model_name} makes its values from a latent behind a norm: no linear "
                "map of the input says what they drop. Leave `null_draws` at 0."
            )
        a = self.arch
        self.widths = {
            site: min(a.d_model, a.d_head if site in ("q", "k") else a.d_head_v) for site in sites
        }
        self.found: dict[tuple[str, Any], list[Tensor]] = {}
        self.needed = tuple(dict.fromkeys((*sites, "attn_in")))
        self.store, self.rows = store, torch.empty(0)
        if store is not None:
            instance("store", store, StoredActivations, "wvprobe.activations.open_store opens one.")
            store.require(model, self.needed, items.prepend_bos)
            self.rows = store.places(items.texts, [span.tokens for span in items.spans])
            if store.pool != self.pool:
                raise InputError(message("store", f"pooled by {self.pool!r}", store.pool))

    def all(self, progress: bool) -> Measured:
        """Read and score all layers."""
        measured = Measured(widths=self.widths, majority=self.scorer.majority)
        if self.draws:
            measured.pool = self.pool
            vectors = embeddings(self.model, self.items, self.pool)[:, None]
            measured.embedding = self.scorer.right(vectors)[0][0]
        for layers, values_of in self._reads(progress):
            with progress_bar(len(layers), "layers probed", progress) as advance:
                for layer in layers:
                    self._layer(values_of(layer), layer)
                    advance(1)
        stacked = {key: torch.stack(parts) for key, parts in self.found.items()}
        for (kind, key), values in stacked.items():
            if key is None:
                setattr(measured, kind, values)
            else:
                getattr(measured, kind)[key] = values
        return measured

    def _reads(
        self, progress: bool
    ) -> Iterator[tuple[list[int], Callable[[int], dict[str, Tensor]]]]:
        """Yield layers, and what gives one of them: its sites' values, [item, …]."""
        if self.store is not None:
            yield list(range(self.arch.n_layers)), self._stored
            return
        for layers in self._blocks():
            read = read_sites(
                self.model,
                self.items.texts,
                self.needed,
                words=self.items.spans,
                layers=layers,
                pool=self.pool,
                progress=progress,
                prepend_bos=self.items.prepend_bos,
                share=True,
            )
            yield layers, partial(_layer_of, read, layers[0])

    def _stored(self, layer: int) -> dict[str, Tensor]:
        if self.store is None:
            return {}
        read = {site: self.store[site].read(self.rows, [layer])[:, 0] for site in self.needed}
        return {site: _wide(values) for site, values in read.items()}

    def _layer(self, read: dict[str, Tensor], layer: int) -> None:
        x = read["attn_in"]
        for site in self.sites:
            values = read[site]
            right, control = self.scorer.right(values[:, None] if site == "attn_in" else values)
            self._keep("right", site, right)
            if control is not None and self.draws:
                self._keep("control", site, control)
        if not self.draws:
            return
        known = self.found.get(("right", "attn_in"))
        self._keep("full", None, known[-1][0] if known else self.scorer.right(x[:, None])[0][0])
        seed = (self.seed * 10_007 + layer) * _SEEDS_A_LAYER
        for number, width in enumerate(sorted(set(self.widths.values()))):
            mean, scores = self.scorer.random(x, width, self.draws, seed + number)
            self._keep("random", width, mean)
            self._keep("draws", width, scores)
            self._keep("components", width, self.scorer.components(x, width))
        if self.null_draws and "v" in self.sites:
            self._null(x, layer, seed + _SEEDS_A_LAYER - 1)

    def _null(self, x: Tensor, layer: int, seed: int) -> None:
        """Score what each W_V drops, and what random projections of its rank drop."""
        weights = adapters.head_parts(self.model, self.arch, [layer])["W_V"][0]
        u, s, _ = svd(weights.double().cpu(), full_matrices=True)
        ranks = (s > 1e-7 * s[:, :1]).sum(dim=1)
        rest = x.shape[1] - int(ranks.max())
        if rest < 1 or int(ranks.min()) < int(ranks.max()):
            raise UnsupportedError(
                f"heads of layer {layer} keep {ranks.tolist()} of {x.shape[1]} directions: what "
                "they drop is nothing, or of several widths. Leave `null_draws` at 0."
            )
        dropped = [self.scorer.right((x @ own[:, -rest:].to(x))[:, None])[0][0] for own in u]
        self._keep("null", None, torch.stack(dropped))
        mean, _ = self.scorer.random(x, rest, self.null_draws, seed)
        self._keep("null_random", None, mean)

    def _keep(self, kind: str, key: Any, value: Tensor) -> None:
        self.found.setdefault((kind, key), []).append(value)

    def _blocks(self) -> Iterator[list[int]]:
        a = self.arch
        each = {
            "v": a.n_kv_heads * a.d_head_v,
            "k": a.n_kv_heads * a.d_head,
            "q": a.n_heads * a.d_head,
            "z": a.n_heads * a.d_head_v,
            "attn_in": a.d_model,
        }
        numbers = sum(each[site] for site in {*self.sites, "attn_in"})
        size = max(1, _BYTES // (4 * numbers * len(self.items)))
        for start in range(0, a.n_layers, size):
            yield list(range(start, min(start + size, a.n_layers)))


def embeddings(model: Any, items: Items, pool: str) -> Float[Tensor, "item d_model"]:
    """Return each word's token embedding as stored, its tokens pooled as the sites' were."""
    table = adapters.embedding_table(model).detach()
    check_there("W_E", table)
    known = {text: encode(model, text, prepend_bos=items.prepend_bos).ids for text in items.texts}
    found = []
    for span in items.spans:
        own = torch.tensor([known[span.text][p] for p in span.tokens], device=table.device)
        rows = _wide(table[own].cpu())
        found.append(rows.mean(dim=0) if pool == "mean" else rows[0 if pool == "first" else -1])
    return torch.stack(found)


def _layer_of(read: Activations, first: int, layer: int) -> dict[str, Tensor]:
    return {site: _wide(values[:, layer - first]) for site, values in read.values.items()}


def _wide(x: Tensor) -> Tensor:
    """Return values in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def _checked_sites(sites: Sequence[str]) -> tuple[str, ...]:
    given = (sites,) if isinstance(sites, str) else listed("sites", sites, "sites' names")
    if not given:
        raise InputError(message("sites", f"some of {', '.join(SITES)}", given))
    return tuple(dict.fromkeys(one_of("sites", site, SITES) for site in given))
