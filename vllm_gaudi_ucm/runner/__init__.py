"""From the scheduler's output to sampled tokens: request table, batch plan, staging, forward, sampling."""
