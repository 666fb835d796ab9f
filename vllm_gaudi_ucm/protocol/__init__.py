"""Messages between the scheduler and the worker, sent with a step."""
