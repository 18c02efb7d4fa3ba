"""KV blocks on SSD: safetensors shards, an LMDB index beside them, one byte ledger.

Workers import `files` and `shard` (no LMDB there). The owner, the front or an offline `kvd cache`, imports `store`; the
verbs people call are in `verbs`.

    files kv                 doors to the file system and to LMDB; faults lossy: their faulty twins
    header shard             the format, and its bytes in and out
    table evict ledger admit wear tree departed preview     pure
    core                     the owner's state: measure, make room, drop
    opening scan check adopt start: names and sizes against the index; rebuild
    lookup reserve commit    what workers ask for
    notes                        hits, last uses and sightings, in batches
    pins upkeep transfer listing verbs     what people ask for
"""
