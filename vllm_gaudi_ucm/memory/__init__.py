"""The worker's part of block policies: it moves and copies blocks as the scheduler orders."""
