"""Turns the scheduler's output into sampled tokens: request table, batch plan, step tensors, forward, sampling."""
