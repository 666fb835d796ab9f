"""Several workers of one engine: how they talk to each other, and what they have to agree on."""
