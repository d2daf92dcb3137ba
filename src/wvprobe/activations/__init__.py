"""Activations of chosen sites, layers and words: in memory, or on disk and in any amount."""

from wvprobe.activations._batches import PADDED_DTYPES, batches_of, padded
from wvprobe.activations._capture import capture, read_sites
from wvprobe.activations._result import Activations
from wvprobe.activations._run import LONG_WORK, Run, SitePlan, checked_pool
from wvprobe.activations._stored import StoredActivations, open_store
from wvprobe.activations._storing import ShardMaker, StoredCapture

__all__ = [
    "LONG_WORK",
    "PADDED_DTYPES",
    "Activations",
    "Run",
    "ShardMaker",
    "SitePlan",
    "StoredActivations",
    "StoredCapture",
    "batches_of",
    "capture",
    "checked_pool",
    "open_store",
    "padded",
    "read_sites",
]
