"""Activations of whole data sets to disk, in this process or by workers of a Ray cluster."""

from wvprobe.capturing._dataset import capture_dataset
from wvprobe.capturing._source import Source, read_source

__all__ = ["Source", "capture_dataset", "read_source"]
