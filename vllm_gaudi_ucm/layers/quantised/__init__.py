"""Linear layers of quantised checkpoints: how each format is loaded and computed."""
