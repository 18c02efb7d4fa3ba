"""Fault campaigns of the store, shared by `tools/torture` and the tests."""
