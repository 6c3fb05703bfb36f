"""The OpenAI-compatible server. Thin: it knows requests, text and HTTP, and no tensors."""
