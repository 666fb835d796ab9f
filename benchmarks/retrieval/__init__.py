"""A small model that looks records up in a long context, and how it is trained: the task of the sparse methods."""
