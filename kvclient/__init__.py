"""kvclient: thin clients of kvd."""
