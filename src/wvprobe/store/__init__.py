"""Activations on disk: files and tensors, never a model.

    DIR/manifest.json               what shaped the numbers: settings, versions, the batch plan
    DIR/items.arrow                 a row an item: text, word, positions, tokens
    DIR/shards/000000.safetensors   one a batch of the plan: site -> [layer, row, …]
    DIR/index/000000.parquet        a row a vector: item, word, tokens, site, layer, checksum
    DIR/lock                        held by whoever writes

A file is written under another name, synced and renamed; a shard counts once its index is there.
One `Writer` at a time holds the lock and says which batches are missing; any number of processes
may write these for it with `write_shard`, each batch by one of them.
"""

from wvprobe.store._files import count_try
from wvprobe.store._items import Column, Item, ItemsFile, StoredItems
from wvprobe.store._manifest import Manifest, SiteFacts
from wvprobe.store._reader import Store, StoredSite, items_of
from wvprobe.store._shards import is_whole, write_shard
from wvprobe.store._writer import Writer

__all__ = [
    "Column",
    "Item",
    "ItemsFile",
    "Manifest",
    "SiteFacts",
    "Store",
    "StoredItems",
    "StoredSite",
    "Writer",
    "count_try",
    "is_whole",
    "items_of",
    "write_shard",
]
