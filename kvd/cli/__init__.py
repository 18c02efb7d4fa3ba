"""The `kvd` command: one module per verb, loaded only when asked for."""
