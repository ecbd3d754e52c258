"""Launch of a ``Trainer``'s workers on the nodes of a Ray cluster."""
