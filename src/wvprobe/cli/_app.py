"""The application that every room's commands belong to, and what their options share."""

from typing import Annotated

import typer

app = typer.Typer(
    name="wvprobe",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options(debug: bool = typer.Option(False, "--debug", help="Show tracebacks.")) -> None:
    """Measure what attention heads carry, with weights that are checked against the model.

    Tables go to stdout, steps to stderr. Exit codes: 0, all is well; 1, a finding such as a failed
    audit, or the network or the disk failed; 2, wrong use.
    """
    # main() takes --debug out wherever it stands; the option is here for the help text.


def known_models(incomplete: str) -> list[str]:
    """Return the models that can be named without a path, for the shell's completion."""
    from wvprobe._packaged import packaged_models

    names = [model.alias for model in packaged_models()]
    return [name for name in names if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(help="Alias, folder, GGUF file or hub name.", autocompletion=known_models),
]
Rows = Annotated[int, typer.Option("-k", min=1, help="How many rows of each table.")]


def examples(*lines: str) -> str:
    """Return examples as help shows them, a line each."""
    return "\b\n" + "\n".join([f"Example{'s' * (len(lines) > 1)}:", *lines])
