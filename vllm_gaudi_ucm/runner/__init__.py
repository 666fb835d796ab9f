"""From the scheduler's output to sampled tokens: request table, batch plan, step tensors, forward, sampling."""
