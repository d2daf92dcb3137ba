"""The command line: each subcommand parses its arguments and calls one function."""

import sys
from collections.abc import Sequence

from wvprobe.cli import _budget, _capture, _heads, _labels, _models, _report
from wvprobe.cli._app import app
from wvprobe.errors import (
    AuditError,
    DiskSpaceError,
    DownloadError,
    IntegrityError,
    MemoryLimitError,
    MissingPackageError,
    WorkerError,
    WvprobeError,
)

__all__ = ["app", "main"]

# Every room puts its commands into the application as it is imported.
ROOMS = (_models, _report, _heads, _labels, _capture, _budget)
# Not the user's doing: the network, the disk, the memory, what is installed, workers elsewhere, or
# a model that is read wrongly.
_NOT_WRONG_USE = (
    *(AuditError, DiskSpaceError, DownloadError, IntegrityError, MemoryLimitError),
    *(MissingPackageError, WorkerError),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error that a user can cause is one line.

    Exit codes: 0, all is well; 1, a finding such as a failed audit, or the network or the disk
    failed; 2, wrong use.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app([argument for argument in given if argument != "--debug"], prog_name="wvprobe")
    except WvprobeError as error:
        if debug:
            raise
        print(f"wvprobe: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1 if isinstance(error, _NOT_WRONG_USE) else 2)
