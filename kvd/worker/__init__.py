"""The worker: one process per loaded model. Its engine thread owns MLX, all other threads see host bytes only."""
