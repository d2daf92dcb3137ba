"""What the command line prints of a budget: one document, or tables of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wvprobe._validate import message
from wvprobe.budget._alternatives import alternatives
from wvprobe.budget._architectures import known_architectures
from wvprobe.budget._arithmetic import HeadBudget
from wvprobe.errors import InputError, ModelFileError

_SIZES = (
    "d_model n_heads n_kv_heads d_head d_head_v n_layers kv_rank q_rank d_shared_key concat_width "
    "fills_d_model divides_d_model"
).split()


def budget_of(model: str | None, numbers: Mapping[str, int | None]) -> HeadBudget:
    """Return the budget that a command's arguments name.

    Args:
        model: a published model's name, a folder or file with a config, or what `load` takes.
        numbers: sizes by their names in HeadBudget, None where not given.

    Raises:
        InputError: neither a model nor enough numbers, or both.
        ModelFileError: a config that cannot be read.
    """
    given: dict[str, Any] = {k: v for k, v in numbers.items() if v is not None}
    if model is None:
        if "d_model" not in given or "n_heads" not in given:
            hint = "For instance: wvprobe budget --d-model 12288 --heads 96 --layers 96"
            raise InputError(message("MODEL", "given, or --d-model and --heads", None, hint))
        return HeadBudget(**given)
    if given:
        raise InputError(message("MODEL", "left out where sizes are given", model))
    known = known_architectures()
    if model in known:
        return known[model]
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.name.endswith(".json"):
        return HeadBudget.from_config(_read(path))
    from wvprobe.models import load

    return HeadBudget.from_model(load(model, audit=False))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {path} as a config: {error}") from error


def described(
    budget: HeadBudget, *, context: int, dtype: str, others: bool
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return a budget as one document of plain numbers, and as titled tables of text.

    Args:
        budget: the budget.
        context: how many tokens a token looks at.
        dtype: of the cache.
        others: whether alternatives are listed.
    """
    flops = budget.flops(context)
    cache = budget.kv_cache_bytes(dtype) if budget.causal else None
    document: dict[str, Any] = {
        "name": budget.name,
        "kind": budget.kind,
        "sizes": {name: getattr(budget, name) for name in _SIZES},
        "layer_parameters": budget.layer_parameters,
        "attention_parameters": budget.n_attention,
        "rest_parameters": budget.rest_parameters,
        "parameters": None if budget.rest is None else budget.n_parameters,
        "published_parameters": budget.published_parameters,
        "kv_cache_bytes_per_token": cache,
        "dtype": dtype,
        "context": context,
        "flops_per_token": flops,
        "source": budget.source,
    }
    tables = [
        (f"{budget.name or 'heads'} ({budget.kind})", _two_columns(document["sizes"], "size")),
        (f"parameters ({_total(budget)})", _written(budget.to_frame())),
        (f"one token that looks at {context:,}", _two_columns(_token(document), "cost")),
    ]
    if others:
        frame = alternatives(budget, context=context, dtype=dtype).to_frame()
        document["alternatives"] = json.loads(frame.to_json(orient="records"))
        columns = (
            "kind n_heads n_kv_heads d_head d_head_max layer_qkv layer_parameters parameters_ratio "
            "kv_ratio flops_ratio breaks"
        ).split()
        tables.append(("alternatives, ratios to the heads as given", _written(frame[columns])))
    return document, tables


def _total(budget: HeadBudget) -> str:
    attention = f"attention {budget.n_attention:,}"
    return attention if budget.rest is None else f"{attention}, in all {budget.n_parameters:,}"


def _token(document: Mapping[str, Any]) -> dict[str, Any]:
    flops = document["flops_per_token"]
    parts = {f"FLOPs, {part}": count for part, count in flops.items()}
    cache = document["kv_cache_bytes_per_token"]
    kept = "nothing: it looks both ways" if cache is None else cache
    return {f"cached bytes ({document['dtype']})": kept} | parts | {"FLOPs": sum(flops.values())}


def _two_columns(values: Mapping[str, Any], name: str) -> Any:
    import pandas

    rows = [(key, _text(value)) for key, value in values.items() if value is not None]
    return pandas.DataFrame(rows, columns=["", name])


def _written(frame: Any) -> Any:
    """Return a frame of text, whole numbers in full and shares to four digits."""
    return frame.apply(lambda column: column.map(_text))


def _text(value: Any) -> str:
    import pandas

    if isinstance(value, (bool, str)):
        return str(value).lower() if isinstance(value, bool) else value
    if pandas.isna(value):
        return ""
    # A column with blanks holds whole numbers as floats.
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"
