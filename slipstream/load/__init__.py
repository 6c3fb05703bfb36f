"""A load generator for any OpenAI-compatible server: what is sent, when, from where, and what came back.

Knows HTTP/1.1 and server-sent events as far as they are needed, and nothing of the engine; imports no torch.
"""
