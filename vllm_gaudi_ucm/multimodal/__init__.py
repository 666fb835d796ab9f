"""Items of prompts that are no text: their embeddings, and what a model reads of them in a step."""
