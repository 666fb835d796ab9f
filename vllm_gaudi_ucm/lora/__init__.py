"""Adapters of requests (LoRA): their slots, their weights in the model's layers, and the rows of a step."""
