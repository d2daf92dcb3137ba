"""`capture`: activations of chosen sites, layers and words, with nothing else kept.

The forward runs in batches of texts of like length, with their attention mask, without the head,
and only as far as the last layer that is asked for. Each hook keeps the positions asked for and
drops the rest at once, so memory holds the result and one batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch

from wvprobe import adapters
from wvprobe._types import Provenance
from wvprobe._validate import texts as checked_texts
from wvprobe.activations._batches import batches_of
from wvprobe.activations._places import Places, Positions, Words
from wvprobe.activations._result import Activations
from wvprobe.activations._run import Run, SitePlan, checked_pool
from wvprobe.activations._stored import StoredActivations
from wvprobe.activations._storing import capture_to
from wvprobe.errors import InputError
from wvprobe.words import encode


@overload
def capture(
    model: Any,
    texts: str | Sequence[str],
    sites: str | Sequence[str],
    *,
    words: Words | None = None,
    positions: Positions | None = None,
    layers: Sequence[int] | int | None = None,
    pool: str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    out: None = None,
    progress: bool = True,
    prepend_bos: bool | None = None,
) -> Activations: ...


@overload
def capture(
    model: Any,
    texts: str | Sequence[str],
    sites: str | Sequence[str],
    *,
    words: Words | None = None,
    positions: Positions | None = None,
    layers: Sequence[int] | int | None = None,
    pool: str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    out: str | Path,
    progress: bool = True,
    prepend_bos: bool | None = None,
) -> StoredActivations: ...


def capture(
    model: Any,
    texts: str | Sequence[str],
    sites: str | Sequence[str],
    *,
    words: Words | None = None,
    positions: Positions | None = None,
    layers: Sequence[int] | int | None = None,
    pool: str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    out: str | Path | None = None,
    progress: bool = True,
    prepend_bos: bool | None = None,
) -> Activations:
    """Read sites of the residual stream of texts.

    Sites (layers are blocks, counted from 0, as in TransformerLens): ``resid_pre resid_mid
    resid_post`` before, within and after a block; ``attn_in`` what attention reads; ``q k``
    after a norm of theirs, before rotation; ``v``; ``z`` = Σ_j pattern v; ``head_out`` = z W_O a
    head, its share of what is added; ``attn_out`` what W_O gives, b_O included; ``attn_added``
    what reaches the stream (behind Gemma-2's second norm); ``mlp_out`` what the MLP adds;
    ``pattern``; ``scores`` raw, before a soft cap, masked pairs included. ``stream`` is the
    stack of n_layers + 1 streams: 0 the embedding, k after block k − 1, the last before the
    final norm.

    Args:
        model: a TransformerBridge.
        texts: one text or several.
        sites: one site or several.
        words: one word for all texts, or one (a string or a WordSpan) a text; whole words, the
            first occurrence of each.
        positions: instead of words: one position for all texts, ``"last"``, or a text's own
            position or positions. Position 0 is the BOS or CLS where there is one.
        layers: layers of every site; None for all.
        pool: ``last``, ``first`` or ``mean`` over a word's tokens. None: the last token for a
            decoder, where it alone has seen the whole word, and the mean for an encoder.
        batch_size: texts a batch; ``"auto"`` by tokens. Halved and tried again when memory
            does not suffice.
        out: a folder to write to, batch by batch, where memory would not hold the result. Nothing
            is lost when the run is killed: the same call goes on where it stopped, and its result
            equals that of a run without a stop bit for bit. See
            :class:`~wvprobe.activations.StoredActivations` and "Stored activations" in methods.md.
        progress: show progress on long work.
        prepend_bos: as in the bridge's ``to_tokens``; None for its default.

    Raises:
        UnsupportedError: the architecture lacks a site; the message names another.
        InputError: an argument cannot be used.
        WordError: a word is not in its text, or not as a whole word.
        MemoryLimitError: not even one text fits into memory.
        StoreError: `out` holds something else, or what another setting captured (which ones
            differ is said), or is being written to by another process.
        DiskSpaceError: `out` cannot be written to, or its disk is full; what is there stays valid.

    Returns:
        The sites' tensors, or with `out` their files, opened: tensors are read when asked for.

    Examples:
        >>> texts = ["A power bank.", "The old river bank."]
        >>> seen = wvprobe.capture(model, texts, ["v", "resid_post"], words="bank")
        >>> seen["v"].shape, seen.axes("v")
        (torch.Size([2, 3, 2, 14]), ('item', 'layer', 'kv_head', 'd_head_v'))
    """
    if out is not None:
        return capture_to(
            out,
            model,
            texts,
            sites,
            words=words,
            positions=positions,
            layers=layers,
            pool=pool,
            batch_size=batch_size,
            progress=progress,
            prepend_bos=prepend_bos,
        )
    read = read_sites(
        model,
        texts,
        sites,
        words=words,
        positions=positions,
        layers=layers,
        pool=pool,
        batch_size=batch_size,
        progress=progress,
        prepend_bos=prepend_bos,
    )
    settings = {"sites": list(read.values), "pool": read.pool, "prepend_bos": prepend_bos}
    return replace(read, provenance=adapters.provenance(model, **settings))


def read_sites(
    model: Any,
    texts: str | Sequence[str],
    sites: str | Sequence[str],
    *,
    words: Words | None = None,
    positions: Positions | None = None,
    layers: Sequence[int] | int | None = None,
    pool: str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    progress: bool = False,
    prepend_bos: bool | None = None,
    share: bool = False,
    ahead: bool = True,
) -> Activations:
    """Do what :func:`capture` does without hashing the model's weights into a provenance.

    With `share`, and words or positions, a text that is given several times runs once: many words
    of one sentence cost one forward. Rows of a batch are then not the texts as given.

    Args:
        model: as in :func:`capture`, and so are the arguments below, but for the last two.
        texts: likewise.
        sites: likewise.
        words: likewise.
        positions: likewise.
        layers: likewise.
        pool: likewise.
        batch_size: likewise.
        progress: likewise.
        prepend_bos: likewise.
        share: whether equal texts run once.
        ahead: whether scores and patterns that are read at some positions hold the keys, too, that
            a causal mask hides; without, they may end before.

    Raises:
        UnsupportedError: the architecture lacks a site; the message names another.
        InputError: an argument cannot be used.
        WordError: a word is not in its text, or not as a whole word.
        MemoryLimitError: not even one text fits into memory.

    Examples:
        >>> from wvprobe.activations import read_sites
        >>> texts = ["The river bank."] * 2  # run once
        >>> read_sites(model, texts, "v", words=["river", "bank"], share=True)["v"].shape
        torch.Size([2, 3, 2, 14])
    """
    arch = adapters.architecture(model)
    plan = SitePlan(model, arch, sites, layers)
    given = checked_texts(texts)
    places = Places(words, positions, len(given))
    pool = checked_pool(arch, pool)
    known = {text: encode(model, text, prepend_bos=prepend_bos) for text in dict.fromkeys(given)}
    encodings = [known[text] for text in given]
    read = [places.of(item, encoding) for item, encoding in enumerate(encodings)]
    picked = tuple(at for at, _ in read if at is not None) if places.given else None
    if share and picked is None:
        raise InputError("`share` reads words or positions of a text. Give `words` or `positions`.")
    items: dict[Any, list[int]] = {}
    for item, text in enumerate(given):
        items.setdefault(text if share else item, []).append(item)
    rows = [_heard(plan, encodings[own[0]].ids, picked, own, ahead) for own in items.values()]
    run = Run(model, arch, plan, rows, picked, pool, list(items.values()))
    run.all(batches_of([len(ids) for ids in rows], batch_size, model, arch), progress)
    lengths = torch.tensor([len(e.ids) for e in encodings])
    return Activations(
        provenance=Provenance.of(model.cfg.model_name, ""),
        values={site: run.results[site] for site in plan.sites},
        layers=plan.layers,
        texts=tuple(e.text for e in encodings),
        tokens=tuple(e.ids for e in encodings),
        strings=tuple(e.strings for e in encodings),
        special=tuple(e.special for e in encodings),
        positions=picked,
        words=tuple(str(word) for _, word in read) if places.of_words else None,
        pool=pool if picked is not None else None,
        mask=None if picked is not None else torch.arange(run.longest) < lengths[:, None],
    )


def _heard(
    plan: SitePlan,
    ids: Sequence[int],
    picked: Sequence[Sequence[int]] | None,
    items: Sequence[int],
    ahead: bool,
) -> Sequence[int]:
    """Return those of a text's tokens that have a say in its items."""
    at = None if picked is None else [place for item in items for place in picked[item]]
    return ids[: plan.n_read(len(ids), at, ahead)]
