"""Commands on jobs that share a cluster, and on rented accelerators."""
