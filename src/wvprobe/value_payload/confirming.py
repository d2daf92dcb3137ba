"""Named heads again, by a logistic probe: that a finding is not the closed form's own."""

from collections.abc import Sequence
from typing import Any

import torch

from wvprobe import adapters
from wvprobe._validate import index, message, pairs
from wvprobe._validate import seed as checked_seed
from wvprobe.activations import read_sites
from wvprobe.datasets import LabelledDataset, SenseDataset
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.labelled import LabelledWords
from wvprobe.probes import ProbeResult, fit_probes, haar_projections
from wvprobe.value_payload._items import Selection, items_of


def confirm_heads(
    model: Any,
    dataset: LabelledDataset | SenseDataset | LabelledWords,
    heads: Sequence[tuple[int, int]],
    *,
    label: str | None = None,
    draws: int = 5,
    score: str = "accuracy",
    penalty: str | float | int = "cv",
    limit: int | None = 4_000,
    per_sentence: int | None = 2,
    per_label: int | None = None,
    min_count: int = 20,
    groups: str = "auto",
    folds: int = 5,
    pool: str | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> ProbeResult:
    """Probe the values of named heads by logistic regression, beside random projections.

    Heads chosen because `payload` found them best are chosen on these very words: what is confirmed
    is that the finding does not depend on the probe.

    Args:
        model: a bridge with a tokenizer.
        dataset: as for :func:`payload`; classes, not senses.
        heads: (layer, key-value head), each once.
        label: as for :func:`payload`.
        draws: random projections of each layer's input.
        score: see :func:`wvprobe.fit_probes`.
        penalty: likewise.
        limit: as for :func:`payload`, and so are the arguments below.
        per_sentence: likewise.
        per_label: likewise.
        min_count: likewise.
        groups: likewise.
        folds: likewise.
        pool: likewise.
        seed: likewise.
        prepend_bos: likewise.

    Returns:
        Of :func:`wvprobe.fit_probes`, its one site axis ``head`` in the order of `heads`; the
        reference ``random``.

    Raises:
        InputError: a head does not exist, or none is named.
        UnsupportedError: the labels are senses.

    Examples:
        >>> from wvprobe.value_payload import confirm_heads
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"groups": "sentence", "min_count": 4, "folds": 2, "draws": 2, "penalty": 1.0}
        >>> found = confirm_heads(model, few, [(1, 0)], label="pos", **given)
        >>> found.site_axes, sorted(found.excess)
        (('head',), ['majority', 'random'])
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    named = [
        (
            index("heads", layer, arch.n_layers, "layers"),
            index("heads", h, arch.n_kv_heads, "heads"),
        )
        for layer, h in pairs("heads", heads, "(layer, key-value head) pairs")
    ]
    if not named or len(set(named)) != len(named):
        raise InputError(message("heads", "one or several (layer, head), none twice", named))
    chosen = Selection(limit, per_sentence, per_label, min_count, groups, seed, prepend_bos)
    items = items_of(model, dataset, label, chosen)
    if items.strata is not None:
        raise UnsupportedError(
            "senses of a lemma have too few sentences for a logistic probe. Use payload, whose "
            "centroids need none to be fitted."
        )
    layers = sorted({layer for layer, _ in named})
    read = read_sites(
        model,
        items.texts,
        ("v", "attn_in"),
        words=items.spans,
        layers=layers,
        pool=pool,
        prepend_bos=items.prepend_bos,
        share=True,
    )
    rows = [layers.index(layer) for layer, _ in named]
    v = torch.stack([read["v"][:, row, h] for row, (_, h) in zip(rows, named, strict=True)], dim=1)
    x = read["attn_in"][:, rows].float()
    width = min(arch.d_head_v, arch.d_model)
    return fit_probes(
        v.float(),
        list(items.labels),
        groups=[str(group) for group in items.groups],
        folds=folds,
        penalty=penalty,
        score=score,
        references={"random": haar_projections(x, width, draws=draws, seed=seed)},
        description_length=False,
        site_axes=("head",),
        seed=seed,
    )
