"""Implementations of the gated delta rule."""
