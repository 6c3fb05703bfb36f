"""A load generator for any OpenAI-compatible server: workloads, arrivals, client processes and measurements.

Speaks as much HTTP/1.1 and SSE as needed, and knows nothing of the engine; imports no torch.
"""
