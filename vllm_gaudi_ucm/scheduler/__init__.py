"""Our scheduler class and its parts."""
