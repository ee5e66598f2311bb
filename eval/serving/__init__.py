"""Serving in vLLM: the page layout, the managers of its blocks, and the plug-in. Only the plug-in imports vLLM."""
