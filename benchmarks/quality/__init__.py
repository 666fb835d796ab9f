"""Measures which answers sparse methods keep: generated tasks, several methods, equal numbers of tokens read."""
