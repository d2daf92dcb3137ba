"""Commands about labelled words: what values carry, and how senses part ways."""

from typing import Any

import typer

from wvprobe.cli._app import Model, Rows, app, examples
from wvprobe.cli._printing import AsCsv, AsJson, Table, records, say, show
from wvprobe.errors import InputError


@app.command(
    epilog=examples(
        "wvprobe payload smollm2-135m",
        "wvprobe payload minilm-l6 --conllu en_ewt-ud-dev.conllu --erase 3 --csv",
    )
)
def payload(
    model: Model = "smollm2-135m",
    conllu: str | None = typer.Option(None, "--conllu", help="A treebank: file or folder."),
    senses: str | None = typer.Option(None, "--senses", help="Words in context: file or folder."),
    iob2: str | None = typer.Option(None, "--iob2", help="Named entities: file or folder."),
    column: str = typer.Option("upos", "--column", help="Of the treebank's labels."),
    label: str | None = typer.Option(
        None, "--label", help="Another label: token, position, or (of senses) pos."
    ),
    balanced: bool = typer.Option(False, "--balanced", help="Let all labels count alike."),
    words: int = typer.Option(4_000, "--words", help="At most so many words."),
    draws: int = typer.Option(200, "--draws", help="Random projections a layer."),
    site: str = typer.Option("v", "--site", help="Whose heads are listed: v, q or k."),
    by: str = typer.Option("random", "--by", help="The reference that heads are ranked by."),
    erased: int = typer.Option(0, "--erase", help="Erase the label from so many of the best."),
    out: str | None = typer.Option(None, "--out", help="Folder to save the result in."),
    k: Rows = 10,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Print which heads' values carry a label beyond random projections, and v against q, k.

    Without a data set: senses of the bundled sentences. As CSV: every head of every site.
    """
    from wvprobe.models import load
    from wvprobe.value_payload import payload as run

    data = labelled(conllu, column, senses, iob2)
    score = "balanced_accuracy" if balanced else "accuracy"
    say(f"opening {model}")
    bridge = load(model)
    say(f"probing {data.name}")
    given: dict[str, Any] = {"label": label, "score": score, "limit": words}
    found = run(bridge, data, draws=draws, progress=True, **given)
    best = found.best(k, site=site, by=by)
    tables = [_best_heads(found, best, site, by)]
    document: dict[str, Any] = {
        "model": found.provenance.model,
        "label": found.label,
        "heads": records(found.to_frame()),
    }
    if found.labour is not None:
        contrasts = found.labour.contrasts_frame()
        tables.append(("v against q and k, mean over layers", contrasts))
        document["contrasts"] = records(contrasts)
    if erased:
        tables.append(_erased(bridge, data, best, erased, given))
        document["erased"] = records(tables[-1][1])
    show(tables, whole=found.to_frame(), document=document, as_json=as_json, as_csv=as_csv)
    if out is not None:
        say(f"saved: {found.save(out).resolve()}")


def _best_heads(found: Any, best: Any, site: str, by: str) -> Table:
    told = f"{found.label}, {found.score_name} of {found.n_items} words, {found.n_groups} groups"
    columns = ["layer", "head", "score", "low", "high"]
    columns += [f"excess_{name}" for name in found.references]
    shown = [c for c in columns if not best[c].isna().all()] + ["p", "q", "p_family"]
    return f"{site}, largest excess over {by} ({told})", best[shown]


def labelled(conllu: str | None, column: str, senses: str | None, iob2: str | None) -> Any:
    """Return the labelled text that options name; without any, the bundled sentences."""
    from wvprobe.datasets import load_conllu, load_iob2, load_senses

    if sum(given is not None for given in (conllu, senses, iob2)) > 1:
        raise InputError("give one of --conllu, --senses and --iob2, not several.")
    if conllu is not None:
        return load_conllu(conllu, column=column)
    return load_senses(senses) if iob2 is None else load_iob2(iob2)


def _erased(model: Any, data: Any, best: Any, count: int, given: dict[str, Any]) -> Table:
    from wvprobe.value_payload import erase

    heads = [(int(a), int(b)) for a, b in best[["layer", "head"]].head(count).to_numpy()]
    say(f"erasing {len(heads)} heads")
    frame = erase(model, data, heads=heads, progress=True, **given).to_frame()
    columns = ["layer", "head", "place", "before", "erased", "control"]
    columns += ["excess_loss", "excess_loss_low", "excess_loss_high", "p_family"]
    return "label erased from v, against random directions of equal energy", frame[columns]


@app.command(
    epilog=examples("wvprobe drift smollm2-135m --word bank", "wvprobe drift minilm-l6 --csv")
)
def drift(
    model: Model = "smollm2-135m",
    senses: str | None = typer.Option(
        None, "--senses", help="A file of words in context; the bundled set without."
    ),
    word: str | None = typer.Option(None, "--word", help="One word of the set."),
    out: str | None = typer.Option(None, "--out", help="Folder for the result and its figure."),
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Print, layer by layer, how far the senses of words part ways."""
    from wvprobe.contextual_drift import drift as run
    from wvprobe.contextual_drift._tables import described
    from wvprobe.datasets import load_senses
    from wvprobe.models import load

    data = load_senses(senses)
    data = data if word is None else data.only(word)
    say(f"opening {model}")
    bridge = load(model)
    say(f"reading {len(data)} sentences")
    result = run(bridge, data)
    document, title, frame = described(result)
    if out is not None:
        page = result.save(out) / "figure.html"
        result.figure().write_html(page)
        say(f"wrote {page.parent.resolve()}: result.json, tensors.safetensors, figure.html")
    show([(title, frame)], whole=frame, document=document, as_json=as_json, as_csv=as_csv)
