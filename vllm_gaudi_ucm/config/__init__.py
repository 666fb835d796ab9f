"""The whole configuration, composed of the sections of the rooms."""
