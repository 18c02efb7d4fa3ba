"""`tools/quickstart`: the reuse of one document, shown on the real daemon and the demo model."""
