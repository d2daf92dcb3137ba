"""Plain texts of a file."""

from pathlib import Path

from wvprobe.datasets._files import existing, lines
from wvprobe.errors import DataError


def load_texts(path: str | Path) -> tuple[str, ...]:
    r"""Read texts, one a line; empty lines are left out.

    Raises:
        DataError: there is no such file, or no text in it, or it is not UTF-8.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from wvprobe.datasets import load_texts
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "texts.txt")
        ...     _ = path.write_text("One.\n\nTwo.\n")
        ...     load_texts(path)
        ('One.', 'Two.')
    """
    source = existing(path)
    if source.is_dir():
        raise DataError(f"{source} is a folder. Name a file with one text a line.")
    found = tuple(line.strip() for _, line in lines(source) if line.strip())
    if not found:
        raise DataError(f"{source} holds no texts.")
    return found
