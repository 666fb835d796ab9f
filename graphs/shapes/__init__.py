"""Shapes of steps: buckets, the largest step of a server, and observed steps."""
