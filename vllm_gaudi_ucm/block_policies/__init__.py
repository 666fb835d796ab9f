"""Policies of the KV cache's blocks: each is a file here and a line in `policies.POLICIES`."""
