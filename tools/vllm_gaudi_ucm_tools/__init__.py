"""Developer tools of vllm-gaudi-ucm: commands of `gaudi-ucm` that a server does not need."""
