"""What makes vLLM faster here and may be left out: a file per fast path."""
