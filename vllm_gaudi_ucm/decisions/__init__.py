"""What is decided before a step exists, and asked by the worker, by doctor and by plan."""
