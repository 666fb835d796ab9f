"""Linear layers of quantised checkpoints: how each format is loaded, and by what it is computed."""
