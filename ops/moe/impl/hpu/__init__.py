"""Operators of Gaudi's software, and torch's."""
