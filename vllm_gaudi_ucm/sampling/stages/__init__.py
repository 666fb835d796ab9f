"""The stages of sampling on the device, one recipe per file and number of rows, and their replacements on the host."""
