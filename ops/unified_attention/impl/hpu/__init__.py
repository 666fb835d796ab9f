"""Operators of Gaudi's software and of torch, for a Gaudi."""
