"""Operations on the KV cache: what is written to its slots."""
