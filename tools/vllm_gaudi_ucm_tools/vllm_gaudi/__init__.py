"""Buckets for servers with Intel's plugin vllm-gaudi: a replica of its bucketing, and a search for better ones."""
