"""Registry of nodes and shards, route choice and sessions; an HTTP face for nodes and for gateways running apart."""
