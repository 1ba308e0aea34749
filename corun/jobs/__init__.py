"""Jobs of ``corun generate``: reading, checking, recording and resuming. No torch, no vLLM."""
