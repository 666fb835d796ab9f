"""Static shapes: buckets and what is captured and replayed for them."""
