"""Operations on the KV cache that write to its slots."""
