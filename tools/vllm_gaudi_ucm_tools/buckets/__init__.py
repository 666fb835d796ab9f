"""Chooses buckets before a server runs: `gaudi-ucm plan` and `gaudi-ucm tune`."""
