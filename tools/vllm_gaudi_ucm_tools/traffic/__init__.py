"""Synthetic traffic: mixes of requests, simulated step by step."""
