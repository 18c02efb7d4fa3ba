"""The front: the daemon's resident process. It never imports mlx or numpy."""
