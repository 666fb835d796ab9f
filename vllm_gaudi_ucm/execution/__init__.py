"""How a planned step is computed: at its true shape, or padded to a bucket and replayed."""
