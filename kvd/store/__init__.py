"""KV blocks on SSD: safetensors shards, an LMDB index beside them, one byte ledger.

Workers import `files` and `shard` only (no LMDB there). The owner, the front or an offline `kvd cache`, imports
`store`. Pure modules: `header`, `ledger`, `evict`, `admit`, `tree`.
"""
