"""The command that reckons what heads cost."""

import typer

from wvprobe.cli._app import app, examples, known_models
from wvprobe.cli._printing import AsCsv, AsJson, show


@app.command(
    epilog=examples(
        "wvprobe budget GPT-3 --alternatives",
        "wvprobe budget --d-model 12288 --heads 96 --layers 96",
        "wvprobe budget smollm2-135m --json",
    )
)
def budget(
    model: str | None = typer.Argument(
        None,
        help="A published model's name, alias, folder, config.json, GGUF file or hub name.",
        autocompletion=known_models,
    ),
    d_model: int | None = typer.Option(None, "--d-model", help="Width of the stream."),
    heads: int | None = typer.Option(None, "--heads", help="Query heads of a layer."),
    kv_heads: int | None = typer.Option(None, "--kv-heads", help="Key-value heads of a layer."),
    d_head: int | None = typer.Option(None, "--d-head", help="Width of queries and keys."),
    d_head_v: int | None = typer.Option(None, "--d-head-v", help="Width of values."),
    layers: int | None = typer.Option(None, "--layers", help="Layers of attention."),
    context: int = typer.Option(2048, "--context", help="Tokens that a token looks at."),
    dtype: str = typer.Option("bfloat16", "--dtype", help="Of the cache."),
    others: bool = typer.Option(False, "--alternatives", help="What else the heads could be."),
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Print what a model's heads cost, and what other heads would.

    As CSV: the parameters, matrix by matrix; with --alternatives the alternatives.
    """
    from wvprobe.budget import alternatives
    from wvprobe.budget._tables import budget_of, described

    numbers = {
        "d_model": d_model,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_head": d_head,
        "d_head_v": d_head_v,
        "n_layers": layers,
    }
    found = budget_of(model, numbers)
    document, tables = described(found, context=context, dtype=dtype, others=others)
    whole = alternatives(found, context=context, dtype=dtype) if others else found
    show(tables, whole=whole.to_frame(), document=document, as_json=as_json, as_csv=as_csv)
