"""What a tensor is: dtypes, boxes, layouts, manifests. Pure, standard library only."""
