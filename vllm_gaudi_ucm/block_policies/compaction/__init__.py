"""Compaction: blocks in use follow each other."""
