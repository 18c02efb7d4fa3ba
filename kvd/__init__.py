"""kvd: the daemon."""
