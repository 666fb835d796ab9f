"""Stores of KV blocks outside the device: host memory, files, Redis."""
