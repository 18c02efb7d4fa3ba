"""Programs that own MLX, run as children with the BLAS that the daemon's workers get."""
