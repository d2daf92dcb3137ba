"""Activations of whole data sets to disk, in this process or by workers of a Ray cluster."""

from wvprobe.capturing._dataset import capture_dataset

__all__ = ["capture_dataset"]
