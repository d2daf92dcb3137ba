"""Errors a user can meet.

Every one is a :class:`WvprobeError` and also the built-in it resembles, so that both
``except WvprobeError`` and ``except ValueError`` do what their reader expects.
"""


class WvprobeError(Exception):
    """Base of every error that wvprobe raises on purpose.

    Examples:
        >>> try:
        ...     wvprobe.find_word(model, "The riverbank.", "bank")
        ... except wvprobe.WvprobeError as error:
        ...     type(error).__name__, isinstance(error, ValueError)
        ('WordError', True)
    """


class InputError(WvprobeError, ValueError):
    """An argument has a value that cannot be used."""


class ShapeError(InputError):
    """A tensor has another shape than the one its role asks for."""


class TextLengthError(InputError):
    """A text has more tokens than the model reads."""


class WordError(WvprobeError, ValueError):
    """A word cannot be found, or not without guessing, in a text."""


class SharedTokenError(WordError):
    """A word shares a token with the characters around it."""


class NoTokenError(WordError):
    """A word has no token: the tokenizer leaves its characters out."""


class TokenizerError(WvprobeError, ValueError):
    """A tokenizer is missing, or does not do what is asked of it."""


class SpellingError(TokenizerError):
    """The tokens of a text cannot be matched to its characters."""


class UnsupportedError(WvprobeError, NotImplementedError):
    """The model's architecture makes the request meaningless, or inexact."""


class UnknownModelError(WvprobeError, LookupError):
    """No model is known, or reachable, under this name."""


class ModelFileError(WvprobeError, OSError):
    """A model's file or folder is unreadable, incomplete or not what it says."""


class DownloadError(WvprobeError, ConnectionError):
    """The package index did not deliver."""


class IntegrityError(WvprobeError, ValueError):
    """A file's content does not have the hash that it must have."""


class DiskSpaceError(WvprobeError, OSError):
    """There is not enough room on the disk."""


class StoreError(WvprobeError, OSError):
    """A folder of stored activations is incomplete, in use, unreadable or of another capture."""


class MissingPackageError(WvprobeError, ImportError):
    """A package that an extra of wvprobe brings is not installed."""


class WorkerError(WvprobeError, RuntimeError):
    """Workers of a cluster died again and again, or are unlike the process that asked for them."""


class DeviceError(WvprobeError, RuntimeError):
    """The device asked for is not there."""


class MemoryLimitError(WvprobeError, MemoryError):
    """Not even the smallest batch fits into memory."""


class AuditError(WvprobeError, RuntimeError):
    """Weights read out of a model do not reproduce what the model does."""


class DataError(WvprobeError, ValueError):
    """A file of labelled text does not hold what its format asks for; the line is named."""
