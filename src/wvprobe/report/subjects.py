"""The models of a report: opened, checked against the pair of sentences, and described."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from wvprobe import adapters
from wvprobe._validate import message
from wvprobe.errors import InputError, WordError
from wvprobe.models import load
from wvprobe.report.given import Given, Pair
from wvprobe.words import WordSpan, encode, find_word


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model of a report.

    Attributes:
        name: what the report calls it.
        source: what :func:`wvprobe.load` takes, or the model itself.
        provenance: the model's own, with what shaped the report's numbers.
        facts: what the page says of it at its head.
        sentences: the pair of sentences as it reads them.
        masked: pairs of words that it hides from attention.
    """

    name: str
    source: Any
    provenance: dict[str, Any]
    facts: dict[str, Any]
    sentences: list[dict[str, Any]]
    masked: list[str]

    def open(self) -> Any:
        """Return the model."""
        return _open(self.source)


def opened(models: Any, given: Given, sizes: str) -> list[Subject]:
    """Open every model once, before minutes are spent on the first.

    Of several that are named, none is kept: each is opened again when its turn comes.

    Args:
        models: a model or a source, or several.
        given: what the reader brings along.
        sizes: how large the report is.

    Raises:
        InputError: no model, or the same twice.
        WordError: a model's tokens do not show a word of the pair.
        WvprobeError: a model cannot be opened.
    """
    several = list(models) if isinstance(models, (list, tuple)) else [models]
    if not several:
        raise InputError(message("models", "at least one", several))
    subjects: list[Subject] = []
    for source in several:
        subject = _subject(source, given, sizes, alone=len(several) == 1)
        if subject.name in [other.name for other in subjects]:
            hint = "A page has one column for each name."
            raise InputError(message("models", "all different", subject.name, hint))
        subjects.append(subject)
    return subjects


def _open(source: Any) -> Any:
    if isinstance(source, adapters.TransformerBridge):
        return source
    # The page shows the audit of all layers, and a failed one has to be seen, not refused.
    return load(source, audit=False)


def _subject(source: Any, given: Given, sizes: str, *, alone: bool) -> Subject:
    model = _open(source)
    told: dict[str, Any] = given.told() | {"sizes": sizes}
    return Subject(
        name=model.cfg.model_name,
        source=model if alone else source,
        provenance=dataclasses.asdict(adapters.provenance(model, **told)),
        facts=_facts(model),
        sentences=[_tokens(model, text, given.pair) for text in given.pair.texts],
        masked=_masked(model, given.pair),
    )


def _facts(model: Any) -> dict[str, Any]:
    arch = adapters.architecture(model)
    heads = f"{arch.n_heads} heads"
    if arch.n_kv_heads != arch.n_heads:
        heads += f", {arch.n_kv_heads} KV heads"
    parts = [
        arch.family,
        f"{adapters.n_parameters(model) / 1e6:,.1f} M parameters",
        f"{arch.n_layers} layers",
        heads,
        f"d_model {arch.d_model}",
        f"d_head {arch.d_head}",
        f"{'decoder' if arch.causal else 'encoder'}, {arch.position} positions",
        *(["no language-modelling head"] if adapters.why_no_head(model) else []),
    ]
    return {"parts": parts, "causal": arch.causal}


def _words(model: Any, text: str, pair: Pair) -> list[WordSpan]:
    words = [pair.word] if pair.other is None else [pair.word, pair.other]
    try:
        return [find_word(model, text, word) for word in words]
    except WordError as error:
        hint = "Words are read as both sentences write them; name others with --pair and --other."
        raise WordError(f"{model.cfg.model_name}: {error} {hint}") from error


def _tokens(model: Any, text: str, pair: Pair) -> dict[str, Any]:
    encoding = encode(model, text)
    marked = {at for span in _words(model, text, pair) for at in span.tokens}
    tokens = [
        {"string": string, "id": number, "special": special, "word": at in marked}
        for at, (string, number, special) in enumerate(
            zip(encoding.strings, encoding.ids, encoding.special, strict=True)
        )
    ]
    return {"text": text, "tokens": tokens}


def _masked(model: Any, pair: Pair) -> list[str]:
    """Return the pairs of words whose key stands behind the query, which a decoder hides."""
    if not adapters.architecture(model).causal or pair.other is None:
        return []
    found: list[str] = []
    for which, text in zip(("first", "second"), pair.texts, strict=True):
        first, second = _words(model, text, pair)
        names = [first.word, second.word]
        if second.tokens[-1] < first.tokens[-1]:
            names.reverse()
        found.append(f"{names[0]}→{names[1]} in the {which} sentence")
    return found


def names_of(subjects: Sequence[Subject]) -> str:
    """Return the names as a phrase."""
    names = [subject.name for subject in subjects]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
