"""The paged KV cache of one model: identity, prefix index, block allocator, pool, attention.

Pure modules (no mlx): `chain`, `layout`, `prefix`, `blocks`, `placement`, `plan`. The facade for the engine is `paged`.
"""
