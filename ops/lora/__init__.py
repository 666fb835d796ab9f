"""Adapters of low rank (LoRA) on a linear layer: each row adds the product of its own adapter."""
