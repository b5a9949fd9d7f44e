"""What a tensor is: dtypes, boxes, layouts, manifests. Pure: it does no I/O."""
