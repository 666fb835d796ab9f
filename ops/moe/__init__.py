"""Mixture of experts: the chosen experts of each row, weighted and summed."""
