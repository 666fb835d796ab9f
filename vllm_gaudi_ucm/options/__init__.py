"""Strict options, their errors, and the reading of configuration files: the ground floor."""
