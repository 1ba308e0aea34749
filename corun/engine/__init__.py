"""The only package that imports vLLM: one file per seam, checked at start-up by ``seams``."""
