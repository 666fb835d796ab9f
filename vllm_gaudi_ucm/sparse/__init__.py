"""UCM sparse methods: which cached blocks a request attends to."""
