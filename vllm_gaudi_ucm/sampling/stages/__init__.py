"""What sampling does on the device, one recipe per file and number of rows, and what it does on the host instead."""
