"""Models on disk and in memory: bringing them in, identifying them, loading them."""
