"""The command line `gaudi-ucm`: one file per command."""
