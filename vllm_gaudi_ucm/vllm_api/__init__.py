"""What depends on the version of vLLM or torch."""
