"""A vLLM server with the plug-in: equal replies, scores, and a load of requests."""
