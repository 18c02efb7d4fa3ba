"""GGUF files, read and turned into MLX model folders. Needs numpy and tokenizers, no mlx."""
