"""Readers of traffic: one file for each kind of log."""
