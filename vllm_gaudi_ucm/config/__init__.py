"""The whole configuration, composed of the rooms' sections."""
