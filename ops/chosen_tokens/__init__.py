"""Attention over tokens that each row chooses by itself, by scores of an indexer (DeepSeek sparse attention)."""
