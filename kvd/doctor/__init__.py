"""Checks of this machine for `kvd doctor`: each says what it found and, where that is not good, what to do."""
