"""The sparse methods that come with the plugin."""
