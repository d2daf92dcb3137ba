"""Commands about models as a whole: those that come packaged, and audits."""

import typer

from wvprobe.cli._app import Model, app, examples
from wvprobe.cli._printing import AsCsv, AsJson, show


@app.command(epilog=examples("wvprobe models", "wvprobe models --json"))
def models(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the packaged models: sizes, licences, cached or not."""
    import pandas

    from wvprobe._packaged import cache_root, packaged_models

    packaged = packaged_models()
    frame = pandas.DataFrame(
        {
            "alias": [model.alias for model in packaged],
            "parameters": [model.parameters for model in packaged],
            "download_mb": [model.download_mb for model in packaged],
            "disk_mb": [model.disk_mb for model in packaged],
            "licence": [model.licence for model in packaged],
            "cached": [model.cached for model in packaged],
        }
    )
    listed = frame.assign(
        parameters=[f"{count / 1e6:.1f} M" for count in frame["parameters"]],
        download_mb=[f"{size} MB" for size in frame["download_mb"]],
        disk_mb=[f"{size} MB" for size in frame["disk_mb"]],
        cached=["yes" if cached else "no" for cached in frame["cached"]],
    ).rename(columns={"download_mb": "download", "disk_mb": "on disk"})
    title = f"cache: {cache_root()} (WVPROBE_CACHE names another)"
    show([(title, listed)], whole=frame, as_json=as_json, as_csv=as_csv)
    if not as_json and not as_csv:
        typer.echo("")
        for model in packaged:
            typer.echo(f"{model.alias}: {model.description}")


@app.command(epilog=examples("wvprobe audit", "wvprobe audit ./my-model --json"))
def audit(model: Model = "smollm2-135m", as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """Hold weights read out of a model against what the model computes; exit 1 if they differ."""
    from wvprobe.auditing import audit as run
    from wvprobe.models import load

    result = run(load(model, audit=False))
    frame = result.to_frame()
    listed = frame[["status", "error", "identity", "reason"]].assign(
        error=["" if error != error else f"{error:.1e}" for error in frame["error"]]
    )
    title = f"{result.provenance.model}: {'the audit holds' if result.ok else 'the audit failed'}"
    show([(title, listed)], whole=frame, as_json=as_json, as_csv=as_csv)
    if not result.ok:
        raise typer.Exit(1)
