"""Model artifacts on this machine: where they are kept, what they are, and sample models to start with."""
