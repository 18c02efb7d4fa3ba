"""The OpenAI shapes: chat completions, completions, responses, models."""
