"""The Anthropic shapes: messages, count_tokens."""
