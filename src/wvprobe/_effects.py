"""What a change to a model does to what it says and holds, text by text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._progress import progress as progress_bar
from wvprobe._validate import message
from wvprobe._validate import texts as checked_texts
from wvprobe.activations import batches_of, padded
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError
from wvprobe.words import Encoding, encode

# Logits of both runs that are held at a time, in numbers.
_NUMBERS = 2**26
# Positions whose distributions are compared at a time.
_ROWS = 256

Setting = Callable[[], AbstractContextManager[Any]]


class Effects(NamedTuple):
    """What each of several changes does, [setting, text]; NaN throughout where not applicable.

    Attributes:
        kl: KL(as it is ‖ changed) of the next token's distribution, nats, mean over a text's own
            tokens; NaN for a model without a head.
        loss_delta: change of the mean loss of a text's own tokens, nats; NaN without a head, and
            for a model that sees what it would have to predict.
        top1_agreement: share of a text's own tokens at which both expect the same token most.
        relative_change: ‖x′ − x‖ / ‖x‖ of the last stream (before a final norm), mean over them.
        final_distance: 1 − cos(x, x′) at a text's last own token.
        pooled_distance: 1 − cos of the means over a text's own tokens.
        loss: [text] as it is, nats a token.
        n_tokens: [text] own tokens.
    """

    kl: Float[Tensor, "setting text"]
    loss_delta: Float[Tensor, "setting text"]
    top1_agreement: Float[Tensor, "setting text"]
    relative_change: Float[Tensor, "setting text"]
    final_distance: Float[Tensor, "setting text"]
    pooled_distance: Float[Tensor, "setting text"]
    loss: Float[Tensor, " text"]
    n_tokens: Int[Tensor, " text"]


class _Ran(NamedTuple):
    """One run of a batch: its logits, if there are any, and its last stream."""

    logits: Float[Tensor, "text pos d_vocab"] | None
    x: Float[Tensor, "text pos d_model"]


class Batch(NamedTuple):
    """Texts that run together.

    Attributes:
        rows: which texts.
        ids: their tokens, padded.
        mask: which are tokens.
        own: which are tokens of the text itself.
    """

    rows: list[int]
    ids: Int[Tensor, "text pos"]
    mask: Int[Tensor, "text pos"]
    own: Bool[Tensor, "text pos"]


def texts_or_prose(texts: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the texts given, or the bundled prose that nothing is fitted on."""
    return load_prose("held-out") if texts is None else tuple(checked_texts(texts))


def measure_effects(
    model: Any,
    texts: Sequence[str],
    settings: Mapping[str, Setting],
    *,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> Effects:
    """Run texts as they are and under every setting, batch by batch, and compare.

    A batch's own logits are kept while all settings run on it, so that memory holds two runs of
    one batch whatever the number of texts and settings.

    Args:
        model: a TransformerBridge.
        texts: the texts; each needs two tokens, one of its own.
        settings: name -> what opens a context in which the model is changed.
        prepend_bos: as in the bridge's ``to_tokens``.
        progress: whether to show a bar.

    Raises:
        InputError: a text without tokens of its own, or streams that are not finite.
    """
    arch = adapters.architecture(model)
    encodings = [encode(model, text, prepend_bos=prepend_bos) for text in texts]
    check_encodings(encodings)
    headless = bool(adapters.why_no_head(model))
    found = {name: torch.full((len(settings), len(texts)), torch.nan).double() for name in _FIELDS}
    loss = torch.full((len(texts),), torch.nan).double()
    runs = list(batches(model, arch, encodings, headless))
    with progress_bar(len(runs) * len(settings), "changed runs", progress) as advance:
        for batch in runs:
            plain = _run(model, arch, batch, headless)
            _check_finite(plain.x[batch.mask.bool()])
            losses = _losses(plain, batch) if arch.causal and not headless else None
            if losses is not None:
                loss[batch.rows] = losses
            for number, (name, setting) in enumerate(settings.items()):
                with setting():
                    changed = _run(model, arch, batch, headless)
                _check_finite(changed.x[batch.mask.bool()], name)
                for key, values in _compared(plain, changed, batch).items():
                    found[key][number, batch.rows] = values
                if losses is not None:
                    found["loss_delta"][number, batch.rows] = _losses(changed, batch) - losses
                advance(1)
    own = torch.tensor([sum(not added for added in e.special) for e in encodings])
    return Effects(**found, loss=loss, n_tokens=own)


_FIELDS = Effects._fields[:-2]


def check_encodings(encodings: Sequence[Encoding]) -> None:
    """Raise InputError where a text has no two tokens, or none of its own."""
    for encoding in encodings:
        if len(encoding.ids) < 2 or all(encoding.special):
            hint = "There is nothing in it to predict. Leave it out."
            got = encoding.text[:40]
            raise InputError(message("texts", "of two tokens or more", got, hint))


def _check_finite(x: Tensor, name: str = "") -> None:
    if not bool(x.isfinite().all()):
        where = f" in the setting {name!r}" if name else ""
        hint = "Load it in float32, or look at the checkpoint."
        raise InputError(message("model", "one of finite streams", f"NaN or infinity{where}", hint))


def batches(
    model: Any, arch: Any, encodings: Sequence[Encoding], headless: bool = False
) -> Iterator[Batch]:
    """Yield batches of like length, few enough that their logits can be held, if there are any."""
    device = model.cfg.device
    for rows in batches_of([len(e.ids) for e in encodings], "auto", model, arch):
        longest = len(encodings[rows[0]].ids)
        size = len(rows) if headless else max(1, _NUMBERS // (2 * longest * arch.d_vocab))
        for at in range(0, len(rows), size):
            some = rows[at : at + size]
            ids, mask = padded([encodings[row].ids for row in some], device)
            own = torch.zeros_like(mask, dtype=torch.bool)
            for place, row in enumerate(some):
                special = torch.tensor(encodings[row].special)
                own[place, : len(special)] = ~special.to(device)
            yield Batch(some, ids, mask, own)


def _run(model: Any, arch: Any, batch: Batch, headless: bool) -> _Ran:
    """Run a batch; the last stream is kept as it passes, for the forward has to go on."""
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with adapters.changing(model, arch, {("resid_post", arch.n_layers - 1): keep}):
        if headless:
            adapters.run_backbone(model, batch.ids, batch.mask)
            return _Ran(None, seen[-1].float())
        logits = adapters.logits(model, batch.ids, batch.mask)
    return _Ran(logits, seen[-1])


def _losses(ran: _Ran, batch: Batch) -> Float[Tensor, " text"]:
    """Return the mean loss of each text's own tokens but one that nothing stands before."""
    if ran.logits is None:
        raise RuntimeError("a run without logits has no loss")
    targets = batch.own[:, 1:]
    total = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
    places = targets.nonzero()
    for some in places.split(_ROWS):
        row, at = some.unbind(1)
        log_p = _wide(ran.logits[row, at]).log_softmax(dim=-1)
        total[row, at] = -log_p.gather(1, batch.ids[row, at + 1][:, None])[:, 0].double()
    return (total.sum(dim=1) / targets.sum(dim=1)).cpu()


def _compared(plain: _Ran, changed: _Ran, batch: Batch) -> dict[str, Float[Tensor, " text"]]:
    """Return every measure of two runs but the loss."""
    weight = batch.own.double()
    count = weight.sum(dim=1)
    x, y = plain.x.double(), changed.x.double()
    change = (y - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=torch.finfo(x.dtype).tiny)
    rows = torch.arange(len(x), device=x.device)
    last = torch.where(batch.own, torch.arange(x.shape[1], device=x.device), -1).amax(dim=1)
    pooled = [torch.einsum("bpd,bp->bd", z, weight) for z in (x, y)]
    found = {
        "relative_change": (change * weight).sum(dim=1) / count,
        "final_distance": _cosine_distance(x[rows, last], y[rows, last]),
        "pooled_distance": _cosine_distance(*pooled),
    }
    if plain.logits is not None and changed.logits is not None:
        kl, same = torch.zeros_like(weight), torch.zeros_like(weight)
        for some in batch.own.nonzero().split(_ROWS):
            row, at = some.unbind(1)
            old, new = (_wide(ran[row, at]) for ran in (plain.logits, changed.logits))
            same[row, at] = (old.argmax(dim=-1) == new.argmax(dim=-1)).double()
            old, new = old.log_softmax(dim=-1), new.log_softmax(dim=-1)
            # A token that cannot come, of logit −inf, adds nothing.
            terms = torch.where(old > -torch.inf, old.exp() * (old - new), 0.0)
            kl[row, at] = terms.sum(dim=-1).double().clamp(min=0.0)
        found["kl"], found["top1_agreement"] = kl.sum(dim=1) / count, same.sum(dim=1) / count
    return {name: values.cpu() for name, values in found.items()}


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 − cos; by halves of the difference of unit vectors, which loses no digits near 0."""
    unit = [z / z.norm(dim=-1, keepdim=True) for z in (a, b)]
    return (unit[0] - unit[1]).square().sum(dim=-1) / 2


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
