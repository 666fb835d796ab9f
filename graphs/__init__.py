"""Static shapes: buckets, their choice and look-up, and the graphs that are captured and replayed for them."""
