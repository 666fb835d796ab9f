"""Several workers of one engine: how they communicate, and what they have to agree on."""
