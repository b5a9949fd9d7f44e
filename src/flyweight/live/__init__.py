"""One round: a publisher's weights into the replicas that listen."""
