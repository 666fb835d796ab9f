"""Policies of the KV cache's blocks: each is a folder here and a line in `policies.POLICIES`."""
