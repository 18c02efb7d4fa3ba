"""kv-gateway: OpenAI- and Anthropic-compatible HTTP as a thin client of the daemon.

Nothing is imported here: `kvclient.gateway.volatile` is pure and used without the `http` extra.
"""
