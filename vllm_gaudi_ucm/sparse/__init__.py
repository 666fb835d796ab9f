"""UCM sparse methods, which decide which cached blocks a request attends to."""
