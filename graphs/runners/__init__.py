"""Captures a function once per static shape and replays it: one protocol, one implementation per kind of graph."""
