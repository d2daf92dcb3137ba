"""The command that reads activations to disk."""

from typing import Any

import typer

from wvprobe.cli._app import Model, app, examples
from wvprobe.cli._labels import labelled
from wvprobe.cli._printing import AsCsv, AsJson, records, say, show
from wvprobe.errors import InputError


@app.command(
    epilog=examples(
        "wvprobe capture smollm2-135m --texts bank.txt --sites v,resid_post --words bank --out run",
        "wvprobe capture minilm-l6 --conllu en_ewt-ud-dev.conllu --sites v --out run --engine ray",
    )
)
def capture(
    model: Model = "smollm2-135m",
    texts: str | None = typer.Option(None, "--texts", help="A file of texts, one a line."),
    conllu: str | None = typer.Option(None, "--conllu", help="A treebank: file or folder."),
    senses: str | None = typer.Option(None, "--senses", help="Words in context: file or folder."),
    iob2: str | None = typer.Option(None, "--iob2", help="Named entities: file or folder."),
    sites: str = typer.Option(..., "--sites", help="Such as v,resid_post: commas between them."),
    out: str = typer.Option(..., "--out", help="The folder; a run that was cut short goes on."),
    words: str | None = typer.Option(
        None, "--words", help="With --texts: one word, which each of them holds."
    ),
    layers: str | None = typer.Option(None, "--layers", help="Such as 0,11; all without."),
    pool: str | None = typer.Option(None, "--pool", help="Of a word's tokens: last, first, mean."),
    batch_size: int | None = typer.Option(None, "--batch-size", help="Texts; by tokens without."),
    engine: str = typer.Option("local", "--engine", help="local, or ray: many workers."),
    workers: int | None = typer.Option(None, "--workers", help="With ray: so many."),
    threads: int | None = typer.Option(None, "--threads", help="Of torch, in every worker."),
    gpus: float = typer.Option(0, "--gpus", help="With ray: GPUs a worker."),
    address: str | None = typer.Option(None, "--address", help="Of a Ray cluster that runs."),
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Read sites of texts, or of labelled text's marked words, into a folder of safetensors.

    Killed at any moment it goes on where it stopped when it is called again. As CSV or JSON: the
    sites that lie there, with their shapes.
    """
    from wvprobe.capturing import capture_dataset

    given = {"--conllu": conllu, "--senses": senses, "--iob2": iob2}
    if (texts is None) == all(value is None for value in given.values()):
        raise InputError(f"give --texts, or one of {', '.join(given)}: what is to be read.")
    source: Any = texts
    if texts is None:
        source = labelled(conllu, "upos", senses, iob2)
    say(f"reading {texts or source.name} with {model}")
    stored = capture_dataset(
        source,
        model,
        [site.strip() for site in sites.split(",")],
        out,
        engine=engine,
        words=words,
        layers=None if layers is None else _numbers(layers),
        pool=pool,
        batch_size="auto" if batch_size is None else batch_size,
        threads=threads,
        workers=workers,
        gpus=gpus,
        address=address,
    )
    frame = _listed(stored)
    settings = stored.provenance.settings
    lost = settings.get("lost", 0)
    told = f"; {lost} words without tokens of their own are left out" if lost else ""
    title = f"{len(stored.texts)} items in {stored.folder}{told}"
    document = {
        "model": stored.provenance.model,
        "folder": str(stored.folder.resolve()),
        "items": len(stored.texts),
        "lost": lost,
        "shards": stored.store.manifest.n_batches,
        "sites": records(frame),
    }
    show([(title, frame)], whole=frame, document=document, as_json=as_json, as_csv=as_csv)


def _numbers(given: str) -> list[int]:
    try:
        return [int(number) for number in given.split(",")]
    except ValueError as error:
        expected = "`--layers` must be numbers with commas between them, such as 0,11"
        raise InputError(f"{expected}. Got {given!r} instead.") from error


def _listed(stored: Any) -> Any:
    import pandas

    rows = [
        {
            "site": name,
            "axes": " ".join(site.axes),
            "shape": "×".join(map(str, site.shape)),
            "dtype": str(site.dtype).removeprefix("torch."),
            "mb": site.nbytes / 2**20,
        }
        for name, site in stored.values.items()
    ]
    return pandas.DataFrame(rows)
