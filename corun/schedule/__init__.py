"""The policies: which requests run in the next step. Pure Python: no torch, no vLLM."""
