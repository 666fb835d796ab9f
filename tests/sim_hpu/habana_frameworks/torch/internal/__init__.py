"""The bridge's configuration."""
