"""Reading phase logs: `gaudi-ucm phases`."""
