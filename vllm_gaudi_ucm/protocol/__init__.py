"""What the scheduler and the worker send each other with a step."""
